"""Captured machines: archives of ``/proc`` and ``/sys``, unpacked and asked about."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.contract import hwloc_answers
from tests.contract.hwloc_inputs import CPUS, MASKS, numbers_of_mask
from tests.contract.hwloc_view import View, our_view

from dsl.lists import format_ranges
from dsl.machine.cpus import parse_kernel_list

NO_NUMA = "the kernel has no NUMA, hwloc makes up a node where ours are numbers that the kernel's calls take"
OFFLINE = "the lists name CPUs that are offline; nobody may use these, and what may be used is the same"
BULLDOZER = (
    "hwloc calls both halves of a Bulldozer module cores; to the kernel, and so to us and to DeepSpeed, they are "
    "threads of one core: they share its floating-point unit"
)
NO_CACHE = "the kernel names no CPU for the last cache, hwloc takes those of the core, and we none"
REASONS: dict[str, str] = {
    "16amd64-8n2c-cpusets": OFFLINE,
    "16em64t-4s2c2t-offlines": OFFLINE,
    "20s390-2g6s4c": NO_NUMA,
    "2arm-2c": NO_NUMA,
    "2i386-2c-nohugepage": NO_NUMA,
    "2i386-2t-hugepagesizecount": NO_NUMA,
    "2ps3-2t": NO_NUMA,
    "40intel64-4n10c+pci-conflicts": "made to contradict itself, in the masks alone: the lists are as they were",
    "64amd64-4p2n4ca2co": BULLDOZER,
    "64amd64-4s2n4ca2co": BULLDOZER,
    "64fake-4n2s2ca2c2t": "made up: every list of a cache says what the first one does, the masks differ",
    "8ia64-2n2s2c": NO_CACHE,
    "8ia64-2s2c2t": NO_CACHE,
    "nvidiagpunumanodes": "most CPUs were taken out of it to make it smaller, but not out of the lists",
    "offline-cpu0-node0": "CPUs were put offline by hand, in the masks but not in the lists; " + OFFLINE,
}
"""Why we say something else than hwloc 2.9 about machines of its collection, by the name of the archive."""


class Capture(NamedTuple):
    """A captured machine as we and hwloc see it, and why they differ if that is known."""

    name: str
    ours: View
    theirs: View
    ours_cut: View
    theirs_cut: View
    reason: str


def captures(folder: Path) -> Iterator[Capture]:
    """Those of a folder's archives that hold ``/sys`` files about CPUs."""
    for archive in sorted(folder.glob("*.tar.*")):
        with tempfile.TemporaryDirectory() as place:
            _unpack(archive, place)
            for cpus in sorted(Path(place).rglob(CPUS)):
                if any(cpus.glob("cpu*/topology")):
                    yield _ask(archive.name.partition(".tar.")[0], cpus.parents[3])


def _unpack(archive: Path, place: str) -> None:
    """Without what would lead out of the place, such as links to devices."""
    with tarfile.open(archive) as files:
        for member in files:
            try:
                files.extract(member, place, filter="data")
            except tarfile.FilterError:
                continue


def _ask(name: str, root: Path) -> Capture:
    """What hwloc finds to be online or allowed is what the kernel would tell us by our affinity and status."""
    theirs, theirs_cut = hwloc_answers.ask(str(root), "--disallowed"), hwloc_answers.ask(str(root))
    _complete(root, theirs.memory)
    return Capture(
        name,
        our_view(str(root), parse_kernel_list(theirs.cpus)),
        theirs,
        our_view(str(root), (), parse_kernel_list(theirs_cut.cpus)),
        theirs_cut,
        REASONS.get(name, ""),
    )


def _complete(root: Path, memory: str) -> None:
    """Write the lists that the capture lacks: old kernels had masks alone; and the status."""
    for listed, mask in MASKS.items():
        for path in (root / "sys/devices/system").rglob(mask):
            twin = path.with_name(listed)
            if not twin.exists():
                numbers = numbers_of_mask(path.read_text(encoding="ascii"))
                twin.write_text(f"{format_ranges(numbers)}\n", encoding="ascii")
    status = root / "proc/self/status"
    if not status.exists():
        status.parent.mkdir(parents=True, exist_ok=True)
        status.write_text(f"Mems_allowed_list:\t{memory}\n", encoding="ascii")
