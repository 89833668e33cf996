"""What the NVIDIA driver says about its devices: through NVML if that works, else by the driver's files.

We import pynvml (nvidia-ml-py) and ask NVML only if there are files of the driver. Every question goes
through `Nvml.ask` and every answer is plain data, so that the answers of a machine can be recorded and
replayed. Sources: NVIDIA's "NVML API Reference", the chapter on the /proc interface of the driver's README,
and "MIG Device Names" of the MIG user guide. Also here: how much workers use their GPUs.

Devices are in NVML's order, which is the order of their PCI addresses. CUDA has the same order if all devices
are of one kind, or with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; otherwise CUDA puts the fastest device first.
"""

from __future__ import annotations

import os

from dsl._record import Record
from dsl.devices.masks import read_entries, resolve
from dsl.machine.kernel import (
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
    from typing import Any, Protocol, TypeAlias

    class Driver(Protocol):
        """Answers questions as the driver: NVML, or a recording."""

        def ask(self, question: str, device: str = "", number: int = 0) -> Any:
            """See `Nvml.ask`."""

    Open: TypeAlias = Callable[[], AbstractContextManager[Driver]]
    """Opens NVML: `Nvml`, or a recording."""
    Use: TypeAlias = tuple[int, int]
    """Percent of the time in which the GPU computed (-1: unknown), bytes of its memory (0: none)."""


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


def _ask_devices(driver: Driver, root: str) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The devices that answer, and a line for each that does not.

    NVML also counts devices of other containers, but refuses to open them; they are left out silently.
    """
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
        return tuple([found[place] for place in resolve(value, len(found), [gpu.uuid for gpu in found])])
    parents: list[Device] = []
    instances = [(instance, gpu) for gpu in found for instance in gpu.mig]
    for entry in entries:
        named = [gpu for one, gpu in instances if any(name.startswith(entry) for name in mig_names(one))]
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


NOT_INSTALLED = 0
NO_PERMISSION = 4
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15

REASONS = {
    NOT_INSTALLED: "pynvml is not installed, install nvidia-ml-py",
    NO_PERMISSION: "this user may not open the NVIDIA devices",
    9: "the NVIDIA kernel module is not loaded",
    12: "libnvidia-ml.so.1 cannot be loaded, install the driver's libraries, or pass them into the container",
    GPU_IS_LOST: "the GPU is lost, reset it or restart the machine",
    18: "the NVIDIA kernel module and library differ in version, restart the machine or reload the module",
}


class NvmlError(Exception):
    """NVML cannot answer: NVML's return code (0: pynvml is missing), and its text for that code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def reason(self) -> str:
        """Why, and what to do about it."""
        return REASONS.get(self.code, f"the driver says: {self}")


class Nvml:
    """NVML while it is open, as a context manager. pynvml is imported on entering.

    Raises:
        NvmlError: on entering, if it cannot be opened.
    """

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> Nvml:  # noqa: PYI034  typing has no Self before 3.11
        try:
            import pynvml
        except ImportError:
            raise NvmlError(NOT_INSTALLED, "pynvml is not installed") from None
        self._nvml = pynvml
        self._call("nvmlInit")
        return self

    def __exit__(self, *_exception: object) -> None:
        try:
            self._call("nvmlShutdown")
        except NvmlError:
            return  # the answers are there already

    def _call(self, function: str, *args: Any) -> Any:
        older_driver = getattr(self._nvml, "NVMLLibraryMismatchError", AttributeError)
        try:
            return getattr(self._nvml, function)(*args)
        except self._nvml.NVMLError as error:
            raise NvmlError(getattr(error, "value", 999), str(error)) from None
        except (AttributeError, older_driver):
            raise NvmlError(FUNCTION_NOT_FOUND, f"pynvml or the driver has no {function}") from None

    def ask(self, question: str, device: str = "", number: int = 0) -> Any:
        """Ask about the driver, a device or a MIG instance. Earlier answers give the labels of devices.

        ``count``: number of devices. ``device``: label of the device of this number. ``mig``: label of a
        device's instance in this slot. ``uuid``, ``name``, ``address``, ``memory_bytes``, ``free_bytes``,
        ``used_bytes``, ``busy_percent``, ``numa_nodes``, ``mig_on``, ``mig_slots``, ``gpu_instance``,
        ``compute_instance``: facts about the device or instance with this label. ``processes``: pid and
        memory of each process that computes on it; None: unknown memory.

        Raises:
            NvmlError: there is no answer.
        """
        if question == "count":
            return int(self._call("nvmlDeviceGetCount"))
        if question == "device":
            self._handles[str(number)] = self._call("nvmlDeviceGetHandleByIndex", number)
            return str(number)
        handle = self._handles[device]
        if question == "mig":
            label = f"{device}/{number}"
            self._handles[label] = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            return label
        if question == "numa_nodes":
            # One word of 64 nodes; scope 0 is the NUMA node, as opposed to the socket.
            words = self._call("nvmlDeviceGetMemoryAffinity", handle, 1, 0)
            return [node for node in range(64) if words[0] >> node & 1]
        function, convert = _QUESTIONS[question]
        return convert(self._call(function, handle))


def ask_fact(driver: Driver, question: str, device: str, number: int = 0, without: Any = None) -> Any:
    """The driver's answer, or ``without`` it: older drivers and some models do not know every fact."""
    try:
        return driver.ask(question, device, number)
    except NvmlError:
        return without


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


_QUESTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "uuid": ("nvmlDeviceGetUUID", _text),
    "name": ("nvmlDeviceGetName", _text),
    "address": ("nvmlDeviceGetPciInfo", lambda answer: _text(answer.busId)),
    "memory_bytes": ("nvmlDeviceGetMemoryInfo", lambda answer: int(answer.total)),
    "free_bytes": ("nvmlDeviceGetMemoryInfo", lambda answer: int(answer.free)),
    "used_bytes": ("nvmlDeviceGetMemoryInfo", lambda answer: int(answer.used)),
    "busy_percent": ("nvmlDeviceGetUtilizationRates", lambda answer: int(answer.gpu)),
    "processes": (
        "nvmlDeviceGetComputeRunningProcesses",
        lambda answer: [(int(one.pid), one.usedGpuMemory) for one in answer],
    ),
    "mig_on": ("nvmlDeviceGetMigMode", lambda answer: answer[0] == 1),
    "mig_slots": ("nvmlDeviceGetMaxMigDeviceCount", int),
    "gpu_instance": ("nvmlDeviceGetGpuInstanceId", int),
    "compute_instance": ("nvmlDeviceGetComputeInstanceId", int),
}


NONE: Use = (-1, 0)


class Gpu(Record):
    """A GPU at this moment."""

    uuid: str
    busy_percent: int
    """-1: unknown."""
    used_bytes: int
    """Of all processes."""
    processes: tuple[tuple[int, int | None], ...]
    """Pids, and the bytes that each uses; None: the driver does not say."""


class GpuUse:
    """The GPUs of this machine. The driver stays open from the first question on: opening takes long."""

    def __init__(self, open_driver: Callable[[], Driver] | None = None) -> None:
        """``open_driver``: raises `dsl.devices.nvidia.NvmlError`. None: NVML, if the machine has a driver."""
        self._open = open_driver
        self._driver: Driver | None = None
        self._is_closed = open_driver is None and not has_nvidia_driver("/")

    def of(self, pids: Sequence[int], places: Sequence[tuple[int, str | None]]) -> list[Use]:
        """What each worker uses: by its pid, its local rank and its ``CUDA_VISIBLE_DEVICES``."""
        gpus = self._ask_all()
        return assign(gpus, pids, places) if gpus else [NONE] * len(pids)

    def _ask_all(self) -> list[Gpu]:
        if self._is_closed:
            return []
        try:
            if self._driver is None:
                self._driver = self._open() if self._open else Nvml().__enter__()  # open until the job ends
            driver = self._driver
            return [_gpu(driver, number) for number in range(driver.ask("count"))]
        except NvmlError:
            self._is_closed = True
            return []


def _gpu(driver: Driver, number: int) -> Gpu:
    try:
        label = driver.ask("device", "", number)
    except NvmlError:  # another container has it
        return Gpu("", -1, 0, ())
    return Gpu(
        ask_fact(driver, "uuid", label, without=""),
        ask_fact(driver, "busy_percent", label, without=-1),
        ask_fact(driver, "used_bytes", label, without=0),
        tuple(ask_fact(driver, "processes", label, without=())),
    )


def assign(gpus: Sequence[Gpu], pids: Sequence[int], places: Sequence[tuple[int, str | None]]) -> list[Use]:
    """Which worker uses which GPU, pure.

    If the driver names a worker as a process of a GPU, that is its GPU. In a container the driver may name
    none. Then a worker's GPU is the only one that it sees, or the one with its local rank among those.
    """
    used: dict[int, list[tuple[Gpu, int | None]]] = {}
    for gpu in gpus:
        for pid, size in gpu.processes:
            used.setdefault(pid, []).append((gpu, size))
    knows_pids = any(pid in used for pid in pids)
    found = []
    for pid, (local_rank, mask) in zip(pids, places, strict=False):
        if pid in used:
            of_worker = used[pid]
            sizes = [gpu.used_bytes if size is None else size for gpu, size in of_worker]
            found.append((max(gpu.busy_percent for gpu, _ in of_worker), sum(sizes)))
            continue
        own = None if knows_pids or not pid else _seen(gpus, local_rank, mask)
        found.append(NONE if own is None else (own.busy_percent, own.used_bytes))
    return found


def _seen(gpus: Sequence[Gpu], local_rank: int, mask: str | None) -> Gpu | None:
    seen = resolve(mask, len(gpus), [gpu.uuid for gpu in gpus])
    place = 0 if len(seen) == 1 and mask is not None else local_rank
    return gpus[seen[place]] if place < len(seen) else None
