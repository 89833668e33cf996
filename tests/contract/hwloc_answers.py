"""Asking hwloc's lstopo about a root directory that is not this machine's."""

from __future__ import annotations

import os
import subprocess
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from tests.contract.hwloc_inputs import numbers_of_mask
from tests.contract.hwloc_view import View, format_groups

from dsl.lists import format_ranges

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
