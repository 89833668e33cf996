"""Record what hwloc says of made-up machines into ``golden/hwloc.json``. Not part of a test run.

From the root of the repository, with hwloc's lstopo installed (Debian: ``hwloc``) and a Python that has this
package::

    python -m tests.contract.record_hwloc
    python -m tests.contract.record_hwloc --compare FOLDER

The second records nothing: it holds our answers against hwloc's for captured machines, archives of ``/proc`` and
``/sys`` such as hwloc-gather-topology makes and hwloc's own tests are (``tests/hwloc/linux/*.tar.bz2``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from tests.contract.golden_file import write
from tests.contract.hwloc_inputs import (
    CPUS,
    MASKS,
    Root,
    kernel_mask,
    numbers_of_mask,
    roots,
    write_for_hwloc,
    write_root,
)
from tests.contract.hwloc_view import View, differences, format_groups, our_view

from dsl.machine.kernel import parse_kernel_list
from dsl.words import format_ranges

# ---- asking lstopo about a root directory that is not this machine's

LSTOPO = "lstopo-no-graphics"
SETTINGS = {
    "HWLOC_COMPONENTS": "linux,stop",  # not what the processor says of itself: that is this machine's
    "HWLOC_DEBUG_ALLOW_OVERLAPPING_NODE_CPUSETS": "1",  # else fake NUMA nodes are dropped
    "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1",  # they are NUMA nodes to the kernel, and to us
    "HWLOC_HIDE_ERRORS": "2",
}


def version() -> str:
    """``"lstopo-no-graphics 2.9.0"``."""
    return subprocess.run([LSTOPO, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def ask(folder: str, *options: str) -> View:
    """What lstopo says, with ``--disallowed`` of the whole machine, else of what its cpuset lets be used.

    A CPU that hwloc has in no core is a core of its own.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HWLOC_")}
    told = subprocess.run(
        [LSTOPO, "--of", "xml", "--no-io", *options, "-"],
        env={**clean, **SETTINGS, "HWLOC_FSROOT": folder},
        capture_output=True,
        check=True,
    )
    machine = ET.fromstring(told.stdout).find("object")
    assert machine is not None
    return _view(machine)


def _view(machine: Element) -> View:
    cpus = _set(machine, "cpuset")
    allowed = set(_set(machine, "allowed_nodeset"))
    nodes = {int(node.attrib["os_index"]): node for node in machine.iter("object") if _is(node, "NUMANode")}
    cores = [_set(core, "cpuset") for core in machine.iter("object") if _is(core, "Core")]
    alone = set(cpus).difference(*cores)
    return View(
        cpus=format_ranges(cpus),
        nodes={str(number): format_ranges(_set(nodes[number], "cpuset")) for number in sorted(nodes)},
        memory=format_ranges(
            sorted(one for one in allowed if one in nodes and int(nodes[one].get("local_memory", "0")))
        ),
        packages=format_groups(_set(one, "cpuset") for one in machine.iter("object") if _is(one, "Package")),
        cores=format_groups([*cores, *[(cpu,) for cpu in alone]]),
        caches=format_groups(set(_last_caches(machine, ()))),
    )


def _last_caches(item: Element, around: tuple[int, ...]) -> list[tuple[int, ...]]:
    """CPUs of the outermost cache around each CPU, which is that of the highest level."""
    if (
        not around
        and "cache_type" in item.attrib
        and item.attrib["cache_type"] != "2"
        and not _is_memory(item)
    ):
        around = _set(item, "cpuset")
    if _is(item, "PU"):
        return [around]
    return [found for child in item.findall("object") for found in _last_caches(child, around)]


def _is(item: Element, kind: str) -> bool:
    return item.get("type") == kind


def _is_memory(item: Element) -> bool:
    return _is(item, "MemCache")


def _set(item: Element, name: str) -> tuple[int, ...]:
    return numbers_of_mask(item.get(name, "").replace("0x", ""))


# ---- captured machines: archives of /proc and /sys, unpacked and asked about

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
                    yield _captured(archive.name.partition(".tar.")[0], cpus.parents[3])


def _unpack(archive: Path, place: str) -> None:
    """Without what would lead out of the place, such as links to devices."""
    with tarfile.open(archive) as files:
        for member in files:
            try:
                files.extract(member, place, filter="data")
            except tarfile.FilterError:
                continue


def _captured(name: str, root: Path) -> Capture:
    """What hwloc finds to be online or allowed is what the kernel would tell us by our affinity and status."""
    theirs, theirs_cut = ask(str(root), "--disallowed"), ask(str(root))
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


# ---- what is recorded


def answers(root: Root) -> dict[str, View]:
    """``whole`` machine, and, if something may not be used, what is left (``cut``)."""
    with tempfile.TemporaryDirectory() as folder:
        write_root(root, Path(folder))
        write_for_hwloc(root, Path(folder))
        found = {"whole": ask(folder, "--disallowed")}
        if root.is_cut():
            mask = [] if root.cgroup else ["--restrict", _hwloc_mask(root)]
            found["cut"] = ask(folder, *mask)
    return found


def _hwloc_mask(root: Root) -> str:
    return ",".join(f"0x{word}" for word in kernel_mask(root.machine.cpus()).split(","))


def record() -> None:
    """Record everything."""
    how = (
        f"{version()}: of each machine of hwloc_inputs, what there is (whole) and what may be used "
        "(cut), in the form of hwloc_view"
    )
    cases = [[name, {part: view._asdict() for part, view in answers(root).items()}] for name, root in roots()]
    write("hwloc", how, cases=cases)


def compare(folder: Path) -> None:
    """Print for each captured machine whether hwloc and we agree, and count."""
    agree, explained, differ = 0, 0, 0
    for capture in captures(folder):
        found = _differences(capture)
        if not found:
            agree += 1
            print(f"{capture.name}: agree")
            continue
        explained += bool(capture.reason)
        differ += not capture.reason
        print(f"{capture.name}: differ: {capture.reason or 'NO REASON KNOWN'}")
        print("".join(f"    {line}\n" for line in found), end="")
    total = agree + explained + differ
    print(f"{total} machines: {agree} agree, {explained} differ with a reason, {differ} without")


def _differences(capture: Capture) -> list[str]:
    return [
        *[f"whole machine, {line}" for line in differences(capture.ours, capture.theirs)],
        *[
            f"what may be used, {line}"
            for line in differences(capture.ours_cut, capture.theirs_cut, cut=True)
        ],
    ]


def main() -> None:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description="what hwloc says of machines")
    parser.add_argument("--compare", metavar="FOLDER", type=Path, help="of captured machines; record nothing")
    folder = parser.parse_args().compare
    if folder is None:
        record()
    else:
        compare(folder)


if __name__ == "__main__":
    main()
