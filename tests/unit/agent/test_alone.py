"""A node alone and its conductor: what follows from an event, without a process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.conducting import a_job
from tests.support.events import a_lost_guard, a_plan, a_signal, an_attempt, an_exit, end

from dsl import Exit
from dsl._record import replace
from dsl.agent import carrier
from dsl.agent.alone import Alone
from dsl.model.outcome import REQUEUE_CODE, AttemptOutcome, Decision, Hang, Pausing, Restarting, exit_code

pytestmark = pytest.mark.guarantee("G2")

FAILED = an_exit(1, code=7)
FINE = an_exit(0, code=0)


class Clock:
    """The time of the conductor."""

    now_s = 100.0

    def monotonic(self) -> float:
        """Now."""
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(carrier, "time", found)
    return found


class Node:
    """A node alone."""

    def __init__(self, restarts: int = 0) -> None:
        self.member = Alone(a_job(2, restarts=restarts), a_plan(2), 100.0)

    def after(self, *exits: Exit, number: int = 0, **fields: Any) -> Decision:
        """What follows an attempt."""
        return self.follow(attempt(*exits, number=number, **fields))

    def follow(self, event: object, last: AttemptOutcome | None = None) -> Decision:
        """What follows from an event, and from what the conductor says about it."""
        last = event if isinstance(event, AttemptOutcome) else last
        self.member.hear(event)
        decision = self.member.decide(event, last)
        for said in self.member.read() if isinstance(event, Hang) else ():
            decision = self.member.decide(said, last)
        return decision


def attempt(
    *exits: Exit, number: int = 0, preempt_signal: int | None = None, **fields: Any
) -> AttemptOutcome:
    cause = next((one for one in exits if one.status and not one.caused_by_stop), None)
    plan = replace(a_plan(2, attempt=number), preempt_signal=preempt_signal)
    return replace(an_attempt(plan, list(exits), end(cause, **fields)), cause=cause)


@pytest.mark.parametrize(
    "granted, kinds", [(0, ["end"]), (1, ["start", "end"]), (2, ["start", "start", "end"])]
)
def test_a_failure_is_a_restart_as_long_as_some_are_left(granted: int, kinds: list[str]) -> None:
    node = Node(granted)
    found = [node.after(FINE, FAILED, number=number) for number in range(len(kinds))]
    assert [one.kind for one in found] == kinds
    assert [(one.attempt, one.restarts) for one in found[:-1]] == [
        (one, one) for one in range(1, granted + 1)
    ]
    told = [one.told for one in found[:-1]]
    assert all(isinstance(one, Restarting) and one.most == granted for one in told)
    assert found[-1].code == 7


def test_a_group_that_fails_at_once_again_and_again_is_started_again_later(clock: Clock) -> None:
    node = Node(99)
    for number in range(5):
        assert node.after(FAILED, number=number).kind == "start"
    last = attempt(FAILED, number=5)
    node.member.hear(last)
    assert node.member.decide(last, last) == Decision("go_on", told=Pausing())
    assert node.member.deadline_s == pytest.approx(100.1)
    clock.now_s = 100.2
    (meeting,) = node.member.read()
    decision = node.member.decide(meeting, last)
    assert (decision.kind, decision.attempt, decision.restarts) == ("start", 6, 6)


@pytest.mark.parametrize(
    "event, kind, code",
    [
        (a_signal(2, "stop"), "end", 130),
        (a_signal(15, "ignore"), "end", 143),
        (a_signal(10, "preempt"), "end", REQUEUE_CODE),
        (a_signal(1, "reopen"), "go_on", 0),
        (a_lost_guard(), "end", 7),
    ],
)
def test_a_signal_ends_a_pause_at_once(event: object, kind: str, code: int) -> None:
    node = Node(99)
    for number in range(6):
        node.after(FAILED, number=number)
    found = node.follow(event, attempt(FAILED, number=5, preempt_signal=10))
    assert (found.kind, found.code) == (kind, code)


@pytest.mark.parametrize(
    "exits, fields, code",
    [
        ([FINE, FAILED], {"stop_signal": 15}, 7),
        ([FINE, FAILED], {"survivors": [(5, "D", "io", "nfs_wait", None)]}, 7),
        ([FINE], {"stop_signal": 2}, 130),
        ([FINE], {"survivors": [(5, "D", "io", None, None)]}, 1),
        ([FINE], {"stop_signal": 10, "preempt_signal": 10}, REQUEUE_CODE),
    ],
)
def test_nothing_is_started_again_when_somebody_asked_for_the_end_or_something_is_left(
    exits: list[Exit], fields: dict[str, Any], code: int
) -> None:
    found = Node(3).after(*exits, **fields)
    assert (found.kind, found.code) == ("end", code)


def test_a_group_that_ended_well_ends_the_job_with_0_whatever_restarts_are_left() -> None:
    found = Node(3).after(FINE)
    assert (found.kind, found.code) == ("end", 0)


def test_a_job_that_hangs_is_stopped_and_not_started_again() -> None:
    node, hang = Node(3), Hang(0, 9.0, "stop", ("no progress",), (1,))
    found = node.follow(hang)
    assert (found.kind, found.signum) == ("stop", 15)
    last = replace(attempt(an_exit(1, signal=15, by_us=True)), news=(hang,))
    assert node.follow(last) == Decision("end", code=124)


def test_workers_that_end_before_their_stop_is_read_end_the_job() -> None:
    node, hang = Node(3), Hang(0, 9.0, "stop", ("no progress",), (1,))
    node.member.hear(hang)
    assert node.follow(replace(attempt(FINE), news=(hang,))) == Decision("end", code=124)


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
