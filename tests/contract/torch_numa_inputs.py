"""Machines, devices and workers that torch's NUMA binding and ours are asked about: a table, and made-up ones."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dsl.words import format_ranges

MODES = ("node", "socket", "exclusive", "core-complex")
DRAWN = 120
"""Number of machines that are drawn at random."""


class Machine(NamedTuple):
    """A machine as the kernel describes it. Groups are lists of online CPUs; ``gpus`` NUMA nodes of devices.

    ``sockets`` and ``caches`` may leave CPUs out: the kernel names none for them. ``allowed`` is the affinity
    mask (empty: all CPUs); ``possible`` NUMA nodes that the kernel could have, beyond those that are there.
    """

    nodes: Sequence[Sequence[int]]
    sockets: Sequence[Sequence[int]]
    caches: Sequence[Sequence[int]]
    cores: Sequence[Sequence[int]]
    gpus: Sequence[int]
    allowed: Collection[int] = ()
    possible: int = 0

    def cpus(self) -> set[int]:
        """The affinity mask, in which CPUs that are offline never are."""
        online = {cpu for core in self.cores for cpu in core}
        return online.intersection(self.allowed) or online


def address(number: int) -> str:
    """PCI address of a device, in sysfs's form."""
    return f"{number // 256:04x}:{number * 7 % 256:02x}:00.0"


def write_sysfs(machine: Machine, root: Path) -> None:
    """The files that both look at, below a root of their own."""
    cpu, node = root / "sys/devices/system/cpu", root / "sys/devices/system/node"

    def write(name: str, text: object) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")

    write(f"{node}/possible", f"0-{len(machine.nodes) + machine.possible - 1}")
    write(f"{node}/has_memory", f"0-{len(machine.nodes) - 1}")
    for number, cpus in enumerate(machine.nodes):
        write(f"{node}/node{number}/cpulist", format_ranges(cpus))
    for name, groups in (("thread_siblings_list", machine.cores), ("package_cpus_list", machine.sockets)):
        for group in groups:
            for one in group:
                write(f"{cpu}/cpu{one}/topology/{name}", format_ranges(group))
    for number, group in enumerate(machine.sockets):
        for one in group:
            write(f"{cpu}/cpu{one}/topology/physical_package_id", number)
    levels: tuple[tuple[int, str, Sequence[Sequence[int]]], ...] = (
        (3, "Unified", machine.caches),
        (1, "Data", machine.cores if machine.caches else ()),
        (1, "Instruction", machine.cores if machine.caches else ()),
    )
    for index, (level, kind, groups) in enumerate(levels):
        for group in groups:
            for one in group:
                folder = f"{cpu}/cpu{one}/cache/index{index}"
                write(f"{folder}/type", kind)
                write(f"{folder}/level", level)
                write(f"{folder}/shared_cpu_list", format_ranges(group))
    for number, home in enumerate(machine.gpus):
        write(f"sys/bus/pci/devices/{address(number)}/numa_node", home)
        write(
            f"proc/driver/nvidia/gpus/{address(number)}/information",
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{number:08x}\nDevice Minor: \t {number}",
        )
        write(f"dev/nvidia{number}", "")


def _runs(count: int, length: int, first: int = 0) -> list[list[int]]:
    """Neighbouring CPUs."""
    return [list(range(first + one * length, first + (one + 1) * length)) for one in range(count)]


def build(
    sockets: int,
    nodes: int,
    cores: int,
    *,
    threads: int = 1,
    complexes: int = 1,
    neighbours: bool = False,
    gpus: Sequence[int] = (),
    allowed: Collection[int] = (),
    offline: Collection[int] = (),
) -> Machine:
    """So many sockets of NUMA nodes of cores of threads, with last-level caches of equal size.

    ``complexes``: caches of a NUMA node; 0: one of each socket. ``neighbours``: the threads of a core have
    neighbouring numbers, else those of the second threads come behind all the first.
    """
    total = sockets * nodes * cores
    per_node = cores // complexes if complexes else nodes * cores

    def cpus(core: int) -> list[int]:
        numbers = range(threads)
        return [core * threads + one if neighbours else core + one * total for one in numbers]

    def group(length: int) -> list[list[int]]:
        groups = [sorted(cpu for core in run for cpu in cpus(core)) for run in _runs(total // length, length)]
        return [[cpu for cpu in one if cpu not in offline] for one in groups]

    def there(length: int) -> list[list[int]]:
        return [one for one in group(length) if one]

    return Machine(group(cores), there(nodes * cores), there(per_node), there(1), tuple(gpus), tuple(allowed))


def machines() -> Iterator[tuple[str, Machine]]:
    """The table, then the drawn ones, each with a name."""
    yield from TABLE.items()
    for number in range(DRAWN):
        yield f"drawn {number}", _draw(random.Random(number))


def _draw(source: random.Random) -> Machine:
    """Any machine. Only ``random()`` of the source is used: what it gives is the same in every Python."""

    def pick(values: Sequence[int]) -> int:
        return values[int(source.random() * len(values))]

    sockets, nodes, cores, threads = pick((1, 2, 4)), pick((1, 2, 4)), pick((1, 2, 3, 4, 6, 8)), pick((1, 2))
    divisors = [one for one in range(1, cores + 1) if cores % one == 0]
    total = sockets * nodes * cores * threads
    kept = pick((10, 7, 4))
    return build(
        sockets,
        nodes,
        cores,
        threads=threads,
        complexes=pick([0, *divisors]),
        neighbours=pick((0, 1)) == 1,
        gpus=[
            pick(range(-1 if pick(range(8)) == 0 else 0, sockets * nodes)) for _ in range(pick(range(1, 9)))
        ],
        offline=[cpu for cpu in range(1, total) if pick(range(20)) == 0],
        allowed=() if kept == 10 else [0, *[cpu for cpu in range(1, total) if pick(range(10)) < kept]],
    )


DGX_A100 = (3, 3, 1, 1, 7, 7, 5, 5)
EIGHT = (0, 0, 0, 0, 1, 1, 1, 1)
EPYC = build(2, 4, 16, threads=2, complexes=2)
XEON = build(2, 2, 20, threads=2, complexes=0)
TWO = build(2, 1, 8, threads=2, complexes=2)
GRACE = build(1, 1, 72)

TABLE: dict[str, Machine] = {
    "2x EPYC NPS4, a device a node": EPYC._replace(gpus=tuple(range(8))),
    "2x EPYC NPS4, devices of a DGX A100": EPYC._replace(gpus=DGX_A100),
    "2x EPYC NPS4, three devices at a node": EPYC._replace(gpus=(2, 2, 2, 5)),
    "2x EPYC NPS1, uneven caches": TWO._replace(gpus=EIGHT, allowed=(*range(3, 16), *range(20, 32))),
    "2x Xeon SNC2, a device a node": XEON._replace(gpus=(0, 1, 2, 3)),
    "2x Xeon SNC2, devices on one half each": XEON._replace(gpus=(1, 1, 3, 3)),
    "2x Xeon SNC2, more devices than cores": build(2, 2, 2, complexes=0, gpus=(0, 0, 0, 1)),
    "2x Xeon, seven cores for three devices": build(2, 1, 7, threads=2, gpus=(0, 0, 0, 1)),
    "2x Xeon, threads are neighbours": build(2, 1, 6, threads=2, neighbours=True, gpus=(0, 0, 1, 1)),
    "2x Xeon, no threads": build(2, 1, 12, gpus=EIGHT),
    "8 sockets": build(8, 1, 4, gpus=(0, 1, 2, 3, 4, 5, 6, 7)),
    "8 sockets, devices in reverse": build(8, 1, 4, threads=2, gpus=(7, 6, 5, 4, 3, 2, 1, 0)),
    "GH200, device memory is NUMA nodes": GRACE._replace(nodes=[GRACE.nodes[0], *[()] * 8], gpus=(0,)),
    "GB200, two Graces": build(2, 1, 72, gpus=(0, 0, 1, 1))._replace(
        nodes=[range(72), range(72, 144), *[()] * 32]
    ),
    "one CPU": build(1, 1, 1, gpus=(-1,)),
    "one CPU, two devices": build(1, 1, 1, gpus=(-1, -1)),
    "CPUs are offline": build(2, 1, 6, threads=2, complexes=2, gpus=(0, 0, 1), offline=(1, 2, 7, 13, 20)),
    "a socket is offline": build(2, 1, 4, gpus=(0, 0), offline=range(4, 8)),
    "a device at a node that is offline": build(2, 1, 4, gpus=(0, 1), offline=range(4, 8)),
    "one NUMA node, not told": build(1, 1, 8, threads=2, complexes=2, gpus=(-1, -1)),
    "two NUMA nodes, not told": TWO._replace(gpus=(-1, -1, -1, -1)),
    "two NUMA nodes, told of some": TWO._replace(gpus=(-1, 1, -1, 1)),
    "not told, and node 0 may not be used": TWO._replace(gpus=(-1, -1), allowed=TWO.nodes[1]),
    "half of the CPUs": TWO._replace(gpus=(0, 1), allowed=(*range(4), *range(8, 12))),
    "one thread of each core": TWO._replace(gpus=EIGHT, allowed=range(16)),
    "second threads alone": TWO._replace(gpus=EIGHT, allowed=range(16, 32)),
    "odd CPUs": EPYC._replace(gpus=DGX_A100, allowed=range(1, 256, 2)),
    "only the first node": TWO._replace(gpus=(0, 0, 1), allowed=TWO.nodes[0]),
    "only the second node": TWO._replace(gpus=(1, 1), allowed=TWO.nodes[1]),
    "one half of each socket": XEON._replace(gpus=(0, 2), allowed=(*XEON.nodes[0], *XEON.nodes[2])),
    "NUMA nodes that could be": TWO._replace(gpus=(0, 1), possible=2),
    "sockets are not named": TWO._replace(gpus=(0, 1), sockets=()),
    "caches are not named": TWO._replace(gpus=(0, 1), caches=()),
    "one NUMA node of two sockets": build(2, 1, 4, complexes=2, gpus=(0, 0))._replace(nodes=[range(8)]),
    "no device": TWO,
    "no device, one CPU": build(1, 1, 1),
}
