"""CPUs and NUMA nodes of this machine, read from ``/proc`` and ``/sys``.

Sources: the kernel's ``Documentation/ABI/stable/sysfs-devices-node`` and ``sysfs-devices-system-cpu``, and
``Mems_allowed_list`` of proc_pid_status(5).
"""

from __future__ import annotations

import os

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


@record
class NumaNode:
    """A NUMA node, its online CPUs (none if it is memory alone), and whether workers may allocate on it."""

    number: int
    cpus: tuple[int, ...]
    usable_memory: bool = True


@record
class Topology:
    """NUMA nodes, ascending by number, and the CPUs of each physical core that was asked for."""

    numa_nodes: tuple[NumaNode, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()


def parse_kernel_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: ``"0-2,5"`` -> (0, 1, 2, 5); blank -> ()."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


def read_numa_nodes(root: str = "/") -> tuple[NumaNode, ...]:
    """NUMA nodes of the machine; none when the kernel does not say."""
    base = os.path.join(root, "sys/devices/system/node")
    try:
        names = os.listdir(base)
    except OSError:
        return ()
    numbers = sorted([int(name[4:]) for name in names if name.startswith("node") and name[4:].isdigit()])
    memory = _usable_memory(root, base, numbers)
    return tuple(
        [
            NumaNode(number, parse_kernel_list(_read(f"{base}/node{number}/cpulist") or ""), number in memory)
            for number in numbers
        ]
    )


def _usable_memory(root: str, base: str, numbers: list[int]) -> set[int]:
    has_memory = _read(f"{base}/has_memory")
    usable = set(numbers if has_memory is None else parse_kernel_list(has_memory))
    status = _read(os.path.join(root, "proc/self/status")) or ""
    _, found, rest = status.partition("Mems_allowed_list:")
    return usable.intersection(parse_kernel_list(rest.partition("\n")[0])) if found else usable


def read_topology(cpus: Iterable[int], root: str = "/") -> Topology:
    """Topology of the machine, with the cores that the given CPUs belong to."""
    base = os.path.join(root, "sys/devices/system/cpu")
    cores: dict[tuple[int, ...], None] = {}
    for cpu in cpus:
        siblings = parse_kernel_list(_read(f"{base}/cpu{cpu}/topology/thread_siblings_list") or "")
        cores[siblings or (cpu,)] = None
    return Topology(read_numa_nodes(root), tuple(cores))
