"""CPUs and NUMA nodes of this machine, read from ``/proc`` and ``/sys``.

Sources: the kernel's ``Documentation/ABI/stable/sysfs-devices-node`` and ``sysfs-devices-system-cpu``, and
``Mems_allowed_list`` of proc_pid_status(5).
"""

from __future__ import annotations

import os

from dsl._record import Record, kept
from dsl.lists import parse_range
from dsl.machine.kernel_files import numbered, read_fact, read_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Groups = tuple[tuple[int, ...], ...]

CPU_FOLDER = "sys/devices/system/cpu"


class NumaNode(Record):
    """A NUMA node, its online CPUs (none if it has only memory), and whether workers may allocate on it."""

    number: int
    cpus: tuple[int, ...]
    usable_memory: bool = True


class Topology(Record):
    """NUMA nodes, ascending by number, and the cores of the requested CPUs: a tuple of CPUs for each core."""

    numa_nodes: tuple[NumaNode, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()


def parse_kernel_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: ``"0-2,5"`` -> (0, 1, 2, 5); blank -> ()."""
    ranges = [parse_range(part) for part in text.strip("\0 \t\n").split(",")]
    return tuple([number for ends in ranges if ends for number in range(ends[0], ends[1] + 1)])


class Cpus:
    """CPUs of the machine below ``root``, read on first use: large machines have hundreds of such files.

    ``allowed``: the CPUs that the answers are about; None: those of the affinity mask.
    """

    def __init__(self, root: str = "/", allowed: Iterable[int] | None = None) -> None:
        self._root, self._asked = root, allowed

    @kept
    def allowed(self) -> tuple[int, ...]:
        """The affinity mask that workers would inherit, ascending."""
        return tuple(sorted(os.sched_getaffinity(0) if self._asked is None else self._asked))

    @kept
    def room(self) -> int:
        """How many CPUs may be used at a time: those of the mask, or fewer if a control group leaves less."""
        from dsl.machine.cgroups import room_left

        quota = room_left(self._root).cpus
        return len(self.allowed) if quota is None else min(len(self.allowed), max(int(quota), 1))

    @kept
    def numa_nodes(self) -> tuple[NumaNode, ...]:
        """NUMA nodes of the machine; none when the kernel does not say."""
        base = os.path.join(self._root, "sys/devices/system/node")
        lists = {int(name[4:]): read_fact(f"{base}/{name}/cpulist") for name in numbered(base, "node")}
        has_memory = read_fact(f"{base}/has_memory")
        usable = set(parse_kernel_list(has_memory) if has_memory else lists)
        allowed = read_fields(os.path.join(self._root, "proc/self/status")).get("Mems_allowed_list")
        if allowed is not None:
            usable &= {*parse_kernel_list(allowed)}
        return tuple(
            [NumaNode(node, parse_kernel_list(lists[node]), node in usable) for node in sorted(lists)]
        )

    @kept
    def topology(self) -> Topology:
        """The NUMA nodes, and the cores of the CPUs that are allowed."""
        cores = self._groups(
            lambda cpu: self._listed(cpu, "core_cpus_list", "thread_siblings_list") or (cpu,)
        )
        return Topology(self.numa_nodes, cores)

    @kept
    def packages(self) -> Groups:
        """The CPUs of each package (socket) that contains an allowed CPU, if the kernel names the package."""
        return self._groups(lambda cpu: self._listed(cpu, "package_cpus_list", "core_siblings_list"))

    @kept
    def caches(self) -> Groups:
        """The CPUs of each last-level cache that serves an allowed CPU, if the kernel names the cache."""
        base = os.path.join(self._root, CPU_FOLDER)
        return self._groups(lambda cpu: _last_level_cache(f"{base}/cpu{cpu}/cache"))

    def _groups(self, read: Callable[[int], tuple[int, ...]]) -> Groups:
        """Each group of CPUs once, in the order of the CPUs. Only the files of its first CPU are read."""
        groups: list[tuple[int, ...]] = []
        known: set[int] = set()
        for cpu in self.allowed:
            if cpu not in known and (group := read(cpu)):
                groups.append(group)
                known.update(group)
        return tuple(groups)

    def _listed(self, cpu: int, *names: str) -> tuple[int, ...]:
        """CPUs from the first of these files that has any: the newer name (Linux 5.3), then the old one."""
        folder = os.path.join(self._root, CPU_FOLDER, f"cpu{cpu}/topology")
        lists = (parse_kernel_list(read_fact(f"{folder}/{name}")) for name in names)
        return next(filter(None, lists), ())


def _last_level_cache(folder: str) -> tuple[int, ...]:
    """CPUs that share the data cache of the highest level."""
    highest, shared = -1, ""
    for name in numbered(folder, "index"):
        level = read_fact(f"{folder}/{name}/level")
        if read_fact(f"{folder}/{name}/type") != "Instruction" and level.isdigit() and int(level) > highest:
            highest, shared = int(level), read_fact(f"{folder}/{name}/shared_cpu_list")
    return parse_kernel_list(shared)
