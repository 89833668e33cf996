"""``--bind auto`` and ``--mem-policy`` on synthetic machines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.machine import make_facts, make_gpus, numa_table
from tests.support.outcome import error_of

from dsl._record import replace
from dsl.binding import NodeGroup, Placement, place
from dsl.binding.rules import Binding, bind_auto, memory_policy
from dsl.errors import OptionError, PlacementError
from dsl.machine.kernel import NumaNode, Topology
from dsl.model.request import PlacementRequest
from dsl.words import format_ranges

AUTO = PlacementRequest(bind="auto")
NUMA = PlacementRequest(numa_binding="node")


def _machine(*nodes: Sequence[int], threads: int = 1) -> Topology:
    """NUMA nodes with these CPUs; with two threads the second of CPU n is n + half of all."""
    cpus = sorted({cpu for node in nodes for cpu in node})
    half = len(cpus) // threads
    return Topology(numa_table(*nodes), tuple(tuple(range(cpu, len(cpus), half)) for cpu in cpus[:half]))


TWO_NODES = _machine(range(4), range(4, 8))
THREADED = _machine([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15], threads=2)
NPS4 = _machine(*[range(first, first + 8) for first in range(0, 64, 8)])
FAKE = _machine(range(4), range(4), range(4, 8), range(4, 8))
FLAT_HBM = _machine(range(4), range(4, 8), [], [])


def _cpus(
    homes: Sequence[int | None], topology: Topology, allowed: Collection[int] | None = None
) -> list[str]:
    mine = [cpu for core in topology.cores for cpu in core] if allowed is None else allowed
    bindings, _ = bind_auto(homes, mine, topology, strict=False)
    return [format_ranges(one) for one in bindings]


@pytest.mark.parametrize(
    "topology, homes, expected",
    [
        (TWO_NODES, [1, 0], ["4-7", "0-3"]),
        (TWO_NODES, [0, 0, 1, 0], ["0-1", "2", "4-7", "3"]),
        (THREADED, [0, 0, 1], ["0-1,8-9", "2-3,10-11", "4-7,12-15"]),
        (NPS4, [3, 1, 7, 5], ["24-31", "8-15", "56-63", "40-47"]),
        (FAKE, [1, 3], ["0-3", "4-7"]),
    ],
)
def test_workers_get_the_cores_beside_their_devices(
    topology: Topology, homes: list[int], expected: list[str]
) -> None:
    assert _cpus(homes, topology) == expected


@pytest.mark.parametrize(
    "topology, count, expected",
    [
        (TWO_NODES, 1, ["0-7"]),
        (TWO_NODES, 2, ["0-3", "4-7"]),
        (TWO_NODES, 3, ["0-2", "3-5", "6-7"]),
        (TWO_NODES, 4, ["0-1", "2-3", "4-5", "6-7"]),
        (THREADED, 2, ["0-3,8-11", "4-7,12-15"]),
        (NPS4, 4, ["0-15", "16-31", "32-47", "48-63"]),
        (_machine([0, 2, 4, 6], [1, 3, 5, 7]), 2, ["0,2,4,6", "1,3,5,7"]),
        (_machine(range(4), range(4, 7)), 2, ["0-3", "4-6"]),
        (_machine(range(2), range(2, 8)), 4, ["0-1", "2-3", "4-5", "6-7"]),
        (Topology(), 2, ["0-1", "2-3"]),
    ],
)
def test_without_devices_cores_are_split_evenly_and_nodes_kept_whole_if_equal_shares_allow(
    topology: Topology, count: int, expected: list[str]
) -> None:
    allowed = None if topology.cores else range(4)
    assert _cpus([None] * count, topology, allowed) == expected


def test_only_allowed_cpus_are_given() -> None:
    assert _cpus([None, None], THREADED, [1, 2, 9, 12]) == ["1-2,9", "12"]


def _said(homes: Sequence[int | None], topology: Topology, allowed: Collection[int]) -> list[str]:
    return [notice.text for notice in bind_auto(homes, allowed, topology, strict=False)[1]]


@pytest.mark.parametrize(
    "homes, allowed, said",
    [
        ([None] * 3, [0, 1], "3 workers share cores, 2 may be used"),
        ([0, 0], [0, 4, 5], "2 workers share cores, 3 may be used"),
        ([0, 1], [0, 1], "the device of local rank 1 is at NUMA node 1, none of whose CPUs may be used"),
        ([0, None], range(8), "the NUMA node of some workers' devices is not known"),
    ],
)
def test_less_than_asked_is_a_warning_and_refused_if_strict(
    homes: list[int | None], allowed: Collection[int], said: str
) -> None:
    (text,) = _said(homes, TWO_NODES, allowed)
    assert said in text
    with pytest.raises(PlacementError, match=said) as caught:
        bind_auto(homes, allowed, TWO_NODES, strict=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "topology, count, allowed, expected",
    [
        (THREADED, 4, [0, 8, 1, 9], ["0-1,8-9"] * 4),
        (TWO_NODES, 10, None, ["0-3"] * 5 + ["4-7"] * 5),
        (TWO_NODES, 9, None, ["0-7"] * 9),
        (THREADED, 10, None, ["0-3,8-11"] * 5 + ["4-7,12-15"] * 5),
        (TWO_NODES, 6, [0, 1, 4], ["0-1"] * 4 + ["4"] * 2),
        (TWO_NODES, 4, [0, 1, 4], ["0-1,4"] * 4),
        (NPS4, 72, None, [f"{first}-{first + 7}" for first in range(0, 64, 8) for _ in range(9)]),
        (Topology(), 64, [2, 3], ["2-3"] * 64),
    ],
)
def test_workers_that_outnumber_the_cores_have_them_all_of_a_node_if_that_is_fair(
    topology: Topology, count: int, allowed: list[int] | None, expected: list[str]
) -> None:
    assert _cpus([None] * count, topology, allowed) == expected


@pytest.mark.parametrize(
    "homes, expected",
    [
        ([0] * 5 + [1], ["0-3"] * 5 + ["4-7"]),
        ([1, 0, 1, 1, 1, 1], ["4-7", "0-3", "4-7", "4-7", "4-7", "4-7"]),
        ([0] * 5, ["0-3"] * 5),
    ],
)
def test_sharing_beside_a_device_leaves_the_other_nodes_alone(homes: list[int], expected: list[str]) -> None:
    assert _cpus(homes, TWO_NODES) == expected
    assert _said(homes, TWO_NODES, range(8)) == [
        f"--bind auto: {len(homes)} workers share cores, 8 may be used"
    ]


@st.composite
def _machines(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    """Any NUMA nodes of cores of one or two threads, and the CPUs of them that may be used."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    threads = draw(st.integers(1, 2))
    total = sum(sizes)
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    nodes = [
        [cpu + thread * total for thread in range(threads) for cpu in range(first, first + size)]
        for first, size in zip(firsts, sizes, strict=True)
    ]
    allowed = draw(
        st.sets(st.integers(0, total * threads - 1), min_size=1) | st.just(set(range(total * threads)))
    )
    return _machine(*nodes, threads=threads), sorted(allowed)


def _usable(topology: Topology, allowed: Collection[int]) -> list[frozenset[int]]:
    """What may be used of each core."""
    return [core for own in topology.cores if (core := frozenset(own).intersection(allowed))]


def _claims(shares: Sequence[frozenset[int]], cores: Sequence[frozenset[int]]) -> list[Fraction]:
    """Cores of each worker, those that it shares in parts."""
    sharers = {core: sum(not core.isdisjoint(share) for share in shares) for core in cores}
    return [
        sum((Fraction(1, sharers[core]) for core in cores if not core.isdisjoint(share)), Fraction())
        for share in shares
    ]


@given(_machines(), st.integers(1, 70))
def test_every_split_is_fair_whole_and_complete(machine: tuple[Topology, list[int]], count: int) -> None:
    topology, allowed = machine
    cores = _usable(topology, allowed)
    bindings, notices = bind_auto([None] * count, allowed, topology, strict=False)
    shares = [frozenset(one) for one in bindings]
    claims = _claims(shares, cores)
    assert len(shares) == count
    assert all(len(one) == len(share) for one, share in zip(bindings, shares, strict=True))
    assert frozenset().union(*shares) == frozenset(allowed)
    assert all(share.isdisjoint(core) or share >= core for share in shares for core in cores)
    if count <= len(cores):
        assert sum(map(len, shares)) == len(allowed)
        assert max(claims) - min(claims) <= 1
        assert not notices
    else:
        assert set(claims) == {Fraction(len(cores), count)}
        assert all(one == other or one.isdisjoint(other) for one in shares for other in shares)
        assert [notice.text for notice in notices] == [
            f"--bind auto: {count} workers share cores, {len(cores)} may be used"
        ]


@given(_machines(), st.data())
def test_the_workers_of_each_device_node_deal_its_cores_fairly(
    machine: tuple[Topology, list[int]], data: st.DataObject
) -> None:
    topology, allowed = machine
    nodes = {node.number: set(node.cpus).intersection(allowed) for node in topology.numa_nodes}
    reachable = [number for number, cpus in nodes.items() if cpus]
    homes = data.draw(st.lists(st.sampled_from(reachable), min_size=1, max_size=30))
    bindings, _ = bind_auto(homes, allowed, topology, strict=False)
    for home in set(homes):
        cores = _usable(topology, nodes[home])
        pairs = zip(homes, bindings, strict=True)
        shares = [frozenset(one) for place, one in pairs if place == home]
        claims = _claims(shares, cores)
        assert frozenset().union(*shares) == nodes[home]
        assert all(share.isdisjoint(core) or share >= core for share in shares for core in cores)
        assert max(claims) - min(claims) <= (len(shares) <= len(cores))
        assert sum(claims) == len(cores)


@pytest.mark.parametrize(
    "mode, cpus, topology, expected",
    [
        ("preferred", [4, 5], TWO_NODES, ("preferred", (1,))),
        ("preferred", [3, 4], TWO_NODES, None),
        ("preferred", [4, 5], FLAT_HBM, ("preferred", (3,))),
        ("preferred", [4, 5], FAKE, ("preferred", (2,))),
        ("bind", [3, 4], TWO_NODES, ("bind", (0, 1))),
        ("bind", [4], FLAT_HBM, ("bind", (1,))),
        ("interleave", [4], FAKE, ("interleave", (2, 3))),
        ("local", [4], TWO_NODES, ("local", ())),
        ("none", [4], TWO_NODES, None),
        ("bind", [0], Topology((NumaNode(0, (0,), usable_memory=False),)), None),
        ("bind", [0], Topology(), None),
    ],
)
def test_a_policy_names_the_nodes_of_the_cores(
    mode: str, cpus: list[int], topology: Topology, expected: object
) -> None:
    assert memory_policy(mode, cpus, topology) == expected


def _place(wish: PlacementRequest, count: int = 2, homes: Sequence[int] = (), **environ: str) -> Placement:
    """On the threaded machine, whose CPUs are one package, with NVIDIA devices at these NUMA nodes."""
    facts = make_facts(
        allowed=range(16), topology=THREADED, packages=(tuple(range(16)),), gpus=make_gpus(homes)
    )
    return place(wish, NodeGroup(count, environ), facts)


def test_threads_are_physical_cores_unless_the_user_chose() -> None:
    assert _place(AUTO).threads[0] == 4
    assert _place(AUTO, OMP_NUM_THREADS="7").threads == ()


def test_cores_that_are_shared_count_in_parts() -> None:
    assert _place(PlacementRequest(numa_binding="socket")).threads == (4, 4)
    assert _place(AUTO, 20).threads == (1,) * 20


def test_workers_that_share_the_cores_of_a_node_prefer_its_memory() -> None:
    placed = _place(AUTO, 20)
    assert [one.mempolicy for one in placed.bindings] == [("preferred", (0,))] * 10 + [
        ("preferred", (1,))
    ] * 10
    assert [one.mempolicy for one in _place(AUTO, 9).bindings] == [None] * 9


def test_threads_of_few_workers_beside_many_are_their_own_cores() -> None:
    assert _place(AUTO, 7, [0] * 6 + [1]).threads == (1,) * 6 + (4,)


def test_openmp_must_not_undo_the_binding() -> None:
    with pytest.raises(PlacementError, match=r"^KMP_AFFINITY is set and conflicts with --bind auto"):
        _place(AUTO, KMP_AFFINITY="compact")
    levels = [one.level for one in _place(NUMA, KMP_AFFINITY="compact").notices if "KMP" in one.text]
    assert levels == ["warning"]


def test_a_policy_replaces_that_of_the_binding_in_force() -> None:
    plain = PlacementRequest(bind_cores_to_rank=True, core_list="0-1")
    assert _place(plain, 1).bindings == (Binding((0, 1), ("bind", (0,))),)
    assert _place(replace(plain, memory="interleave"), 1).bindings == (Binding((0, 1), ("interleave", (0,))),)


@pytest.mark.parametrize("facts", [{"memory": "bind"}, {"strict": True}])
def test_an_option_without_a_binding_is_a_warning(facts: dict[str, Any]) -> None:
    placed = _place(PlacementRequest(**facts))
    assert [notice.level for notice in placed.notices] == ["warning"]
    assert not placed.bindings


def test_devices_decide_where_they_are_given() -> None:
    placed = _place(AUTO, 2, (1, 0))
    assert [one.mempolicy for one in placed.bindings] == [("preferred", (1,)), ("preferred", (0,))]
    device = placed.devices[1]
    assert device is not None
    assert (device.name, device.pci_address, device.numa_node) == ("H200", "0000:01:00.0", 0)


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "wish, said",
    [
        (
            {"bind": "auto", "bind_cores_to_rank": True},
            "--bind auto cannot be used with --bind_cores_to_rank",
        ),
        ({"bind": "auto", "numa_binding": "node"}, "--bind auto cannot be used with --numa-binding"),
        (
            {"numa_binding": "node", "bind_cores_to_rank": True},
            "--numa-binding cannot be used with --bind_cores_to_rank",
        ),
    ],
)
def test_two_bindings_exclude_each_other(wish: dict[str, Any], said: str) -> None:
    assert error_of(OptionError, _place, PlacementRequest(**wish)) == f"{said}, leave one of them out"


def test_deepspeeds_binding_counts_the_threads_of_all_workers_whatever_the_user_says() -> None:
    placed = _place(PlacementRequest(bind_cores_to_rank=True), OMP_NUM_THREADS="7")
    assert (placed.node_threads, placed.threads) == (4, ())
    assert [_place(wish).node_threads for wish in (AUTO, NUMA)] == [None, None]


@pytest.mark.parametrize(
    "wish, said",
    [
        (PlacementRequest(bind_cores_to_rank=True), "cores bound to each worker: 4"),
        (AUTO, "CPUs bound to each worker: 8"),
    ],
)
def test_a_command_may_announce_how_much_each_worker_got(wish: PlacementRequest, said: str) -> None:
    facts = make_facts(allowed=range(16), topology=THREADED)
    group = NodeGroup(2, {}, first_rank=4, noun="rank", announces=True)
    notices = place(wish, group, facts).notices
    assert [(one.level, one.text.partition(", ")[0].partition(": cores")[0]) for one in notices] == [
        ("detail", said),
        ("debug", "rank 4"),
        ("debug", "rank 5"),
    ]
    assert [one.level for one in place(wish, replace(group, announces=False), facts).notices] == ["debug"] * 2
