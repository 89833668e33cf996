"""One host's part of a job that a head conducts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.events import a_lost_guard, a_plan, a_signal, an_attempt, an_exit, end, exited

from dsl._record import replace
from dsl.agent.member import Member
from dsl.agent.node import at_head, conducted
from dsl.control.messages import Failing, Forward, Lost, Over, Said, Stop
from dsl.model.job import Meeting, Notice
from dsl.model.judgement import Judgement, Report
from dsl.model.outcome import AttemptStarted, Awaiting, Decision
from dsl.report.narrator import Narrator

FIRST = Meeting(0, 1, (2, 2), "10.0.0.1", 29500)


class Talk:
    """A conversation whose other side has been written down: one batch after the other."""

    deadline_s = None

    def __init__(self, *batches: Sequence[object]) -> None:
        self.messages: list[object] = []
        self._batches = [list(batch) for batch in batches]

    def fileno(self) -> int:
        return -1

    def receive(self) -> list[object]:
        return self._batches.pop(0) if self._batches else []

    def send(self, message: object) -> None:
        self.messages.append(message)

    def hear(self, event: object) -> None:
        """It is no message."""


def test_the_conductor_says_which_attempt_follows_and_where_it_meets() -> None:
    again = replace(FIRST, attempt=1, round=1, port=29501)
    later = replace(FIRST, attempt=5, round=5)  # of a host that was left out for a while
    orders = Member(Talk([Stop(15, 3.0)], [again, Stop(15, 9.0)], [later]), FIRST)
    assert orders.meet(0, 2) == FIRST
    assert orders.read() == [Stop(15, 3.0)]
    assert orders.read() == [again, Stop(15, 9.0)]
    assert orders.meet(1, 2) == again
    assert orders.read() == [later]
    assert orders.meet(5, 2) == later


def test_the_judgement_of_the_whole_job_is_kept() -> None:
    judgement = Judgement(7)
    orders = Member(Talk([Over(judgement)]), FIRST)
    assert orders.judgement is None
    orders.read()
    assert orders.judgement == judgement


@pytest.mark.parametrize(
    "message, expected",
    [
        (Stop(10, 3.0), ("stop", 10, 3.0)),
        (Forward(12), ("signal", 12, None)),
        (Over(), ("stop", 15, None)),
        (Lost("is gone"), ("stop", 15, None)),
    ],
)
def test_the_workers_get_what_the_head_wants_and_are_stopped_without_one(
    message: object, expected: tuple[object, ...]
) -> None:
    found = Member(Talk(), FIRST).decide(message, None)
    assert (found.kind, found.signum, found.grace_s) == expected


CAUSE = an_exit(1, code=7)
FAILED = an_attempt(a_plan(2), [CAUSE, an_exit(0, signal=15, by_us=True)], end(CAUSE))


def test_after_an_attempt_the_conductor_says_what_follows() -> None:
    assert Member(Talk(), FIRST).decide(FAILED, FAILED) == Decision("go_on", told=Awaiting(FAILED))


@pytest.mark.parametrize(
    "event, expected",
    [
        (replace(FIRST, attempt=1, restarts=1), ("start", 0)),
        (Stop(15, 3.0), ("go_on", 0)),  # it was for workers that had ended already
        (Forward(12), ("go_on", 0)),
        (Over(Judgement(9)), ("end", 9)),
        (Over(Judgement(0)), ("end", 1)),  # judged means that something went wrong
        (Over(), ("end", 7)),
        (Over(has_succeeded=True), ("end", 0)),  # without this node, whose place a spare has taken
        (Lost("is gone"), ("end", 7)),
        (a_signal(), ("end", 143)),
        (a_lost_guard(), ("end", 7)),
    ],
)
def test_between_two_attempts(event: object, expected: tuple[str, int]) -> None:
    found = Member(Talk(), FIRST).decide(event, FAILED)
    assert (found.kind, found.code) == expected


@pytest.mark.parametrize("said, code", [(Over(Judgement(9)), 9), (Over(), 7), (Lost("is gone"), 7)])
def test_who_has_heard_the_end_already_waits_for_nothing(said: object, code: int) -> None:
    last = replace(FAILED, news=(said,))
    found = Member(Talk(), FIRST).decide(last, last)
    assert (found.kind, found.code) == ("end", code)


def test_a_task_starts_one_worker_and_keeps_what_it_needs_of_its_process_manager() -> None:
    plan = replace(
        a_plan(3),
        run_dirs=("/r", "/r/attempt_0", *[f"/r/attempt_0/{rank}" for rank in range(3)]),
        pid_file="/p",
    )
    part = conducted(plan, 1, {"PMI_FD": "5", "PMI_RANK": "1"})
    assert [worker.local_rank for worker in part.workers] == [1]
    assert part.workers[0].keep_fds == (5,)
    assert part.run_dirs == ("/r", "/r/attempt_0", "/r/attempt_0/1")
    assert part.pid_file is None
    assert part.is_conducted


@pytest.mark.parametrize("text", ["", "x", "2", "-1", "\u0665"])
def test_an_agent_of_a_whole_node_starts_all_workers(text: str) -> None:
    part = conducted(a_plan(3), None, {"PMI_FD": text})
    assert len(part.workers) == 3
    assert all(worker.keep_fds == () and not worker.stdin for worker in part.workers)


class Sent:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def __call__(self, message: object) -> None:
        self.messages.append(message)


@pytest.mark.guarantee("G3", "G4")
def test_the_head_hears_of_a_failure_at_once_and_has_the_verdict_later() -> None:
    talk = Talk()
    plan = replace(a_plan(3), is_conducted=True)
    cause = an_exit(1, code=7)
    reporter = Member(talk, FIRST)
    reporter.hear(AttemptStarted(plan))
    reporter.hear(exited(cause))
    reporter.hear(exited(an_exit(0, signal=15, by_us=True)))
    others = [an_exit(0, signal=15, by_us=True), an_exit(2, code=1, by_us=True)]
    reporter.hear(an_attempt(plan, [cause, *others], end(cause)))
    assert talk.messages[0] == Failing(0, 1, 7, cause.ended_ns)
    report = talk.messages[1]
    assert isinstance(report, Report)
    assert (report.code, report.rank, report.failed_ns, report.host) == (7, 1, cause.ended_ns, plan.host)
    assert [(one.names, one.by_stop) for one in report.after] == [(("0",), True), (("2",), False)]


def test_what_is_said_here_is_said_by_the_head() -> None:
    send = Sent()
    plan = a_plan(2)
    Narrator(plan, at_head(send)).say("look", "warning")
    assert send.messages == [Said(Notice("warning", f"host {plan.host}: look"))]
