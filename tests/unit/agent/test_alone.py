"""A node alone: what follows from an event, without a process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.conducting import a_job
from tests.support.events import a_lost_guard, a_plan, a_signal, an_attempt, an_exit, end

from dsl import Exit
from dsl._record import replace
from dsl.agent import alone
from dsl.agent.alone import Alone
from dsl.model.job import Job
from dsl.model.outcome import REQUEUE_CODE, AttemptOutcome, Decision, Hang, Restarting, exit_code
from dsl.model.request import NO_POLICY, Policy

pytestmark = pytest.mark.guarantee("G2")

PREEMPTED = a_job(2)
FAILED = an_exit(1, code=7)
FINE = an_exit(0, code=0)


class Clock:
    """The time of the node."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(alone, "time", found)
    return found


class Node:
    def __init__(self, restarts: int = 0, policy: Policy = NO_POLICY) -> None:
        self.job = a_job(2, restarts=restarts, policy=policy)
        self.decider = Alone(self.job)

    def after(self, *exits: Exit, number: int = 0, **fields: Any) -> Decision:
        """What follows an attempt."""
        last = attempt(*exits, number=number, job=self.job, **fields)
        return self.decider.decide(last, last)


def attempt(*exits: Exit, number: int = 0, job: Job = PREEMPTED, **fields: Any) -> AttemptOutcome:
    cause = next((one for one in exits if one.status and not one.caused_by_stop), None)
    return replace(
        an_attempt(a_plan(2, attempt=number, job=job), list(exits), end(cause, **fields)), cause=cause
    )


@pytest.mark.parametrize(
    "granted, kinds", [(0, ["end"]), (1, ["start", "end"]), (2, ["start", "start", "end"])]
)
def test_a_failure_is_a_restart_as_long_as_some_are_left(granted: int, kinds: list[str]) -> None:
    node = Node(granted)
    found = [node.after(FINE, FAILED, number=number) for number in range(len(kinds))]
    assert [one.kind for one in found] == kinds
    told = [one.told for one in found[:-1]]
    assert [one.number for one in told if isinstance(one, Restarting)] == list(range(1, granted + 1))
    assert [one.attempt for one in found[:-1]] == list(range(1, granted + 1))
    assert found[-1].code == 7


def test_the_policy_ends_the_job_with_the_code_of_the_failure_and_says_why() -> None:
    node = Node(3, Policy(give_up_on=(3,)))
    assert node.after(FINE, FAILED).kind == "start"
    found = node.after(an_exit(0, code=3), number=1)
    assert found == Decision("end", code=3, not_tried="exit code 3 is in --give-up-on")
    found = Node(3, Policy(restart_on=(7,))).after(an_exit(0, signal=9))
    assert found == Decision("end", code=137, not_tried="SIGKILL is not in --restart-on")


def test_with_a_policy_a_failure_before_any_output_is_tried_three_times() -> None:
    node = Node(9, Policy(restart_on=(7,)))
    assert [node.after(FINE, FAILED, number=number).kind for number in range(2)] == ["start"] * 2
    found = node.after(FINE, FAILED, number=2)
    why = "exit code 7 3 times in a row, before any output of the script"
    assert found == Decision("end", code=7, not_tried=why)


def test_output_makes_a_policy_as_patient_as_ever() -> None:
    node = Node(9, Policy(restart_on=(7,)))
    for number in range(5):
        last = attempt(FINE, FAILED, number=number, job=node.job)
        last = replace(last, report=replace(last.report, is_silent=False))
        assert node.decider.decide(last, last).kind == "start"


def test_a_group_that_fails_at_once_again_and_again_is_started_again_later() -> None:
    node = Node(99)
    for number in range(5):
        assert node.after(FAILED, number=number).kind == "start"
    last = attempt(FAILED, number=5)
    assert node.decider.decide(last, last) == Decision("go_on", told=Restarting(last, 6, wait_s=0.1))
    assert node.decider.deadline_s == pytest.approx(100.1)
    (event,) = node.decider.read()
    decision = node.decider.decide(event, last)
    assert (decision.kind, decision.attempt) == ("start", 6)


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
    found = node.decider.decide(event, attempt(FAILED, number=5))
    assert (found.kind, found.code) == (kind, code)


@pytest.mark.parametrize(
    "exits, fields, code",
    [
        ([FINE, FAILED], {"stop_signal": 15}, 7),
        ([FINE, FAILED], {"survivors": [(5, "D", "io", "nfs_wait", None)]}, 7),
        ([FINE], {"stop_signal": 2}, 130),
        ([FINE], {"survivors": [(5, "D", "io", None, None)]}, 1),
        ([FINE], {"stop_signal": 10}, REQUEUE_CODE),
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


@pytest.mark.parametrize("action, kind", [("stop", "stop"), ("restart", "go_on"), ("report", "go_on")])
def test_a_job_that_hangs_is_stopped_if_the_user_wants_that(action: Any, kind: str) -> None:
    found = Node(3).decider.decide(Hang(0, 9.0, action, ("no progress",), (1,)), None)
    assert (found.kind, found.signum) == (kind, 15)


@pytest.mark.parametrize("exit_", [an_exit(1, signal=15, by_us=True), FINE])
def test_a_job_that_was_stopped_because_it_hung_is_not_started_again(exit_: Exit) -> None:
    last = replace(attempt(exit_), news=(Hang(0, 9.0, "stop", ("no progress",), (1,)),))
    assert Node(3).decider.decide(last, last) == Decision("end", code=124)


def test_a_signal_while_the_workers_end_for_a_failure_is_for_the_engine_which_ends_the_next_attempt() -> None:
    last = replace(attempt(FINE, FAILED), news=(a_signal(15, "ignore"),))
    node = Node(3)
    assert node.decider.decide(last, last).kind == "start"
    stopped = attempt(number=1, stop_signal=15)
    assert node.decider.decide(stopped, stopped) == Decision("end", code=143)


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
