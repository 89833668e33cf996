"""What follows from the states of torch's rendezvous that a node sees."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from dsl._record import replace
from dsl.rendezvous.view import (
    NodeClocks,
    Pulse,
    RoundNodes,
    View,
    end_last_call,
    missing,
    name_node,
    read_state,
    take_out,
)

A, B, C = ("a", 1, 0), ("b", 2, 0), ("c", 3, 0)
NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


class Desc(SimpleNamespace):
    """Stands in for torch's descriptor of a node."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.addr, self.pid, self.local_id))


def desc(node: tuple[str, int, int]) -> Desc:
    return Desc(addr=node[0], pid=node[1], local_id=node[2])


def state(*, complete: bool = True, **changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "round": 2,
        "complete": complete,
        "closed": False,
        "deadline": NOON,
        "participants": {desc(B): 1, desc(A): 0},
        "wait_list": {desc(C)},
        "redundancy_list": set(),
        "last_heartbeats": {desc(one): NOON for one in (A, B, C)},
    }
    return SimpleNamespace(**{**fields, **changes})


VIEW = View(2, True, False, (A, B), (C,), (), ((A, 0.0), (B, 0.0), (C, 0.0)))


@pytest.mark.parametrize("noon", [NOON, NOON.replace(tzinfo=None)])
def test_a_state_is_read_also_with_times_that_have_no_zone(noon: datetime) -> None:
    """Older versions of torch have no zone in their times, and no list of spares."""
    old = state(last_heartbeats={desc(A): noon + timedelta(milliseconds=500)})
    del old.redundancy_list
    view = read_state(old)
    assert (view.round, view.participants, view.waiting, view.spares) == (2, (A, B), (C,), ())
    assert dict(view.heartbeats) == {A: NOON.timestamp() + 0.5}


@pytest.mark.parametrize("node", [A, C])
def test_a_node_that_goes_is_in_no_list(node: tuple[str, int, int]) -> None:
    found = state()
    assert take_out(found, node, 1)
    view = read_state(found)
    assert node not in (*view.participants, *view.waiting, *view.spares, *dict(view.heartbeats))
    assert (found.complete, found.round, found.deadline) == (True, 2, NOON)


def test_a_node_that_was_not_there_changes_nothing() -> None:
    found = state()
    assert not take_out(found, ("z", 1, 0), 1)
    assert found == state()


def test_the_last_node_of_a_round_makes_place_for_the_next_one() -> None:
    found = state(participants={desc(A): 0})
    take_out(found, A, 1)
    assert (found.complete, found.round) == (False, 3)


@pytest.mark.parametrize("least, deadline", [(1, NOON), (2, None)])
def test_a_round_that_has_too_few_nodes_again_has_no_deadline(least: int, deadline: datetime | None) -> None:
    found = state(complete=False)
    take_out(found, B, least)
    assert (found.complete, found.round, found.deadline) == (False, 2, deadline)


def test_the_last_call_is_ended_once() -> None:
    found = state(complete=False)
    assert end_last_call(found)
    assert found.deadline < NOON
    assert not end_last_call(found)
    assert not end_last_call(state(complete=False, deadline=None))
    assert not end_last_call(state(complete=True))


@pytest.mark.parametrize(
    "view, expected",
    [
        (VIEW, ()),
        (replace(VIEW, participants=(A,)), (B,)),
        (replace(VIEW, participants=(A,), waiting=(B,)), ()),
        (replace(VIEW, participants=(A,), spares=(B,)), ()),
        (replace(VIEW, participants=(A,), is_closed=True), ()),
        (replace(VIEW, participants=(A,), round=3), ()),
    ],
)
def test_who_meets_the_others_again_has_not_left(view: View, expected: tuple[object, ...]) -> None:
    round_nodes = RoundNodes(2, (A, B), ("alpha", "beta"))
    assert missing(round_nodes, view) == expected


def heard(**seconds: float) -> View:
    nodes = {"a": A, "b": B, "c": C}
    return View(heartbeats=tuple([(nodes[name], at) for name, at in seconds.items()]))


def test_a_heartbeat_that_was_there_before_proves_nothing_of_a_clock() -> None:
    clocks = NodeClocks(10)
    clocks.look(heard(b=-3600), A, 0)
    assert (clocks.far(), clocks.is_ours_wrong) == ((), False)


def test_a_heartbeat_of_the_future_proves_a_clock_wrong() -> None:
    clocks = NodeClocks(10)
    clocks.look(heard(b=3600), A, 0)
    assert clocks.far() == ((B, 3600),)
    assert clocks.is_ours_wrong


@pytest.mark.parametrize("first", [heard(), heard(b=-3605)])
def test_a_heartbeat_that_is_new_and_old_at_once_proves_a_clock_wrong(first: View) -> None:
    clocks = NodeClocks(10)
    clocks.look(first, A, 0)
    clocks.look(heard(b=-3600), A, 1)
    assert clocks.far() == ((B, -3601),)


def test_what_may_have_been_written_long_ago_proves_nothing() -> None:
    """Between two looks this node was frozen for a minute."""
    clocks = NodeClocks(10)
    clocks.look(heard(b=0), A, 0)
    clocks.look(heard(b=5), A, 60)
    assert clocks.far() == ()


def test_the_clock_that_differs_from_most_is_the_wrong_one() -> None:
    clocks = NodeClocks(10)
    clocks.look(heard(), A, 0)
    clocks.look(heard(b=3600), A, 0)
    assert clocks.is_ours_wrong
    clocks.look(heard(b=3600, c=0), A, 0)
    assert not clocks.is_ours_wrong


def test_a_node_lives_as_long_as_its_heartbeat_changes_whatever_it_says() -> None:
    pulse = Pulse(10)
    pulse.look(heard(b=9999), 0)
    assert pulse.is_alive(B, 10)
    assert not pulse.is_alive(B, 11)
    pulse.look(heard(b=1), 11)
    assert pulse.is_alive(B, 21)
    pulse.look(heard(b=1), 22)
    assert not pulse.is_alive(B, 22)
    pulse.look(heard(), 23)
    assert not pulse.is_alive(B, 23)


def test_a_descriptor_is_a_name() -> None:
    assert name_node(desc(A)) == A
