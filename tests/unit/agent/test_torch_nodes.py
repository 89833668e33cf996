"""The agent of a job whose nodes come and go: what it tells the others, and what it waits for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.support.events import an_exit, end, exited
from tests.unit.agent.test_agent import Ear, Plans, Polled

from dsl.agent.agent import Agent
from dsl.agent.elastic import Elastic
from dsl.agent.torch_nodes import Envoy
from dsl.model.job import Meeting
from dsl.model.nodes import MeetingRefused, NodesFinished, NodesMet, PeerFailure
from dsl.model.outcome import Membership, MembershipChanged, Outcome, RestartFailed, Restarting
from dsl.report.verdict import reason

FINE, FAILED = an_exit(0, code=0), an_exit(1, code=7)
STOPPED = [an_exit(0, signal=15, by_us=True), an_exit(1, signal=15, by_us=True)]
WELL = [exited(FINE), exited(an_exit(1, code=0)), end()]
BADLY = [exited(FINE), exited(FAILED), end(FAILED)]
LOST = MeetingRefused("gone", "lost")


def met(restarts: int = 0, reason: Any = "failure") -> NodesMet:
    return NodesMet(Meeting(0, 0, (2, 2), "a", 7, restarts=restarts, reason=reason), ("a", "b"))


class Rendezvous:
    """Notes each order, and answers it with what the test has written down for it: a channel, too."""

    host = "a"

    def __init__(self, *answers: tuple[str, Sequence[object]]) -> None:
        self.orders: list[tuple[Any, ...]] = []
        self._answers = list(answers)
        self._events: list[object] = []
        self._first = [event for name, events in answers if name == "" for event in events]
        self._events += self._first

    def _order(self, *order: Any) -> None:
        self.orders.append(order)
        waiting = [one for one in self._answers if one[0]]
        if waiting and waiting[0][0] == order[0]:
            self._answers.remove(waiting[0])
            self._events += waiting[0][1]

    def fileno(self) -> int:
        """Nothing to wait for: events are due at once."""
        return -1

    @property
    def deadline_s(self) -> float | None:
        """At once, if there are any."""
        return 0.0 if self._events else None

    def read(self) -> list[object]:
        """All of them."""
        events, self._events = self._events, []
        return events

    def membership(self) -> Membership:
        return Membership(2)

    def join(self, restarts: int, reason: str, pause_s: float = 0.0) -> None:
        self._order("join", restarts, reason, pause_s)

    def wait(self, within_s: float, *, for_goodbye: bool = False) -> None:
        self._order("goodbye" if for_goodbye else "doubt")

    def send(self, order: object) -> None:
        if not isinstance(order, PeerFailure):
            self._order(type(order).__name__.lower())
            return
        name = "fail" if order.is_final else "failing"
        self._order(name, order.rank, order.code, order.failed and reason(order.failed))


def run(
    rendezvous: Any, *attempts: Sequence[Any], max_restarts: int = 3, least: int = 2, last: int = 99
) -> tuple[Outcome, Polled, Ear]:
    supervisor, ear, source = Polled(*attempts), Ear(), Plans(max_restarts, last)
    supervisor.ready = os.open("/dev/zero", os.O_RDONLY)
    try:
        plan = source.plan(0)
        envoy = Envoy(plan, rendezvous, Elastic(least, 2), max_restarts)
        agent = Agent(source, plan, [ear, envoy], [rendezvous], decider=envoy)
        return agent.run(supervisor), supervisor, ear  # type: ignore[arg-type]
    finally:
        os.close(supervisor.ready)


FAILING = ("failing", 1, 7, "exit code 7")


def test_a_job_that_succeeds_ends_when_the_other_nodes_have_and_the_delegate_has_gone() -> None:
    rendezvous = Rendezvous(("finish", [NodesFinished()]), ("goodbye", [LOST]))
    outcome, _, _ = run(rendezvous, WELL)
    assert rendezvous.orders == [("finish",), ("goodbye",)]
    assert outcome.code == 0


def test_a_failure_is_told_at_once_and_counted_by_all_nodes() -> None:
    """The nodes have counted more than this one knows of."""
    rendezvous = Rendezvous(
        ("join", [met(2)]), ("join", [met(3)]), ("finish", [NodesFinished()]), ("goodbye", [LOST])
    )
    outcome, supervisor, ear = run(rendezvous, BADLY, BADLY, WELL)
    assert rendezvous.orders == [
        FAILING,
        ("join", 1, "failure", 0.0),
        FAILING,
        ("join", 3, "failure", 0.0),
        ("finish",),
        ("goodbye",),
    ]
    assert outcome.code == 0
    assert len(supervisor.started) == 3
    again = [one for one in ear.heard if isinstance(one, Restarting)]
    assert [(one.number, one.most, one.is_counted) for one in again] == [(2, 3, True), (3, 3, True)]


def test_when_restarts_are_spent_the_job_is_over_on_all_nodes() -> None:
    rendezvous = Rendezvous(("goodbye", [LOST]))
    outcome, _, _ = run(rendezvous, BADLY, max_restarts=0)
    assert rendezvous.orders == [FAILING, ("fail", *FAILING[1:]), ("goodbye",)]
    assert outcome.code == 7


def test_what_dies_because_another_node_failed_is_told_to_nobody() -> None:
    peer = PeerFailure("b", 3, 9, None, is_final=False)
    victims = [*map(exited, STOPPED), end()]
    rendezvous = Rendezvous(
        ("", [peer]), ("join", [met(1)]), ("finish", [NodesFinished()]), ("goodbye", [LOST])
    )
    outcome, supervisor, _ = run(rendezvous, victims, WELL)
    assert rendezvous.orders[0] == ("join", 1, "failure", 0.0)
    assert supervisor.stops == [(15, None)]
    assert outcome.code == 0


def test_a_failure_that_follows_from_a_lost_node_is_no_end() -> None:
    left = MembershipChanged(Membership(1), ("b",))
    rendezvous = Rendezvous(
        ("doubt", [left]),
        ("join", [met(0, "membership")]),
        ("finish", [NodesFinished()]),
        ("goodbye", [LOST]),
    )
    outcome, _, _ = run(rendezvous, BADLY, WELL, max_restarts=0, least=1)
    assert rendezvous.orders[1:3] == [("doubt",), ("join", 0, "membership", 0.0)]
    assert outcome.code == 0


def test_nodes_that_do_not_meet_end_the_job_as_its_last_attempt_did_and_why_is_told() -> None:
    rendezvous = Rendezvous(("join", [MeetingRefused("too few nodes")]), ("goodbye", [LOST]))
    outcome, _, ear = run(rendezvous, BADLY)
    assert outcome.code == 7
    assert str(outcome.error) == "too few nodes"
    assert rendezvous.orders[-2:] == [("leave",), ("goodbye",)]
    assert any(isinstance(one, RestartFailed) for one in ear.heard)


def test_a_node_that_cannot_start_what_was_planned_ends_the_job_of_all() -> None:
    rendezvous = Rendezvous(("join", [met(1)]), ("goodbye", [LOST]))
    outcome, _, _ = run(rendezvous, BADLY, last=0)
    assert outcome.code == 7
    assert [order[0] for order in rendezvous.orders] == ["failing", "join", "fail", "goodbye"]


def test_what_comes_behind_the_meeting_belongs_to_the_next_attempt() -> None:
    joins = MembershipChanged(Membership(2, waiting=1))
    victims = [*map(exited, STOPPED), end()]
    rendezvous = Rendezvous(
        ("join", [met(1), joins]),
        ("join", [met(1, "membership")]),
        ("finish", [NodesFinished()]),
        ("goodbye", [LOST]),
    )
    outcome, supervisor, _ = run(rendezvous, BADLY, victims, WELL)
    assert outcome.code == 0
    assert supervisor.stops == [(15, None)]
    assert rendezvous.orders[2] == ("join", 1, "membership", 0.0)
