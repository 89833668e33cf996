/* NVML for tests, which answers as the recording in devices.h: of GPUs that nobody uses. */
#include <string.h>

struct device {
    const char *uuid, *name, *address;
    unsigned long long memory_bytes, free_bytes, numa_nodes;
    unsigned mig_on;
};
#include "devices.h"

enum { OK = 0, BAD_ARGUMENT = 2, SMALL = 7 };
#define COUNT (sizeof devices / sizeof *devices)
#define MOST_SHOWN 32

typedef const struct device *Handle;
struct memory {
    unsigned long long total, free, used;
};
struct pci {
    char short_address[16];
    unsigned domain, bus, device, id, subsystem;
    char address[MOST_SHOWN];
};

static int copy(const char *text, char *to, unsigned size) {
    if (strlen(text) >= size)
        return SMALL;
    strcpy(to, text);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == OK ? "Success" : "Unknown Error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = COUNT;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned number, Handle *device) {
    if (number >= COUNT)
        return BAD_ARGUMENT;
    *device = &devices[number];
    return OK;
}

int nvmlDeviceGetUUID(Handle device, char *text, unsigned size) { return copy(device->uuid, text, size); }
int nvmlDeviceGetName(Handle device, char *text, unsigned size) { return copy(device->name, text, size); }

int nvmlDeviceGetPciInfo_v3(Handle device, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    return copy(device->address, pci->address, sizeof pci->address);
}

int nvmlDeviceGetMemoryInfo(Handle device, struct memory *memory) {
    *memory = (struct memory){device->memory_bytes, device->free_bytes, device->memory_bytes - device->free_bytes};
    return OK;
}

int nvmlDeviceGetMemoryAffinity(Handle device, unsigned words, unsigned long long *nodes, unsigned scope) {
    (void)scope;
    memset(nodes, 0, words * sizeof *nodes);
    *nodes = device->numa_nodes;
    return OK;
}

int nvmlDeviceGetMigMode(Handle device, unsigned *now, unsigned *next) {
    *now = *next = device->mig_on;
    return OK;
}

int nvmlDeviceGetUtilizationRates(Handle device, unsigned percent[2]) {
    (void)device;
    percent[0] = percent[1] = 0;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *count, void *processes) {
    (void)device;
    (void)processes;
    *count = 0;
    return OK;
}
