"""What follows from an event where nodes come and go: a table, without a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.events import a_lost_guard, a_plan, a_signal, an_attempt, an_exit, end, exited

from dsl import Ended, Exit
from dsl._record import replace
from dsl.agent.elastic import DOUBT_S, Elastic, History, Step
from dsl.model.job import Meeting, Notice
from dsl.model.nodes import MeetingRefused, NodesFinished, NodesMet, PeerFailure
from dsl.model.outcome import (
    REQUEUE_CODE,
    Membership,
    MembershipChanged,
    PatienceOver,
    Tried,
)

FAILED, FINE = an_exit(1, code=7), an_exit(0, code=0)
STOPPED = [an_exit(0, signal=15, by_us=True), an_exit(1, signal=15, by_us=True)]
TWO = Membership(2)
PEER = PeerFailure("b", 3, 9, None, is_final=False)
LAST = replace(PEER, is_final=True)
LEFT = MembershipChanged(Membership(1), ("b",))
JOINS = MembershipChanged(Membership(2, waiting=1))
CLOSED = MembershipChanged(Membership(2, is_closed=True))
LOST = MeetingRefused("gone", "lost")
MET = NodesMet(Meeting(0, 0, (2, 2), "a", 7, restarts=4, reason="failure"), ("a", "b"))


def decide(
    event: object,
    *,
    exits: Sequence[Exit] = (),
    ended: Ended | None = None,
    news: Sequence[object] = (),
    membership: Membership = TWO,
    least: int = 2,
    plan: Any = None,
    **fields: Any,
) -> Step:
    last = None if ended is None else an_attempt(plan or a_plan(2), exits, ended, news=tuple(news))
    told = (*news, event) if event is not ended else tuple(news)
    event = last if event is ended else event
    history = History(**{"max_restarts": 3, "last": last, "news": told, **fields})
    return Elastic(least, 2, preempt_signal=10).decide(history, event, membership)


def after(ended: Ended, *exits: Exit, **fields: Any) -> Step:
    return decide(ended, exits=exits, ended=ended, **fields)


@pytest.mark.parametrize(
    "event, kind, counted",
    [
        (exited(FAILED), "go_on", True),
        (PEER, "restart", True),
        (LAST, "stop", True),
        (LEFT, "restart", False),
        (JOINS, "restart", False),
        (CLOSED, "go_on", True),
        (MembershipChanged(Membership(1, is_closed=True), ("b",)), "stop", True),
        (MembershipChanged(TWO), "go_on", True),
        (LOST, "go_on", True),
        (a_signal(), "go_on", True),
    ],
)
def test_while_workers_run(event: object, kind: str, *, counted: bool) -> None:
    decision = decide(event)
    assert (decision.kind, decision.counted) == (kind, counted)


@pytest.mark.parametrize("event", [PEER, LAST, LEFT, JOINS])
@pytest.mark.parametrize("action", ["stop", "preempt"])
def test_workers_that_have_time_to_end_in_keep_it_whatever_others_do(event: object, action: str) -> None:
    assert decide(event, news=[a_signal(action=action)]).kind == "go_on"


@pytest.mark.parametrize(
    "news, counted", [([PEER], True), ([LEFT], False), ([JOINS], False), ([LEFT, PEER], False)]
)
def test_workers_that_were_stopped_because_of_another_node_are_started_again(
    news: list[object], *, counted: bool
) -> None:
    decision = after(end(), *STOPPED, news=news, restarts=3)
    assert (decision.kind, decision.counted) == ("meet", counted)


@pytest.mark.parametrize("restarts, kind", [(0, "meet"), (2, "meet"), (3, "leave"), (4, "leave")])
def test_a_failure_is_a_restart_as_long_as_the_nodes_have_some_left(restarts: int, kind: str) -> None:
    decision = after(end(FAILED), FINE, FAILED, restarts=restarts)
    assert (decision.kind, decision.counted) == (kind, True)
    assert (decision.code, decision.closes) == ((7, True) if kind == "leave" else (0, False))


def test_what_dies_of_a_lost_node_counts_not() -> None:
    decision = after(end(FAILED), FAILED, news=[LEFT], restarts=3, least=1)
    assert (decision.kind, decision.counted) == ("meet", False)


@pytest.mark.parametrize(
    "least, membership, news, kind",
    [
        (2, TWO, [], "leave"),  # it cannot go on with fewer nodes
        (1, TWO, [], "doubt"),
        (1, Membership(1), [], "leave"),  # there is nobody to lose
        (1, Membership(2, waiting=1), [], "leave"),
        (1, TWO, [PEER], "leave"),  # the other one lives
        (1, Membership(3), [PEER], "doubt"),
    ],
)
def test_a_failure_too_many_is_doubted_while_a_node_may_be_lost(
    least: int, membership: Membership, news: list[object], kind: str
) -> None:
    decision = after(end(FAILED), FAILED, restarts=3, least=least, membership=membership, news=news)
    assert decision.kind == kind
    assert decision.closes == (kind == "leave")
    assert kind != "doubt" or decision.within_s == DOUBT_S


@pytest.mark.parametrize(
    "event, membership, expected",
    [
        (LEFT, Membership(1), Step("meet", counted=False)),
        (PatienceOver(), TWO, "final"),
        (MembershipChanged(Membership(2, waiting=1)), Membership(2, waiting=1), "final"),
        (PEER, TWO, "final"),
        (MembershipChanged(TWO), TWO, Step("go_on")),
        (CLOSED, CLOSED.membership, 7),
        (LAST, TWO, 9),
        (LOST, TWO, 7),
        (a_signal(2), TWO, 130),
    ],
)
def test_the_end_of_a_doubt(event: object, membership: Membership, expected: object) -> None:
    decision = decide(
        event,
        exits=[FAILED],
        ended=end(FAILED),
        membership=membership,
        least=1,
        restarts=3,
        awaits="doubt",
    )
    if isinstance(expected, Step):
        assert decision == expected
    else:
        assert decision.kind in ("leave", "end")
        assert decision.closes == (expected == "final")
        assert decision.code == (7 if expected == "final" else expected)


def test_a_group_that_ended_well_waits_for_the_others_whoever_waits_to_join() -> None:
    assert after(end(), FINE, news=[JOINS]) == Step("finish")


@pytest.mark.parametrize(
    "event, kind, counted, code",
    [
        (NodesFinished(), "leave", True, 0),
        (PEER, "meet", True, 0),
        (LEFT, "meet", False, 0),
        (JOINS, "meet", False, 0),
        (CLOSED, "go_on", True, 0),
        (LAST, "leave", True, 9),
        (LOST, "end", True, 0),
        (a_signal(), "leave", True, 143),
        (a_lost_guard(), "leave", True, 1),
    ],
)
def test_whoever_has_finished_joins_again_if_the_others_have_to(
    event: object, kind: str, *, counted: bool, code: int
) -> None:
    decision = decide(event, exits=[FINE], ended=end(), awaits="finish")
    assert (decision.kind, decision.counted, decision.code) == (kind, counted, code)


@pytest.mark.parametrize(
    "event, kind, code",
    [
        (MET, "restart", 0),
        (PEER, "go_on", 0),
        (LEFT, "go_on", 0),
        (LAST, "leave", 9),
        (MeetingRefused("too few nodes"), "leave", 7),
        (LOST, "end", 7),
        (a_signal(action="ignore"), "leave", 143),
        (a_signal(10, "preempt"), "leave", REQUEUE_CODE),
        (a_signal(action="forward"), "go_on", 0),
        (a_lost_guard(), "leave", 7),
    ],
)
def test_while_the_nodes_meet(event: object, kind: str, code: int) -> None:
    decision = decide(event, exits=[FAILED], ended=end(FAILED), awaits="meet")
    assert (decision.kind, decision.code) == (kind, code)
    assert not decision.closes
    assert (decision.why != "") == isinstance(event, MeetingRefused)
    assert decision.restarts == (4 if event is MET else None)


def test_a_node_that_is_not_needed_any_more_leaves_as_the_job_did() -> None:
    over = MeetingRefused("the job has ended", "unneeded")
    assert decide(over, exits=STOPPED, ended=end(), awaits="meet").code == 0
    assert decide(over, exits=[FAILED], ended=end(FAILED), awaits="meet").code == 7


@pytest.mark.parametrize(
    "event, kind",
    [
        (LOST, "end"),
        (PatienceOver(), "end"),
        (a_signal(), "end"),
        (a_lost_guard(), "end"),
        (LEFT, "go_on"),
        (PEER, "go_on"),
    ],
)
def test_while_a_node_takes_its_leave(event: object, kind: str) -> None:
    assert decide(event, exits=[FAILED], ended=end(FAILED), awaits="leave").kind == kind


@pytest.mark.guarantee("G1")
def test_a_node_without_a_guard_does_not_stay_for_the_others() -> None:
    stays = Notice("warning", "this node holds the store")
    assert decide(stays, ended=end(), awaits="leave").kind == "go_on"
    assert decide(stays, ended=end(), news=[a_lost_guard()], awaits="leave").kind == "end"


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "ended, exits, news, code, closes",
    [
        (end(None, stop_signal=15), STOPPED, [], 143, False),
        (end(FAILED), [FAILED], [a_signal(2, "ignore")], 130, False),
        (end(FAILED), [FAILED], [a_lost_guard()], 7, False),
        (end(None), STOPPED, [LAST], 9, False),
        (end(FAILED), [FAILED], [LAST], 9, False),
        (end(None, survivors=[(5, "D", "io", None, None)]), [FINE], [], 1, True),
        (end(None), STOPPED, [MembershipChanged(Membership(1, is_closed=True), ("b",))], 1, False),
    ],
)
def test_what_ends_the_part_of_this_node(
    ended: Ended, exits: list[Exit], news: list[object], code: int, *, closes: bool
) -> None:
    is_closed = any(isinstance(one, MembershipChanged) for one in news)
    decision = after(ended, *exits, news=news, membership=Membership(2, is_closed=is_closed))
    assert (decision.kind, decision.code, decision.closes) == ("leave", code, closes)


def test_a_job_that_was_preempted_can_be_queued_again() -> None:
    plan = a_plan(2, preempt_signal=10)
    assert after(end(None, stop_signal=10), *STOPPED, plan=plan).code == REQUEUE_CODE


def test_without_its_delegate_a_node_ends_as_its_workers_did() -> None:
    assert after(end(FAILED), FAILED, news=[LOST]) == replace(
        after(end(FAILED), FAILED, news=[LOST]), kind="end"
    )
    assert after(end(), FINE, news=[LOST]).code == 0


def test_attempts_that_get_nowhere_wait_longer_each_time_and_end_one_day() -> None:
    attempt = replace(an_attempt(a_plan(2), [FAILED], end(FAILED)), duration_s=1.0)
    pauses = []
    for count in range(1, 11):
        history = History(99, attempt, (Tried(1.0, "rank 0 7", count),))
        pauses.append(Elastic(1, 2, gives_up=True).decide(history, attempt, TWO))
    assert [one.within_s for one in pauses[:5]] == [0, 0, 1, 2, 4]
    assert pauses[-1].kind == "leave"
    assert pauses[-1].closes
    assert "in the same way" in pauses[-1].why
    # Restarts that were asked for are the user's to spend.
    assert Elastic(1, 2).decide(history, attempt, TWO).kind == "meet"
    # The number of nodes is fixed.
    history = replace(history, max_restarts=99)
    assert Elastic(2, 2).decide(history, attempt, TWO) == Step("meet")
    history = replace(history, tried=(Tried(0.5, "rank 0 7", 10),))
    assert Elastic(2, 2).decide(history, attempt, TWO) == Step("meet", within_s=1.6)
