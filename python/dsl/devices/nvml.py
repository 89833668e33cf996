"""The one place that speaks to NVML, the NVIDIA driver's library, through pynvml (nvidia-ml-py).

Every question goes through `Nvml.ask` and every answer is plain data, so that the answers of a machine can be
recorded and replayed. Source: NVIDIA's "NVML API Reference". Also here: how much workers use their GPUs.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.machine.kernel_files import has_nvidia_driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol, TypeAlias

    class Driver(Protocol):
        """Answers questions as the driver: NVML, or a recording."""

        def ask(self, question: str, device: str = "", number: int = 0) -> Any:
            """See `Nvml.ask`."""

    Use: TypeAlias = tuple[int, int]
    """Percent of the time in which the GPU computed (-1: unknown), bytes of its memory (0: none)."""


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
        """``open_driver``: raises `dsl.devices.nvml.NvmlError`. None: NVML, if the machine has a driver."""
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
    from dsl.devices.masks import read_entries

    entries = read_entries(mask)
    if entries is None:
        return gpus[local_rank] if local_rank < len(gpus) else None
    if not entries:
        return None
    name = entries[0] if len(entries) == 1 else entries[local_rank] if local_rank < len(entries) else ""
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((gpu for gpu in gpus if name and gpu.uuid.startswith(name)), None)
