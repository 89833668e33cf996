"""CPUs and NUMA nodes of this machine, read from ``/proc`` and ``/sys``.

Sources: the kernel's ``Documentation/ABI/stable/sysfs-devices-node`` and ``sysfs-devices-system-cpu``, and
``Mems_allowed_list`` of proc_pid_status(5).
"""

from __future__ import annotations

import os

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@record
class NumaNode:
    """A NUMA node, its online CPUs (none if it is memory alone), and whether workers may allocate on it."""

    number: int
    cpus: tuple[int, ...]
    usable_memory: bool = True


@record
class Topology:
    """NUMA nodes, ascending by number, and what the CPUs that were asked for share with others.

    ``cores``, ``packages`` (sockets) and ``caches`` (of the last level): the online CPUs of each.
    A CPU whose package or cache the kernel does not name is in none; if it does not name the core, the CPU is
    a core of its own.
    """

    numa_nodes: tuple[NumaNode, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    packages: tuple[tuple[int, ...], ...] = ()
    caches: tuple[tuple[int, ...], ...] = ()


def parse_kernel_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: ``"0-2,5"`` -> (0, 1, 2, 5); blank -> ()."""
    numbers: list[int] = []
    # The files of Linux 5.15-rc1 end in a zero byte.
    for part in text.strip("\0 \t\n").split(","):
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


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def read_numa_nodes(root: str = "/") -> tuple[NumaNode, ...]:
    """NUMA nodes of the machine; none when the kernel does not say."""
    base = os.path.join(root, "sys/devices/system/node")
    numbers = sorted([int(name[4:]) for name in _list(base) if name[:4] == "node" and name[4:].isdigit()])
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
    """Topology of the machine, with the cores, packages and caches that the given CPUs belong to."""
    wanted = tuple(cpus)
    base = os.path.join(root, "sys/devices/system/cpu")
    return Topology(
        numa_nodes=read_numa_nodes(root),
        # Of two names the first is newer (Linux 5.3), and the second deprecated.
        cores=_groups(
            wanted,
            lambda cpu: (
                _topology_list(base, cpu, "core_cpus_list")
                or _topology_list(base, cpu, "thread_siblings_list")
                or (cpu,)
            ),
        ),
        packages=_groups(
            wanted,
            lambda cpu: (
                _topology_list(base, cpu, "package_cpus_list")
                or _topology_list(base, cpu, "core_siblings_list")
            ),
        ),
        caches=_groups(wanted, lambda cpu: _last_level_cache(f"{base}/cpu{cpu}/cache")),
    )


def _groups(cpus: Iterable[int], read: Callable[[int], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Each group once, in the order of the CPUs; the files of one member speak for all."""
    groups: list[tuple[int, ...]] = []
    known: set[int] = set()
    for cpu in cpus:
        if cpu not in known and (group := read(cpu)):
            groups.append(group)
            known.update(group)
    return tuple(groups)


def _topology_list(base: str, cpu: int, name: str) -> tuple[int, ...]:
    return parse_kernel_list(_read(f"{base}/cpu{cpu}/topology/{name}") or "")


def _last_level_cache(folder: str) -> tuple[int, ...]:
    """CPUs that share the cache of the highest level that holds data."""
    highest, shared = -1, ""
    for name in _list(folder):
        if not name.startswith("index") or (_read(f"{folder}/{name}/type") or "").strip() == "Instruction":
            continue
        level = (_read(f"{folder}/{name}/level") or "").strip()
        if level.isdigit() and int(level) > highest:
            highest, shared = int(level), _read(f"{folder}/{name}/shared_cpu_list") or ""
    return parse_kernel_list(shared)
