"""The agent carries out what is decided: with a supervisor that sends what the test has written down."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from tests.kit.waiting import until
from tests.support.conducting import a_job
from tests.support.events import FakeSupervisor, a_plan, a_signal, an_exit, end, exited

from dsl import EngineError, LogNotice, Stopping
from dsl._record import replace
from dsl.agent.agent import Agent
from dsl.errors import PortError
from dsl.model import observation
from dsl.model.job import NodePlan
from dsl.model.outcome import Asked, AttemptStarted, Outcome, RestartFailed, Restarting
from dsl.model.request import Policy
from dsl.report.narrator import judge_attempt
from dsl.report.verdict import verdict

FINE, FAILED = an_exit(0, code=0), an_exit(1, code=7)
WELL = [exited(FINE), exited(an_exit(1, code=0)), end()]
BADLY = [exited(FINE), exited(FAILED), end(FAILED)]


class Plans:
    """A source of plans: numbers them, and refuses from attempt ``last`` on."""

    def __init__(self, max_restarts: int = 0, last: int = 99) -> None:
        self.job = a_job(2, restarts=max_restarts)
        self.last = last
        self.prepared: list[int] = []

    def plan(self, attempt: int) -> NodePlan:
        if attempt > self.last:
            raise PortError("no free port")
        return a_plan(2, attempt=attempt, job=self.job)

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Note it."""
        self.prepared.append(plan.meeting.attempt)
        return plan


class Ear:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def hear(self, event: object) -> None:
        self.heard.append(event)


def run(
    source: Any, *attempts: Sequence[Any], channels: Sequence[Any] = ()
) -> tuple[Outcome, FakeSupervisor, Ear]:
    supervisor, ear = FakeSupervisor(*attempts), Ear()
    agent = Agent(source, source.plan(0), [ear], channels)
    return agent.run(supervisor), supervisor, ear  # type: ignore[arg-type]


def test_every_listener_hears_every_event_in_order_the_exits_and_the_end_among_them() -> None:
    outcome, _, ear = run(Plans(), WELL)
    started, *engine, attempt, last = ear.heard
    assert isinstance(started, AttemptStarted)
    assert engine == WELL
    assert attempt is outcome.last
    assert last is outcome
    assert outcome.code == 0


def test_a_group_that_fails_is_planned_prepared_and_started_again() -> None:
    source = Plans(max_restarts=2)
    outcome, supervisor, ear = run(source, BADLY, BADLY, WELL)
    assert len(supervisor.started) == 3
    assert source.prepared == [1, 2]
    assert outcome.code == 0
    assert (outcome.last.plan.meeting.attempt, outcome.count) == (2, 3)
    again = [one for one in ear.heard if isinstance(one, Restarting)]
    assert [(one.last.plan.meeting.attempt, one.number) for one in again] == [(0, 1), (1, 2)]


STOPPED = an_exit(0, signal=15, by_us=True)
HEARD = LogNotice("first_output", 1, None, None, 0)


def test_a_policy_listens_for_the_first_output_and_the_outcome_says_why_no_attempt_follows() -> None:
    source = Plans(max_restarts=9)
    source.job = replace(source.job, policy=Policy(restart_on=(7,)))
    spoken = [LogNotice("first_output", 0, None, None, 0), *BADLY]
    late = [*BADLY[:2], Stopping("failure", 15, 1.0), HEARD, BADLY[2]]
    stopped = [exited(FAILED), Stopping("failure", 15, 1.0), spoken[0], exited(STOPPED), end(FAILED)]
    outcome, supervisor, _ = run(source, spoken, BADLY, BADLY, late, stopped, BADLY, BADLY)
    assert (outcome.code, outcome.count) == (7, 7)
    assert outcome.last.not_tried == "exit code 7 3 times in a row, before any output of the script"
    assert outcome.error is None
    assert [one.tells_first_output for one in supervisor.started] == [True] * 7
    judgement = judge_attempt(outcome.last)
    assert judgement is not None
    assert verdict(judgement)[-1] == f"not tried again: {outcome.last.not_tried}"


def test_without_a_policy_nobody_listens_for_output() -> None:
    outcome, supervisor, _ = run(Plans(max_restarts=4), *[BADLY] * 5)
    assert (outcome.count, outcome.last.not_tried) == (5, "")
    assert not any(one.tells_first_output for one in supervisor.started)


def test_a_crash_loop_waits() -> None:
    outcome, supervisor, ear = run(Plans(max_restarts=99), *[BADLY] * 7, WELL)
    assert (outcome.code, outcome.count, len(supervisor.started)) == (0, 8, 8)
    pauses = [one.wait_s for one in ear.heard if isinstance(one, Restarting)]
    assert pauses == [0.0] * 5 + [0.1, 0.2]


@pytest.mark.guarantee("G2")
def test_a_signal_ends_a_job_that_waits_to_be_started_again() -> None:
    outcome, supervisor, ear = run(Plans(max_restarts=99), *[BADLY] * 5, [*BADLY, a_signal(2)])
    assert (outcome.code, outcome.count, len(supervisor.started)) == (130, 6, 6)
    assert isinstance(ear.heard[-1], Outcome)


def test_a_restart_that_cannot_be_planned_ends_the_job_as_its_last_attempt_did() -> None:
    outcome, supervisor, ear = run(Plans(max_restarts=3, last=0), BADLY)
    assert len(supervisor.started) == 1
    assert outcome.code == 7
    assert isinstance(outcome.error, PortError)
    (failed,) = [one for one in ear.heard if isinstance(one, RestartFailed)]
    assert failed.error is outcome.error
    assert isinstance(ear.heard[-1], Outcome)


@pytest.mark.guarantee("G2", "G3")
def test_a_restart_that_the_engine_refuses_ends_the_job_as_its_last_attempt_did() -> None:
    """The failed worker's code and verdict, not the engine's."""

    class Refusing(FakeSupervisor):
        def start(self, spec: object) -> None:
            super().start(spec)
            if len(self.started) == 2:
                raise EngineError("a limit is too low now")

    ear, source = Ear(), Plans(3)
    outcome = Agent(source, source.plan(0), [ear]).run(Refusing(BADLY))  # type: ignore[arg-type]
    assert (outcome.code, outcome.cause) == (7, FAILED)
    assert isinstance(outcome.error, EngineError)
    assert [type(one) for one in ear.heard[-3:]] == [Restarting, RestartFailed, Outcome]


class Polled(FakeSupervisor):
    """One that can be waited for together with others: its descriptor is readable while it has events."""

    ready = -1

    def fileno(self) -> int:
        return self.ready


def test_an_error_of_the_first_start_is_the_callers() -> None:
    class Refusing(FakeSupervisor):
        def start(self, spec: object) -> None:
            raise EngineError("too many")

    with pytest.raises(EngineError):
        Agent(Plans(3), a_plan(2), []).run(Refusing())  # type: ignore[arg-type]


def test_the_cause_is_that_of_the_error_files_where_there_are_some(tmp_path: Any) -> None:
    record = tmp_path / "error.json"
    record.write_text('{"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1"}}}')
    os.utime(record, ns=(0, 0))
    plan = a_plan(2)
    workers = tuple(replace(worker, error_file=str(tmp_path / "none")) for worker in plan.workers)
    plan = replace(plan, workers=(replace(workers[0], error_file=str(record)), workers[1]))
    raised = replace(an_exit(0, code=1, at_ms=90), order=1)
    first = replace(an_exit(1, code=7, at_ms=50), order=0)
    supervisor = FakeSupervisor([exited(first), exited(raised), end(first)])
    outcome = Agent(Plans(), plan, []).run(supervisor)  # type: ignore[arg-type]
    assert outcome.cause is raised
    assert outcome.code == 1
    assert [failure.rank for failure in outcome.last.failures] == [1, 0]


@pytest.mark.guarantee("G2")
def test_a_listener_that_fails_changes_nothing_and_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:

    class Failing:
        def hear(self, event: object) -> None:
            if isinstance(event, Outcome):
                raise KeyError("x")

    source, ear = Plans(), Ear()
    outcome = Agent(source, source.plan(0), [Failing(), ear]).run(FakeSupervisor(BADLY))  # type: ignore[arg-type]
    assert outcome.code == 7
    assert ear.heard[-1] is outcome
    said = capfd.readouterr().err
    assert said == "dsl: internal error: KeyError: 'x', please report it\n"


@pytest.mark.guarantee("G2", "G3")
def test_a_restart_that_meets_an_error_of_ours_ends_the_job_as_its_last_attempt_did() -> None:
    """Not with 70."""

    class Broken(Plans):
        def prepare(self, plan: NodePlan) -> NodePlan:
            raise KeyError("x")

    source = Broken(max_restarts=3)
    outcome = Agent(source, source.plan(0), []).run(FakeSupervisor(BADLY))  # type: ignore[arg-type]
    assert (outcome.code, outcome.cause) == (7, FAILED)
    assert str(outcome.error) == "internal error: KeyError: 'x'"


class Looked(FakeSupervisor):
    """Notes when views into the job could call."""

    def __init__(self, *attempts: Sequence[Any]) -> None:
        super().__init__(*attempts)
        self.sockets: list[str] = []

    def listen(self, folder: str, name: str) -> None:
        self.sockets.append(f"{name.partition('-')[0]} in attempt {len(self.started) - 1}")

    def unlisten(self) -> None:
        self.sockets.append("closed")


@pytest.mark.parametrize(
    "attempts, sockets",
    [
        ([[end()]], []),
        ([WELL], ["77 in attempt 0", "closed"]),
        ([[end(FAILED)], WELL], ["77 in attempt 1", "closed"]),
        ([[end(FAILED)]] * 6 + [[end()]], ["77 in attempt 5", "closed"]),
    ],
    ids=["all workers end at once", "an attempt lasts", "the second attempt lasts", "a pause lasts"],
)
def test_views_can_call_as_soon_as_the_job_lasts(attempts: list[Any], sockets: list[str]) -> None:
    supervisor, source = Looked(*attempts), Plans(max_restarts=99)
    outcome = Agent(source, source.plan(0), [], command_pid=77).run(supervisor)  # type: ignore[arg-type]
    assert outcome.code == 0
    assert supervisor.sockets == sockets


def test_before_a_group_starts_the_engine_knows_which_events_wake_the_agent() -> None:
    class Waking(FakeSupervisor):
        wanted: bool | None = None

        def wait(self, timeout_s: float | None = None, *, routine: bool = True) -> list[Any]:
            self.wanted = routine
            return super().wait(timeout_s, routine=routine)

        def start(self, spec: object) -> None:
            assert self.wanted is False
            super().start(spec)

    source = Plans()
    assert Agent(source, source.plan(0), []).run(Waking(WELL)).code == 0  # type: ignore[arg-type]


class Asking:
    """A channel by which another node asks once, before anything is started."""

    deadline_s: float | None = 0.0

    def __init__(self) -> None:
        self.answers: list[object] = []

    def fileno(self) -> int:
        return -1

    def read(self) -> list[object]:
        self.deadline_s = None
        return [Asked(observation.Look(1), self.answers.append)]


def test_another_node_that_asks_before_the_start_gets_an_answer() -> None:
    class Idle(FakeSupervisor):
        def pids(self) -> list[int]:
            return []

        def last_lines(self) -> dict[int, bytes]:
            return {}

    source, asking = Plans(), Asking()
    assert Agent(source, source.plan(0), [], [asking]).run(Idle(WELL)).code == 0  # type: ignore[arg-type]
    until(lambda: observation.Looked(1) in asking.answers)
