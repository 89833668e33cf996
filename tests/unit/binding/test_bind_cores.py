"""Core binding, beyond the vectors of the contract."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.machine import make_facts, numa_table
from tests.support.outcome import assert_one_line, error_of

from dsl.binding import NodeGroup, place
from dsl.binding.rules import CPU_LIMIT, Binding, describe, describe_all, parse_core_list
from dsl.errors import PlacementError
from dsl.machine.kernel import NumaNode, Topology
from dsl.model.request import PlacementRequest
from dsl.words import format_ranges

cores = st.sets(st.integers(0, CPU_LIMIT - 1), min_size=1, max_size=64).map(sorted)


@given(cores)
def test_core_lists_survive_the_round_trip(numbers: list[int]) -> None:
    assert parse_core_list(format_ranges(numbers)) == numbers


@pytest.mark.guarantee("G8")
@given(st.text(st.sampled_from("0123456789,- ") | st.characters(), max_size=20))
def test_any_text_gives_ascending_cores_or_a_binding_error(text: str) -> None:
    error = error_of(PlacementError, parse_core_list, text)
    if error:
        assert repr(text) in error
        assert_one_line(error)
    else:
        numbers = parse_core_list(text)
        assert numbers == sorted(set(numbers)) != []


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "bad range ''"),
        ("a", "bad range 'a'"),
        ("3-", "bad range '3-'"),
        ("1-2-3", "bad range '1-2-3'"),
        ("6-2", "range '6-2' ends before it starts"),
        ("0,2-6,5-9", "'5-9' is not after 6"),
        ("1,1", "'1' is not after 1"),
        (f"0-{CPU_LIMIT}", "is beyond the last possible cpu, 65535"),
        ("99999999999999999999", "is beyond the last possible cpu"),
        ("\u0663", "bad range"),
    ],
)
def test_a_bad_core_list_names_the_part_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        parse_core_list(text)
    assert str(caught.value).startswith(f"core list {text!r}: ")
    assert message in str(caught.value)


def _bind(
    count: int, core_list: str | None, allowed: set[int], topology: Topology, **environ: str
) -> tuple[Binding, ...]:
    wish = PlacementRequest(bind_cores_to_rank=True, core_list=core_list)
    facts = make_facts(allowed=allowed, topology=topology)
    return place(wish, NodeGroup(count, environ), facts).bindings


def test_one_thread_of_each_core_that_may_be_used_and_no_other_cpu() -> None:
    """Hyper-threads next to each other, and a mask with holes: DeepSpeed would take cores 0 to 2."""
    topology = Topology(numa_table(range(8)), ((0, 1), (2, 3), (4, 5), (6, 7)))
    bindings = _bind(3, None, {1, 4, 5, 6}, topology)
    assert [binding.cpus for binding in bindings] == [(1,), (4,), (6,)]


def test_unknown_cores_are_taken_one_by_one() -> None:
    assert [binding.cpus for binding in _bind(2, None, {3, 9}, Topology())] == [(3,), (9,)]


def test_numa_nodes_are_named_by_their_own_numbers() -> None:
    topology = Topology((NumaNode(0, (0, 1)), NumaNode(8, (2, 3))), ())
    assert [binding.mempolicy for binding in _bind(2, "0-3", {0, 1, 2, 3}, topology)] == [
        ("bind", (0,)),
        ("bind", (8,)),
    ]


@pytest.mark.parametrize(
    "nodes, expected",
    [
        ([NumaNode(0, (0, 1), usable_memory=False)], None),
        ([NumaNode(0, (0, 1)), NumaNode(1, (), usable_memory=False)], None),
        ([NumaNode(0, (0, 1)), NumaNode(1, (0, 1), usable_memory=False)], ("bind", (0,))),
    ],
    ids=["plain", "high-bandwidth", "fake"],
)
def test_memory_that_may_not_be_used_is_never_bound(nodes: list[NumaNode], expected: object) -> None:
    (binding,) = _bind(1, "0-1", {0, 1}, Topology(tuple(nodes), ()))
    assert binding.mempolicy == expected


@pytest.mark.parametrize(
    "count, core_list, environ, message",
    [
        (1, "0-9", {}, "core list '0-9': this process may not use 2,4-9, only 0-1,3"),
        (4, None, {}, "at least one core needs to be assigned to each rank, but 4 workers share 3 (0-1,3)"),
        (1, None, {"KMP_AFFINITY": "compact"}, "KMP_AFFINITY is set and conflicts with --bind_cores_to_rank"),
    ],
)
def test_cores_that_cannot_be_given(
    count: int, core_list: str | None, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        _bind(count, core_list, {0, 1, 3}, Topology(), **environ)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "binding, text",
    [
        (Binding((0, 1, 4)), "cores 0-1,4, memory not bound"),
        (Binding((0,), ("bind", (0, 1))), "cores 0, memory bound to numa node 0-1"),
        (Binding((0,), ("preferred", (2,))), "cores 0, memory preferred on numa node 2"),
    ],
)
def test_a_binding_in_words(binding: Binding, text: str) -> None:
    assert describe(binding) == text


def test_every_worker_is_told_of_and_equal_ones_together() -> None:
    bindings = [Binding((0, 1)), Binding((2,)), Binding((0, 1))]
    assert describe_all("rank", 4, bindings) == [
        "ranks 4,6: cores 0-1, memory not bound",
        "rank 5: cores 2, memory not bound",
    ]
