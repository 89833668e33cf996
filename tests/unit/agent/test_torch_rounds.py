"""A node that meets the others by torch's own rendezvous: what it orders, and what it waits for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.events import a_plan, a_signal, an_attempt, an_exit, end, exited
from tests.unit.agent.test_agent import Ear, Plans, Polled

from dsl._record import replace
from dsl.agent.agent import Agent
from dsl.agent.torch_rounds import TorchRounds
from dsl.errors import DslError
from dsl.model.job import Job, Meeting, MeetingPoint
from dsl.model.outcome import Outcome, RestartFailed, Restarting
from dsl.model.request import NO_POLICY, Policy, Program
from dsl.plan.worker import ELASTIC
from dsl.rendezvous.delegate_messages import (
    Finish,
    Leave,
    Meet,
    MeetingRefused,
    NodesFinished,
    NodesMet,
    Waiting,
)

STOPPED = [an_exit(0, signal=15, by_us=True), an_exit(1, signal=15, by_us=True)]
WELL = [exited(an_exit(0, code=0)), exited(an_exit(1, code=0)), end()]
FAILED = an_exit(1, code=7)
BADLY = [exited(an_exit(0, code=0)), exited(FAILED), end(FAILED)]
LOST = MeetingRefused("gone", "lost")
MET = NodesMet(Meeting(0, 0, (2, 2), "a", 7, round=1), ("a", "b"))
POINT = MeetingPoint("dynamic", "", None, "c10d", "n0", least_nodes=2)
MEET, CLOSE = Meet(2, "default"), Leave(closes=True)


class Rendezvous:
    """Notes each order, and answers with what the test has written down: a channel, too."""

    def __init__(self, *answers: Sequence[object], first: Sequence[object] = ()) -> None:
        self.orders: list[object] = []
        self._answers, self._events = list(answers), list(first)

    def fileno(self) -> int:
        """Nothing to wait for: events are due at once."""
        return -1

    @property
    def deadline_s(self) -> float | None:
        return 0.0 if self._events else None

    def read(self) -> list[object]:
        events, self._events = self._events, []
        return events

    def send(self, order: object, pause_s: float = 0.0) -> None:
        self.orders.append(order)
        if self._answers:
            self._events += self._answers.pop(0)


def a_decider(
    rendezvous: Any, max_restarts: int = 3, restarts: int = 0, policy: Policy = NO_POLICY
) -> TorchRounds:
    job = Job(ELASTIC, Program("script", "t.py"), POINT, run_id="j", node_count=2, max_restarts=max_restarts)
    job = replace(job, policy=policy)
    return TorchRounds(job, rendezvous, 2, lambda _: None, restarts=restarts)


def run(
    rendezvous: Any, *attempts: Sequence[Any], max_restarts: int = 3, last: int = 99
) -> tuple[Outcome, Polled, Ear]:
    source: Any = Plans(max_restarts, last)
    supervisor, ear = Polled(*attempts), Ear()
    supervisor.ready = os.open("/dev/zero", os.O_RDONLY)
    try:
        plan, decider = source.plan(0), a_decider(rendezvous, max_restarts)
        agent = Agent(source, plan, [ear], [rendezvous], decider=decider)
        return agent.run(supervisor), supervisor, ear  # type: ignore[arg-type]
    finally:
        os.close(supervisor.ready)


def test_a_job_that_succeeds_ends_when_the_other_nodes_have_finished() -> None:
    rendezvous = Rendezvous([NodesFinished()])
    outcome, _, _ = run(rendezvous, WELL)
    assert rendezvous.orders == [Finish()]
    assert outcome.code == 0


def test_a_failure_costs_a_restart_and_nodes_that_wait_cost_none() -> None:
    rendezvous = Rendezvous([MET, Waiting()], [MET], [NodesFinished()])
    outcome, supervisor, ear = run(rendezvous, BADLY, [*map(exited, STOPPED), end()], WELL)
    assert rendezvous.orders == [MEET, MEET, Finish()]
    assert supervisor.stops == [(15, None)]
    assert outcome.code == 0
    again = [one for one in ear.heard if isinstance(one, Restarting)]
    assert [(one.number, one.is_counted) for one in again] == [(1, True), (1, False)]


def test_when_restarts_are_spent_the_job_is_closed() -> None:
    rendezvous = Rendezvous()
    outcome, _, _ = run(rendezvous, BADLY, max_restarts=0)
    assert rendezvous.orders == [CLOSE]
    assert outcome.code == 7


def test_a_failure_that_the_policy_excludes_closes_the_job() -> None:
    rendezvous = Rendezvous()
    decider = a_decider(rendezvous, policy=Policy(give_up_on=(7,)))
    last = an_attempt(a_plan(2), [FAILED], end(FAILED))
    found = decider.decide(last, last)
    assert (found.kind, found.code, found.not_tried) == ("end", 7, "exit code 7 is in --give-up-on")
    assert rendezvous.orders == [CLOSE]


@pytest.mark.parametrize("kind", ["timeout", "lost"])
def test_nodes_that_do_not_meet_end_the_job_as_its_last_attempt_did_and_why_is_told(kind: Any) -> None:
    outcome, _, ear = run(Rendezvous([MeetingRefused("too few nodes", kind)]), BADLY)
    assert outcome.code == 7
    assert str(outcome.error) == "too few nodes"
    assert any(isinstance(one, RestartFailed) for one in ear.heard)


def test_workers_that_were_stopped_for_a_meeting_that_never_came_are_no_success() -> None:
    rendezvous = Rendezvous([MeetingRefused("closed", "closed")], first=[Waiting()])
    outcome, _, _ = run(rendezvous, [*map(exited, STOPPED), end()])
    assert outcome.code == 1


def test_a_node_that_was_not_needed_any_more_has_not_failed() -> None:
    rendezvous = Rendezvous([MeetingRefused("a spare", "unneeded")], first=[Waiting()])
    outcome, _, _ = run(rendezvous, [*map(exited, STOPPED), end()])
    assert outcome.code == 0


def test_a_node_that_cannot_start_what_was_planned_closes_the_job() -> None:
    rendezvous = Rendezvous([MET])
    outcome, _, _ = run(rendezvous, BADLY, last=0)
    assert outcome.code == 7
    assert rendezvous.orders == [MEET, CLOSE]


def test_a_lost_delegate_ends_the_job_after_its_workers() -> None:
    outcome, _, _ = run(Rendezvous(first=[LOST]), WELL)
    assert outcome.code == 0


@pytest.mark.guarantee("G2")
def test_a_signal_between_two_attempts_ends_this_nodes_part_alone() -> None:
    rendezvous = Rendezvous()
    decider, last = a_decider(rendezvous), an_attempt(a_plan(2), [FAILED], end(FAILED))
    assert decider.decide(last, last).kind == "go_on"
    decision = decider.decide(a_signal(15, "stop"), last)
    assert (decision.kind, decision.code) == ("end", 143)
    assert rendezvous.orders == [MEET]


def test_attempts_and_restarts_are_counted_on_after_a_conductor() -> None:
    rendezvous = Rendezvous()
    decider = a_decider(rendezvous, restarts=2)
    last = an_attempt(a_plan(2, attempt=4), [], end())
    decider.join("membership")
    assert rendezvous.orders == [MEET]
    decision = decider.decide(MET, last)
    assert (decision.kind, decision.attempt) == ("start", 5)
    assert decider.meet(5, 2) == replace(MET.meeting, attempt=5, restarts=2, reason="membership")


def test_a_failed_restart_ends_the_job() -> None:
    rendezvous = Rendezvous()
    decider, last = a_decider(rendezvous), an_attempt(a_plan(2), [FAILED], end(FAILED))
    assert decider.decide(RestartFailed(DslError("x")), last).code == 7
    assert rendezvous.orders == [CLOSE]
