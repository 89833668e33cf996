"""What the NVIDIA driver says about its devices: through NVML if that works, else by the driver's files.

We import pynvml and ask NVML only if there are files of the driver. Sources: the chapter on the /proc
interface of the driver's README, and "MIG Device Names" of the MIG user guide.

Devices are in NVML's order, which is the order of their PCI addresses. CUDA has the same order if all devices
are of one kind, or with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; otherwise CUDA puts the fastest device first.
"""

from __future__ import annotations

import os

from dsl._record import Record
from dsl.devices.masks import read_entries, resolve
from dsl.machine.kernel_files import (
    has_nvidia_driver,
    list_names,
    numbered,
    pci_address,
    read_fields,
    read_numa_node,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from dsl.devices.nvml import Driver

    Open = Callable[[], AbstractContextManager[Driver]]
    """Opens NVML: `dsl.devices.nvml.Nvml`, or a recording."""


class MigInstance(Record):
    """A compute instance of a divided GPU."""

    uuid: str
    """Without NVML the old form ``MIG-GPU-.../GPU-INSTANCE/COMPUTE-INSTANCE``, which CUDA knows, too."""
    parent: str
    """UUID of its GPU."""
    gpu_instance: int
    compute_instance: int
    profile: str = ""
    """Its slice, such as ``1g.10gb``; empty if the driver does not say."""


class Device(Record):
    """A GPU. Facts that the driver does not tell are empty or None."""

    address: str
    """PCI address as in sysfs."""
    uuid: str = ""
    model: str = ""
    numa_node: int | None = None
    index: int = 0
    """Its number for NVML."""
    memory_bytes: int | None = None
    mig: tuple[MigInstance, ...] = ()
    free_bytes: int | None = None
    """Free memory when we asked; of a divided GPU as a whole."""


class Survey(Record):
    """The devices found."""

    devices: tuple[Device, ...] = ()
    source: str = ""
    """Where they come from: ``nvml`` or ``files``; empty: there is no driver."""
    problems: tuple[str, ...] = ()
    """What went wrong, one line for each problem."""


def survey(root: str = "/", nvml: Open | None = None) -> Survey:
    """Find the NVIDIA devices of this machine or container, whatever ``CUDA_VISIBLE_DEVICES`` says.

    Nothing is imported when there is no driver. ``nvml`` opens NVML. If NVML fails, the driver's files
    answer, and a line in ``problems`` says why. A GPU that does not answer is left out, and a line names it.
    """
    if not has_nvidia_driver(root):
        return Survey()
    from dsl.devices.nvml import Nvml, NvmlError

    try:
        with (nvml or Nvml)() as driver:
            devices, problems = _ask_devices(driver, root)
    except NvmlError as error:
        found = read_devices(root)
        instead = f"the driver's files in /proc show {len(found)}" if found else "none is counted"
        return Survey(
            found, "files", (f"NVML cannot be asked about NVIDIA devices: {error.reason}; {instead}",)
        )
    return Survey(devices, "nvml", problems)


def quick_devices(root: str = "/", nvml: Open | None = None) -> tuple[Device, ...]:
    """The devices of `read_devices` if the driver lists every device file, else those of `survey`.

    Opening NVML wakes every GPU, which takes tenths of a second; files answer in microseconds.
    """
    files = _device_files(root)
    base = os.path.join(root, "proc/driver/nvidia/gpus")
    minors = {read_fields(f"{base}/{name}/information").get("Device Minor", "") for name in list_names(base)}
    return read_devices(root) if files and files <= minors else survey(root, nvml).devices


def count(root: str = "/", nvml: Open | None = None) -> int | None:
    """Number of devices that the driver lets us use; None when it does not answer."""
    found = survey(root, nvml)
    return len(found.devices) if found.source == "nvml" else None


def _ask_devices(driver: Driver, root: str) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The devices that answer, and a line for each that does not.

    NVML also counts devices of other containers, but refuses to open them; they are left out silently.
    """
    from dsl.devices.nvml import NO_PERMISSION, NvmlError, ask_fact

    found, problems, refused = [], [], 0
    total = driver.ask("count")
    for number in range(total):
        try:
            label = driver.ask("device", "", number)
        except NvmlError as error:
            if error.code == NO_PERMISSION:
                refused += 1
            else:
                problems.append(f"GPU {number} is left out: {error.reason}")
            continue
        address = pci_address(ask_fact(driver, "address", label) or "")
        nodes = ask_fact(driver, "numa_nodes", label) or []
        uuid = ask_fact(driver, "uuid", label) or ""
        found.append(
            Device(
                address=address,
                uuid=uuid,
                model=ask_fact(driver, "name", label) or "",
                numa_node=nodes[0] if len(nodes) == 1 else read_numa_node(address, root),
                index=int(label),
                memory_bytes=ask_fact(driver, "memory_bytes", label),
                mig=_ask_instances(driver, label, uuid) if ask_fact(driver, "mig_on", label) else (),
                free_bytes=ask_fact(driver, "free_bytes", label),
            )
        )
    if refused and refused == total:
        raise NvmlError(NO_PERMISSION, "no permission")
    return tuple(found), tuple(problems)


def _ask_instances(driver: Driver, device: str, parent: str) -> tuple[MigInstance, ...]:
    from dsl.devices.nvml import ask_fact

    found = []
    for slot in range(ask_fact(driver, "mig_slots", device) or 0):
        label = ask_fact(driver, "mig", device, slot)
        uuid = ask_fact(driver, "uuid", label) if label else None
        if uuid:
            gpu_instance = ask_fact(driver, "gpu_instance", label) or 0
            compute_instance = ask_fact(driver, "compute_instance", label) or 0
            profile = (ask_fact(driver, "name", label) or "").partition(" MIG ")[2]
            found.append(MigInstance(uuid, parent, gpu_instance, compute_instance, profile))
    return tuple(found)


def read_devices(root: str = "/") -> tuple[Device, ...]:
    """The devices by ``/proc/driver/nvidia`` and sysfs, without the sizes of their memories.

    A device in ``/proc`` counts only if we have its device file, or if there are no device files at all (they
    are made on first use). Devices that the driver was told to leave alone do not count.
    """
    base = os.path.join(root, "proc/driver/nvidia/gpus")
    listed = [(name, read_fields(f"{base}/{name}/information")) for name in list_names(base)]
    files = _device_files(root)
    found: list[Device] = []
    places = [(pci_address(fields.get("Bus Location") or name), fields) for name, fields in listed]
    # Longer domains are higher ones.
    for address, fields in sorted(places, key=lambda each: (len(each[0]), each[0])):
        minor = fields.get("Device Minor", "")
        if fields.get("GPU Excluded") == "Yes" or (files and minor and minor not in files):
            continue
        uuid = fields.get("GPU UUID", "")
        if "?" in uuid:
            uuid = ""  # the driver has not looked yet
        found.append(
            Device(
                address=address,
                uuid=uuid,
                model=fields.get("Model", ""),
                numa_node=read_numa_node(address, root),
                index=len(found),
                mig=_read_instances(root, minor, uuid),
            )
        )
    return tuple(found)


def _read_instances(root: str, minor: str, parent: str) -> tuple[MigInstance, ...]:
    base = os.path.join(root, f"proc/driver/nvidia/capabilities/gpu{minor}/mig")
    pairs = [
        (int(gpu[2:]), int(compute[2:]))
        for gpu in list_names(base)
        if gpu[:2] == "gi" and gpu[2:].isdigit()
        for compute in list_names(f"{base}/{gpu}")
        if compute[:2] == "ci" and compute[2:].isdigit()
    ]
    return tuple([MigInstance(f"MIG-{parent}/{gi}/{ci}", parent, gi, ci) for gi, ci in sorted(pairs)])


def visible_devices(value: str | None, found: Sequence[Device], *, alone: bool = False) -> tuple[Device, ...]:
    """The GPU behind each device that a process with this ``CUDA_VISIBLE_DEVICES`` sees, in CUDA's order.

    A process sees one MIG instance at most, the first that is named. ``alone``: the GPUs of all instances
    that are named, for workers that see one instance each.
    """
    entries = read_entries(value)
    if not entries or not entries[0].startswith("MIG-"):
        return tuple(
            [found[position] for position in resolve(value, len(found), [one.uuid for one in found])]
        )
    parents: list[Device] = []
    instances = [(instance, device) for device in found for instance in device.mig]
    for entry in entries:
        named = [device for one, device in instances if any(n.startswith(entry) for n in mig_names(one))]
        if len(named) != 1:
            break
        parents.append(named[0])
    return tuple(parents if alone else parents[:1])


def mig_names(instance: MigInstance) -> tuple[str, str]:
    """Both names of an instance: its own UUID, and the form of drivers before R470."""
    return instance.uuid, f"MIG-{instance.parent}/{instance.gpu_instance}/{instance.compute_instance}"


def _device_files(root: str) -> set[str]:
    """Minor numbers of the device files that we have."""
    return {name[6:] for name in numbered(os.path.join(root, "dev"), "nvidia")}
