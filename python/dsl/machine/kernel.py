"""What files of the kernel and of drivers say: CPUs and NUMA nodes, control groups, devices, processes.

Sources: the kernel's ``Documentation/ABI/stable/sysfs-devices-node`` and ``sysfs-devices-system-cpu``, and
``Mems_allowed_list`` of proc_pid_status(5).
"""

from __future__ import annotations

import os
import time

from dsl._record import Record, kept
from dsl.words import parse_range

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Groups = tuple[tuple[int, ...], ...]

LARGEST_FILE = 1 << 16
"""Most bytes that are read of a file."""


def list_names(folder: str) -> list[str]:
    """Names in a folder; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def numbered(folder: str, prefix: str) -> list[str]:
    """Names in a folder that consist of the prefix and a number."""
    size = len(prefix)
    return [name for name in list_names(folder) if name[:size] == prefix and name[size:].isdigit()]


def read_fact(path: str) -> str:
    """The text of a small file of the kernel; empty if there is no such file.

    One read without a buffer: large machines have hundreds of these files. In Linux 5.15-rc1 lists of CPUs
    end with a zero byte.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, LARGEST_FILE).decode("utf-8", "replace").strip("\0 \t\n")
    except OSError:
        return ""
    finally:
        os.close(fd)


def read_fields(path: str) -> dict[str, str]:
    """The fields of a file with lines ``NAME: VALUE``; empty if there is no such file."""
    pairs = [line.partition(":") for line in read_fact(path).splitlines()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def pci_address(text: str) -> str:
    """A PCI address as sysfs spells it: NVML's ``00000000:07:00.0`` is ``0000:07:00.0``."""
    domain, colon, rest = text.strip().lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if colon else ""


def read_numa_node(address: str, root: str = "/") -> int | None:
    """NUMA node of a PCI device by sysfs; None when the kernel does not know it (it says -1)."""
    text = read_fact(os.path.join(root, "sys/bus/pci/devices", address, "numa_node"))
    return int(text) if text.isascii() and text.isdecimal() else None


def has_nvidia_driver(root: str = "/") -> bool:
    """Whether there are files of an NVIDIA driver (on WSL: of any GPU's driver)."""
    names = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")
    return any(os.path.exists(os.path.join(root, name)) for name in names)


def has_intel_torch(folder: str) -> bool:
    """Whether a torch for Intel GPUs is installed in this folder of packages."""
    names = ("torch/lib/libtorch_xpu.so", "intel_extension_for_pytorch")
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def shared_memory() -> tuple[int, int]:
    """Bytes of shared memory, and how many of them are free; 0 if there is none."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108  the memory itself, where nothing is made
    except OSError:
        return 0, 0
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has for itself; 0 if it is gone."""
    words = read_fact(f"/proc/{pid}/statm").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE") if len(words) > 2 else 0


def began_ns(pid: int | str) -> int | None:
    """CLOCK_REALTIME when a process was started, to a hundredth of a second; None: /proc does not say."""
    found = read_fact(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not found:
        return None
    ticks = int(found[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns


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


NO_LIMIT = 1 << 60
"""Version 1 writes a number like this for "no limit"."""


class Room(Record):
    """What is left. None: there is no limit."""

    memory_bytes: int | None = None
    memory_limit: str = ""
    """The file with the limit."""
    tasks: int | None = None
    """Processes and threads."""
    tasks_limit: str = ""
    """The file with the limit."""
    cpus: float | None = None
    """CPUs that may be used at a time."""


def room_left(root: str = "/") -> Room:
    """The least that any of our groups and of the groups above them leaves."""
    memory: list[tuple[int, str]] = []
    tasks: list[tuple[int, str]] = []
    cpus: list[float] = []
    for folder in _folders(root):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _number(folder, limit), _number(folder, used)
            if most is not None and now is not None and most < NO_LIMIT:
                fields = [line.split() for line in read_fact(f"{folder}/memory.stat").splitlines()]
                kept = next((int(one[1]) for one in fields if one[:1] == [cache]), 0)
                memory.append((max(most - now + kept, 0), f"{folder}/{limit} ({most >> 20} MB)"))
        most, now = _number(folder, "pids.max"), _number(folder, "pids.current")
        if most is not None and now is not None:
            tasks.append((max(most - now, 0), f"{folder}/pids.max ({most})"))
        quota, period = [*read_fact(f"{folder}/cpu.max").split(), "", ""][:2]
        if quota.isdigit() and period.isdigit():
            cpus.append(int(quota) / max(int(period), 1))
        old, each = _number(folder, "cpu.cfs_quota_us"), _number(folder, "cpu.cfs_period_us")
        if old is not None and each:
            cpus.append(old / each)
    most_memory = min(memory, default=(None, ""))
    most_tasks = min(tasks, default=(None, ""))
    return Room(most_memory[0], most_memory[1], most_tasks[0], most_tasks[1], min(cpus, default=None))


def _number(folder: str, name: str) -> int | None:
    """A number of 0 or more in a file of a group; None: there is no such file, or no limit."""
    text = read_fact(f"{folder}/{name}")
    return int(text) if text.isdecimal() else None


def _folders(root: str) -> Iterator[str]:
    """The folders of our groups and of all groups above them, as far as they are mounted here."""
    try:
        # The kernel hands it over a page at a time.
        with open(f"{root}/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return
    for line in read_fact(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        for words in mounts:
            rest = words[words.index("-") + 1 :] if "-" in words[5:] else []
            is_ours = bool(rest) and (
                rest[0] == "cgroup2"
                if not names
                else rest[0] == "cgroup" and {*names.split(",")} <= {*rest[-1].split(",")}
            )
            if not is_ours or len(words) < 5:
                continue
            top, point = words[3], os.path.join(root, words[4].lstrip("/"))
            inner = os.path.relpath(path, top) if path.startswith(top) else "."
            folder = os.path.normpath(os.path.join(point, inner)) if not inner.startswith("..") else point
            while folder.startswith(point.rstrip("/")):
                yield folder
                if folder == point:
                    break
                folder = os.path.dirname(folder)
            break
