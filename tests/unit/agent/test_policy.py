"""What follows from an event: a table, without a process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.events import a_lost_guard, a_plan, a_signal, an_attempt, an_exit, end, exited

from dsl import Ended, Exit
from dsl.agent.policy import decide
from dsl.model.outcome import (
    REQUEUE_CODE,
    Decision,
    History,
    Membership,
    MembershipChanged,
    PatienceOver,
    Tried,
    exit_code,
)

pytestmark = pytest.mark.guarantee("G2")

ALONE = Membership(1)
FAILED = an_exit(1, code=7)
FINE = an_exit(0, code=0)


def after(
    ended: Ended, *exits: Exit, membership: Membership = ALONE, plan: Any = None, **fields: Any
) -> Decision:
    attempt = an_attempt(plan or a_plan(2), exits, ended)
    history = History(**{"max_restarts": 0, "attempts": (attempt,), **fields})
    return decide(history, ended, membership)


def pausing(event: object, **fields: Any) -> Decision:
    """What follows from an event while a group that fails at once is to be started again later."""
    attempt = an_attempt(a_plan(2, **fields), [FAILED], end(FAILED))
    return decide(History(99, (attempt,), 6, awaits="pause"), event, ALONE)


def test_a_group_that_fails_at_once_again_and_again_is_started_again_later() -> None:
    for count, expected in ((5, Decision("restart")), (6, Decision("pause", within_s=0.1))):
        tried = (Tried(0.2, "rank 1 7", count),)
        assert after(end(FAILED), FAILED, max_restarts=99, count=count, tried=tried) == expected


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "event, expected",
    [
        (PatienceOver(), Decision("restart")),
        (a_signal(2, "stop"), Decision("end", code=130)),
        (a_signal(15, "ignore"), Decision("end", code=143)),
        (a_signal(10, "preempt"), Decision("end", code=REQUEUE_CODE)),
        (a_signal(1, "reopen"), Decision("go_on")),
        (a_lost_guard(), Decision("end", code=7)),
    ],
)
def test_a_signal_ends_a_pause_at_once(event: object, expected: Decision) -> None:
    assert pausing(event, preempt_signal=10) == expected


def test_an_event_before_the_end_changes_nothing() -> None:
    assert decide(History(3), exited(FAILED), ALONE) == Decision("go_on")


def test_a_group_that_ended_well_ends_the_job_with_0_whatever_restarts_are_left() -> None:
    assert after(end(), FINE, max_restarts=3) == Decision("end", code=0)


@pytest.mark.parametrize(
    "restarts, maximum, kind", [(0, 0, "end"), (0, 1, "restart"), (1, 1, "end"), (1, 2, "restart")]
)
def test_a_failure_is_a_restart_as_long_as_some_are_left(restarts: int, maximum: int, kind: str) -> None:
    decision = after(end(FAILED), FINE, FAILED, restarts=restarts, max_restarts=maximum)
    assert decision.kind == kind
    assert decision.counted
    assert decision.code == (7 if kind == "end" else 0)


@pytest.mark.parametrize(
    "ended, code",
    [
        (end(FAILED, stop_signal=15), 7),
        (end(FAILED, survivors=[(5, "D", "io", "nfs_wait", None)]), 7),
        (end(None, stop_signal=2), 130),
        (end(None, survivors=[(5, "D", "io", None, None)]), 1),
    ],
)
def test_nothing_is_started_again_when_somebody_asked_for_the_end_or_something_is_left(
    ended: Ended, code: int
) -> None:
    exits = (FINE, FAILED) if ended.first_failure else (FINE,)
    assert after(ended, *exits, max_restarts=3) == Decision("end", code=code)


def test_a_preempted_job_asks_to_be_queued_again() -> None:
    plan = a_plan(2, preempt_signal=10)
    assert after(end(None, stop_signal=10), FINE, plan=plan) == Decision("end", code=REQUEUE_CODE)


def test_nodes_that_wait_restart_the_group_without_counting() -> None:
    waiting = Membership(2, waiting=1)
    assert decide(History(0), MembershipChanged(waiting), waiting) == Decision("restart", counted=False)
    assert decide(History(0), MembershipChanged(Membership(2)), Membership(2)) == Decision("go_on")
    stopped = an_exit(0, signal=15, by_us=True)
    assert after(end(), stopped, regroups=True) == Decision("restart", counted=False)


def test_a_job_that_had_ended_well_before_it_was_stopped_is_not_started_again() -> None:
    assert after(end(), FINE, regroups=True) == Decision("end", code=0)


def test_a_failure_while_the_nodes_change_is_a_failure() -> None:
    assert after(end(FAILED), FAILED, regroups=True).kind == "end"
    assert after(end(FAILED), FAILED, regroups=True, max_restarts=1) == Decision("restart")


def test_a_job_whose_nodes_have_agreed_on_its_end_is_not_started_again() -> None:
    closed = Membership(2, is_closed=True)
    assert decide(History(3), MembershipChanged(closed), closed) == Decision("stop")
    assert after(end(FAILED), FAILED, membership=closed, max_restarts=3) == Decision("end", code=7)


def test_the_code_is_that_of_the_cause_and_never_0_for_a_failure() -> None:
    other = an_exit(0, code=3)
    assert exit_code([other, FAILED], end(FAILED), other) == 3
    assert exit_code([an_exit(0, code=0)], end(an_exit(0, code=0))) == 1


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("how", [{"signal": 15}, {"signal": 9}, {"code": 143}, {"code": 130}])
def test_a_cause_that_we_had_to_stop_counts_as_1_and_not_as_our_signal(how: Any) -> None:
    """143 and 130 say that the user ended the job."""
    cause = an_exit(0, by_us=True, **how)
    assert exit_code([FAILED, cause], end(FAILED), cause) == 1
    assert exit_code([cause], end()) == 1


@pytest.mark.guarantee("G2")
def test_a_cause_that_we_had_to_stop_keeps_an_exit_code_of_its_own() -> None:
    cause = an_exit(0, code=3, by_us=True)
    assert exit_code([FAILED, cause], end(FAILED), cause) == 3
