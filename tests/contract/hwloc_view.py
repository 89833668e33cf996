"""What hwloc and we say of a machine, in one form, and where the two differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dsl.machine.kernel import Cpus, parse_kernel_list
from dsl.words import format_ranges


class View(NamedTuple):
    """Of a machine or the part of it that may be used. All sets are in the kernel's list format.

    ``nodes``: CPUs of each NUMA node, by number. ``memory``: NUMA nodes whose memory may be used. ``packages``,
    ``cores``, ``caches`` (of the last level that holds data): the sets, with blanks between.
    """

    cpus: str
    nodes: dict[str, str]
    memory: str
    packages: str
    cores: str
    caches: str


def format_groups(groups: Iterable[Collection[int]]) -> str:
    """Ascending, as often as they are there."""
    return " ".join([format_ranges(group) for group in sorted([sorted(one) for one in groups if one])])


def our_view(folder: str, cpus: Sequence[int], allowed: Collection[int] | None = None) -> View:
    """What `Cpus` says to the online CPUs; with ``allowed``, to those, and cut to them as its callers do."""
    asked = sorted(allowed) if allowed else cpus
    found = Cpus(folder, asked)
    mine = frozenset(asked if allowed else range(1 << 16))
    return View(
        cpus=format_ranges(asked),
        nodes={
            str(node.number): format_ranges([cpu for cpu in node.cpus if cpu in mine])
            for node in found.numa_nodes
        },
        memory=format_ranges([node.number for node in found.numa_nodes if node.usable_memory]),
        packages=format_groups(mine.intersection(group) for group in found.packages),
        cores=format_groups(mine.intersection(group) for group in found.topology.cores),
        caches=format_groups(mine.intersection(group) for group in found.caches),
    )


def differences(ours: View, theirs: View, *, cut: bool = False) -> list[str]:
    """Where they differ, but for two things that are so in every machine.

    * Memory without CPUs: the kernel lists none, hwloc the CPUs that are near to it, if anybody says.
    * In what may be used (``cut``) hwloc has no NUMA node whose memory may not be used, even if its CPUs may.
    """
    found = [
        f"{name}: ours {mine or 'none'}, hwloc {its or 'none'}"
        for name in ("cpus", "memory")
        if (mine := getattr(ours, name)) != (its := getattr(theirs, name))
    ]
    found += _nodes(ours, theirs, cut=cut)
    for name in ("packages", "cores", "caches"):
        mine, its = getattr(ours, name).split(), getattr(theirs, name).split()
        if mine != its:
            only_ours = " ".join([group for group in mine if group not in its]) or "none"
            only_its = " ".join([group for group in its if group not in mine]) or "none"
            found.append(f"{name}: ours {only_ours}, hwloc {only_its}")
    return found


def _nodes(ours: View, theirs: View, *, cut: bool) -> list[str]:
    found = []
    usable = {str(number) for number in parse_kernel_list(ours.memory)}
    for number in sorted({*ours.nodes, *theirs.nodes}, key=int):
        mine, its = ours.nodes.get(number), theirs.nodes.get(number)
        if its is None and cut and number not in usable:
            continue
        if mine == "" and its is not None and _is_near(its, ours):
            continue
        if mine != its:
            found.append(f"node {number}: ours {_said(mine)}, hwloc {_said(its)}")
    return found


def _is_near(cpus: str, ours: View) -> bool:
    """Whether the CPUs are those of some NUMA nodes together, with none that we have in no node."""
    mine = frozenset(parse_kernel_list(cpus))
    groups = [frozenset(parse_kernel_list(node)) for node in ours.nodes.values()]
    return mine == frozenset().union(*[group for group in groups if group <= mine])


def _said(cpus: str | None) -> str:
    return "no such node" if cpus is None else cpus or "no cpu"
