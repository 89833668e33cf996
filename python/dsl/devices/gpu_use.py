"""How much the processes of workers use their GPUs. The driver is asked only when somebody looks."""

from __future__ import annotations

from dsl._record import Record
from dsl.devices.masks import read_entries
from dsl.machine.kernel_files import has_nvidia_driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from dsl.devices.nvml import Driver

    Use: TypeAlias = tuple[int, int]
    """Percent of the time in which the GPU computed (-1: unknown), bytes of its memory (0: none)."""

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
        from dsl.devices.nvml import Nvml, NvmlError

        try:
            if self._driver is None:
                self._driver = self._open() if self._open else Nvml().__enter__()  # open until the job ends
            driver = self._driver
            return [_gpu(driver, number) for number in range(driver.ask("count"))]
        except NvmlError:
            self._is_closed = True
            return []


def _gpu(driver: Driver, number: int) -> Gpu:
    from dsl.devices.nvml import NvmlError, ask_fact

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
    entries = read_entries(mask)
    if entries is None:
        return gpus[local_rank] if local_rank < len(gpus) else None
    if not entries:
        return None
    name = entries[0] if len(entries) == 1 else entries[local_rank] if local_rank < len(entries) else ""
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((gpu for gpu in gpus if name and gpu.uuid.startswith(name)), None)
