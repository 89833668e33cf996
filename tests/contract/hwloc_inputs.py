"""Made-up machines that hwloc and we are shown: those of `torch_numa_inputs`, and what that table lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.contract.torch_numa_inputs import GRACE, TABLE, TWO, XEON, Machine, build, write_sysfs
from tests.contract.torch_numa_inputs import machines as torch_machines

from dsl.machine.kernel import parse_kernel_list
from dsl.words import format_ranges

DRAWN = 24
"""How many of the machines that `torch_numa_inputs` draws at random are shown to hwloc too."""

NODES, CPUS = "sys/devices/system/node", "sys/devices/system/cpu"
MASKS = {
    "thread_siblings_list": "thread_siblings",
    "core_cpus_list": "core_cpus",
    "core_siblings_list": "core_siblings",
    "package_cpus_list": "package_cpus",
    "shared_cpu_list": "shared_cpu_map",
    "cpulist": "cpumap",
}
"""Files in the kernel's list format, which we read, and those that say the same as masks, which hwloc reads."""
NAMES = (("thread_siblings_list", "core_cpus_list"), ("core_siblings_list", "package_cpus_list"))
"""The name until Linux 5.3, and the one that came beside it then."""


class Root(NamedTuple):
    """A machine, and what only hwloc wants to know of it or only a cpuset can do.

    ``memory``: NUMA nodes that have some (None: all). ``near``: the node with CPUs that a node of memory alone is
    near to, told ``by`` "distance" or "initiators". ``cgroup``: "v1" or "v2" if it is a cpuset that cuts the CPUs
    to ``machine.allowed``, and the memory to ``mems``; else the affinity mask alone does. ``absent``: NUMA nodes
    that are offline. ``names``: those of the files, "old" before Linux 5.3, "new" without the deprecated ones.
    ``no_numa``: the kernel is built without NUMA.
    """

    machine: Machine
    memory: Collection[int] | None = None
    near: Mapping[int, int] = {}
    by: str = "distance"
    cgroup: str = ""
    mems: Collection[int] = ()
    absent: Collection[int] = ()
    names: str = "both"
    no_numa: bool = False

    def nodes(self) -> list[int]:
        """Numbers of the NUMA nodes that are there."""
        return [number for number in range(len(self.machine.nodes)) if number not in self.absent]

    def with_memory(self) -> list[int]:
        """Those that have memory."""
        return [number for number in self.nodes() if self.memory is None or number in self.memory]

    def is_cut(self) -> bool:
        """Whether some CPUs or NUMA nodes may not be used."""
        return bool(self.machine.allowed or self.cgroup)


def kernel_mask(numbers: Collection[int]) -> str:
    """The kernel's mask format: words of 32 bits, the highest first."""
    mask = sum(1 << number for number in numbers)
    words: list[str] = []
    while mask or not words:
        words.append(f"{mask & 0xFFFFFFFF:08x}")
        mask >>= 32
    return ",".join(reversed(words))


def numbers_of_mask(text: str) -> tuple[int, ...]:
    """The inverse: ``"00000001,80000000"`` -> (31, 32). Words may have lost their zeros."""
    mask = 0
    for word in text.strip().split(","):
        mask = mask << 32 | int(word or "0", 16)
    return tuple([number for number in range(mask.bit_length()) if mask >> number & 1])


def write_root(root: Root, folder: Path) -> None:
    """The files of ``/sys`` and ``/proc`` that we look at."""
    write_sysfs(root.machine._replace(gpus=()), folder)
    _rename(root.names, folder)
    _write_nodes(root, folder)
    cpus, mems = _allowed(root)
    lines = ["Name:\tpython", f"Cpus_allowed_list:\t{cpus}", "Threads:\t1"]
    if root.cgroup:  # without, it is as from a kernel that is built without cpusets
        lines.insert(2, f"Mems_allowed_list:\t{mems}")
    _write(folder / "proc/self/status", "\n".join(lines))


def write_for_hwloc(root: Root, folder: Path) -> None:
    """The files that only hwloc looks at, beside those of `write_root`."""
    for listed, mask in MASKS.items():
        for path in folder.rglob(listed):
            _write(path.with_name(mask), kernel_mask(parse_kernel_list(path.read_text(encoding="ascii"))))
    base = folder / CPUS
    online = sorted({cpu for core in root.machine.cores for cpu in core})
    present = range(max(online) + 1)
    for name, numbers in (("online", online), ("present", present), ("possible", present)):
        _write(base / name, format_ranges(numbers))
    for number in present:
        _write(base / f"cpu{number}/online", int(number in online))
    for number, core in enumerate(root.machine.cores):
        for cpu in core:
            _write(base / f"cpu{cpu}/topology/core_id", number)
    _write(folder / "proc/cpuinfo", "\n\n".join(f"processor\t: {cpu}" for cpu in online))
    if not root.no_numa:
        _write_memory(root, folder / NODES)
    _write_cgroup(root, folder)


def _write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def _write_nodes(root: Root, folder: Path) -> None:
    base = folder / NODES
    for number in range(len(root.machine.nodes)) if root.no_numa else root.absent:
        (base / f"node{number}/cpulist").unlink()
        (base / f"node{number}").rmdir()
    if root.no_numa:
        for path in base.iterdir():
            path.unlink()
        base.rmdir()
    else:
        _write(base / "has_memory", format_ranges(root.with_memory()))


def _write_memory(root: Root, base: Path) -> None:
    nodes = root.nodes()
    _write(base / "online", format_ranges(nodes))
    for number in nodes:
        kib = 4 << 20 if number in root.with_memory() else 0
        _write(base / f"node{number}/meminfo", f"Node {number} MemTotal:       {kib} kB")
        distances = [str(_distance(root, number, other)) for other in nodes]
        _write(base / f"node{number}/distance", " ".join(distances))
        if root.by == "initiators" and number in root.near:
            (base / f"node{number}/access0/initiators/node{root.near[number]}").mkdir(parents=True)


def _distance(root: Root, one: int, other: int) -> int:
    near = root.near if root.by == "distance" else {}
    if one == other:
        return 10
    return 13 if other == near.get(one) or one == near.get(other) else 21


def _rename(names: str, folder: Path) -> None:
    for old, new in NAMES:
        for path in (folder / CPUS).glob("cpu*/topology"):
            have = next((path / name for name in (old, new) if (path / name).exists()), None)
            if have is None:
                continue
            text = have.read_text(encoding="ascii")
            have.unlink()
            for name in [old] * (names != "new") + [new] * (names != "old"):
                (path / name).write_text(text, encoding="ascii")


def _allowed(root: Root) -> tuple[str, str]:
    cpus = format_ranges(sorted(root.machine.cpus()))
    return cpus, format_ranges(sorted(root.mems) if root.cgroup else root.with_memory())


def _write_cgroup(root: Root, folder: Path) -> None:
    cpus, mems = _allowed(root)
    if root.cgroup == "v2":
        base, end = folder / "sys/fs/cgroup", ".effective"
        _write(folder / "proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0")
        _write(folder / "proc/self/cgroup", "0::/job")
        _write(base / "cgroup.controllers", "cpuset cpu io memory pids")
    elif root.cgroup == "v1":
        base, end = folder / "sys/fs/cgroup/cpuset", ""
        _write(folder / "proc/mounts", "cgroup /sys/fs/cgroup/cpuset cgroup rw,nosuid,cpuset 0 0")
        _write(folder / "proc/self/cgroup", "4:cpu,cpuacct:/else\n3:cpuset:/job")
    else:
        return
    _write(base / f"job/cpuset.cpus{end}", cpus)
    _write(base / f"job/cpuset.mems{end}", mems)


XEON_MAX = build(2, 4, 14, threads=2, complexes=0)
"""Two processors with high-bandwidth memory; in its flat mode each of four parts has a NUMA node of it."""
SMALL = build(2, 4, 3, threads=2, complexes=0)
PARTS = build(2, 4, 4, threads=2, complexes=2)
FLAT = SMALL._replace(nodes=[*SMALL.nodes, *[()] * 8])
MIXED = TWO._replace(nodes=[TWO.nodes[0], (), TWO.nodes[1], ()])
CXL = TWO._replace(nodes=[*TWO.nodes, ()])
GH200 = GRACE._replace(nodes=[GRACE.nodes[0], *[()] * 8])
HYBRID = Machine(  # four cores of two threads, eight of one
    [range(16)],
    [range(16)],
    [range(16)],
    [*[(cpu, cpu + 1) for cpu in range(0, 8, 2)], *[(cpu,) for cpu in range(8, 16)]],
    (),
)

TABLE_OF_ROOTS: dict[str, Root] = {
    "HBM flat, near by distance": Root(
        XEON_MAX._replace(nodes=[*XEON_MAX.nodes, *[()] * 8]), near={node + 8: node for node in range(8)}
    ),
    "HBM flat, near by initiators": Root(FLAT, near={node + 8: node for node in range(8)}, by="initiators"),
    "HBM flat, nobody says what is near": Root(FLAT),
    "HBM flat, numbered the other way round": Root(FLAT, near={node + 8: 7 - node for node in range(8)}),
    "HBM flat, numbered in between": Root(MIXED, near={1: 0, 3: 2}),
    "HBM flat, one part of it is offline": Root(
        FLAT, near={node + 8: node for node in range(7)}, absent=[15]
    ),
    "HBM flat, in a cpuset": Root(
        FLAT._replace(allowed=FLAT.nodes[2]), near={n + 8: n for n in range(8)}, cgroup="v2", mems=(2, 10)
    ),
    "HBM flat, in a cpuset without it": Root(
        FLAT._replace(allowed=FLAT.nodes[2]), near={n + 8: n for n in range(8)}, cgroup="v2", mems=(2,)
    ),
    "HBM alone": Root(SMALL),
    "memory behind CXL": Root(CXL, near={2: 1}),
    "memory behind CXL, near to no socket": Root(CXL),
    "memory behind CXL at each socket": Root(TWO._replace(nodes=[*TWO.nodes, (), ()]), near={2: 0, 3: 1}),
    "fake NUMA, every node has all CPUs": Root(build(1, 1, 8, threads=2)._replace(nodes=[range(16)] * 4)),
    "fake NUMA, each socket is split": Root(
        TWO._replace(nodes=[TWO.nodes[0], TWO.nodes[0], TWO.nodes[1], TWO.nodes[1]])
    ),
    "fake NUMA, in a cpuset": Root(
        build(1, 1, 8)._replace(nodes=[range(8)] * 4, allowed=range(2, 6)), cgroup="v2", mems=(1, 2)
    ),
    "a NUMA node has no memory": Root(PARTS, memory=(0, 2, 4, 6)),
    "a NUMA node has no memory, and may not be used": Root(
        PARTS._replace(allowed=PARTS.nodes[1]), memory=(0, 2, 4, 6), cgroup="v2", mems=(0,)
    ),
    "GH200, its device has memory": Root(GH200, memory=(0, 1)),
    "GH200, the device's memory is near": Root(GH200, memory=(0, 1), near=dict.fromkeys(range(1, 9), 0)),
    "GB200, its devices have memory": Root(
        TABLE["GB200, two Graces"], memory=(0, 1, 2, 10, 18, 26), near={n: int(n > 17) for n in range(2, 34)}
    ),
    "a cpuset of one NUMA node": Root(PARTS._replace(allowed=PARTS.nodes[3]), cgroup="v2", mems=(3,)),
    "a cpuset of one NUMA node, cgroup v1": Root(
        PARTS._replace(allowed=PARTS.nodes[3]), cgroup="v1", mems=(3,)
    ),
    "a cpuset whose memory is elsewhere": Root(TWO._replace(allowed=TWO.nodes[0]), cgroup="v2", mems=(1,)),
    "a cpuset of memory alone": Root(XEON, cgroup="v2", mems=(0, 1)),
    "a cpuset of one CPU of each core": Root(TWO._replace(allowed=range(16)), cgroup="v2", mems=(0, 1)),
    "a cpuset with a hole in each cache": Root(
        TWO._replace(allowed=[cpu for cpu in range(32) if cpu % 4]), cgroup="v1", mems=(0, 1)
    ),
    "a NUMA node is offline": Root(XEON._replace(nodes=[*XEON.nodes[:3], ()]), absent=[3]),
    "the first NUMA node is offline": Root(
        build(2, 1, 4, threads=2, offline=(0, 1, 2, 3, 8, 9, 10, 11)), absent=[0]
    ),
    "one thread of each core is offline": Root(build(2, 1, 8, threads=2, complexes=2, offline=range(16, 32))),
    "names before Linux 5.3": Root(XEON, names="old"),
    "names before Linux 5.3, CPUs are offline": Root(TABLE["CPUs are offline"], names="old"),
    "names of Linux 5.3 alone": Root(XEON, names="new"),
    "a kernel without NUMA": Root(build(2, 1, 4, threads=2), no_numa=True),
    "a processor of two kinds of cores": Root(HYBRID),
    "caches of some CPUs are not named": Root(TWO._replace(caches=TWO.caches[:1])),
    "8 sockets, four threads a core": Root(build(8, 1, 4, threads=4, neighbours=True)),
    "16 sockets, 32 cores each": Root(build(16, 1, 32)),
}


def roots() -> Iterator[tuple[str, Root]]:
    """The table above, then the machines of `torch_numa_inputs` but for those that differ in their devices alone."""
    yield from TABLE_OF_ROOTS.items()
    seen: set[str] = set()
    drawn = 0
    for name, machine in torch_machines():
        root = Root(machine._replace(gpus=()))
        drawn += name.startswith("drawn")
        if str(root) not in seen and drawn <= DRAWN:
            seen.add(str(root))
            yield name, root
