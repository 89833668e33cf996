"""Topology and memory policies against what hwloc 2.9 says of the same machines (golden/hwloc.json)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.contract.golden_file import cases
from tests.contract.hwloc_inputs import roots, write_root
from tests.contract.hwloc_view import View, differences, our_view

from dsl.binding.rules import memory_groups
from dsl.machine.kernel import Cpus, parse_kernel_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dsl.machine.kernel import NumaNode
    from dsl.model.job import MemoryPolicy

ROOTS = dict(roots())
GOLDEN: dict[str, dict[str, View]] = {
    name: {part: View(**view) for part, view in views.items()} for name, views in cases("hwloc")
}

# machine -> why we say something else, and the difference. What is so in every machine `differences` explains.
DIFFERENCES: dict[str, tuple[str, list[str]]] = {
    "a kernel without NUMA": (
        "hwloc makes up a NUMA node where the kernel has none; ours are numbers that the kernel's calls take",
        ["node 0: ours no such node, hwloc 0-15"],
    ),
}

# machine -> why our policy is not "some of the memory that hwloc has beside the node", and what it is, by node.
POLICIES: dict[str, tuple[str, dict[int, MemoryPolicy | None]]] = {
    "HBM flat, nobody says what is near": (
        "DeepSpeed's rule: the i-th node without CPUs belongs to the i-th with; hwloc does not guess",
        {node: ("preferred", (node + 8,)) for node in range(8)},
    ),
    "HBM flat, numbered the other way round": (
        "the same rule, though another node is nearer; no such machine is known, and it is only a preference",
        {node: ("preferred", (node + 8,)) for node in range(8)},
    ),
    "a socket is offline": (
        "DeepSpeed's rule: memory without CPUs, as many nodes of it as with, is high-bandwidth memory",
        {0: ("preferred", (1,))},
    ),
    "HBM flat, in a cpuset without it": (
        "the only memory that may be used is that of the node itself, where it goes without any policy",
        {2: None},
    ),
}


@pytest.mark.parametrize("name", ROOTS)
def test_the_topology_is_hwlocs(name: str, memory_path: Path) -> None:
    """Of the whole machine, and of what the affinity mask and the cpuset leave."""
    root, golden = ROOTS[name], GOLDEN[name]
    write_root(root, memory_path)
    online = sorted({cpu for core in root.machine.cores for cpu in core})
    found = differences(our_view(str(memory_path), online), golden["whole"])
    assert ("cut" in golden) == root.is_cut()
    if root.is_cut():
        found += differences(our_view(str(memory_path), online, root.machine.cpus()), golden["cut"], cut=True)
    assert found == DIFFERENCES.get(name, ("", []))[1]


@pytest.mark.parametrize("name", [name for name, root in ROOTS.items() if not root.no_numa])
def test_the_memory_of_a_policy_is_local_by_hwloc(name: str, memory_path: Path) -> None:
    """A node with CPUs has a policy if hwloc has memory beside it that may be used, and of no other memory."""
    write_root(ROOTS[name], memory_path)
    nodes = Cpus(str(memory_path)).numa_nodes
    assert _foreign(name, nodes, memory_groups(nodes)) == POLICIES.get(name, ("", {}))[1]


def _foreign(
    name: str, nodes: Sequence[NumaNode], policies: Mapping[int, MemoryPolicy]
) -> dict[int, MemoryPolicy | None]:
    """Policies, or their absence, that hwloc's locality does not back. Only nodes with CPUs to use count."""
    whole = GOLDEN[name]["whole"]
    usable = GOLDEN[name].get("cut", whole)
    found = {}
    for node in nodes:
        if not ROOTS[name].machine.cpus().intersection(node.cpus):
            continue
        beside = {
            int(other)
            for other, cpus in whole.nodes.items()
            if cpus == whole.nodes[str(node.number)] and int(other) in parse_kernel_list(usable.memory)
        }
        policy = policies.get(node.number)
        if not (beside.issuperset(policy[1]) if policy else not beside):
            found[node.number] = policy
    return found


def test_the_golden_knows_high_bandwidth_memory_that_is_near() -> None:
    """Else the tests above would compare nothing of it."""
    for name in ("HBM flat, near by distance", "HBM flat, near by initiators"):
        nodes = GOLDEN[name]["whole"].nodes
        assert [nodes[str(node)] for node in range(8)] == [nodes[str(node)] for node in range(8, 16)]
        assert len(set(nodes.values())) == 8


def test_each_golden_machine_is_asked_about() -> None:
    assert set(GOLDEN) == set(ROOTS)
    assert set(DIFFERENCES) | set(POLICIES) <= set(ROOTS)
