"""Ends and signals of runners, without any process: the engine is made up."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from dsl import EngineError
from dsl._record import Record
from dsl.tune import run
from dsl.tune.run import Runners


class Exit(Record):
    """Only the engine makes the real ones."""

    worker: int
    """As there."""
    status: int
    """As there."""


class Exited(Record):
    exit: Exit
    """As there."""


class Supervisor:
    """In place of the engine: its commands do what the test says."""

    def __init__(self) -> None:
        self.specs: list[Any] = []
        self.added: list[Any] = []
        self.events: list[object] = []
        self.waits: list[float | None] = []
        self.calls: list[tuple[str, object]] = []
        self.now_s = 1000.0
        self.refusal = ""
        self.interrupts: list[Callable[[], None]] = []
        """What happens during the next waits."""

    def start(self, spec: Any) -> None:
        self.specs.append(spec)

    def add(self, worker: Any) -> int:
        if self.refusal:
            raise EngineError(self.refusal)
        self.added.append(worker)
        return len(self.added) - 1

    def die(self, worker: int, status: int) -> None:
        self.events.append(Exited(Exit(worker, status)))

    def wait(self, timeout_s: float | None) -> list[object]:
        self.waits.append(timeout_s)
        if self.interrupts:
            self.interrupts.pop(0)()
        elif not self.events:
            assert timeout_s is not None, "nothing would end this wait"
            self.now_s += timeout_s
        events, self.events = self.events, []
        return events

    def signal(self, number: int, worker: int | None = None) -> None:
        self.calls.append((signal.Signals(number).name, worker))

    def stop(self, *, grace_s: float) -> None:
        self.calls.append(("stop", grace_s))

    def pids(self) -> None:
        self.calls.append(("answer", None))

    def wake(self) -> None:
        self.calls.append(("wake", None))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """The engine of the runners, whose waits let time pass."""
    made = Supervisor()
    monkeypatch.setattr(run, "Supervisor", lambda: made)
    monkeypatch.setattr(run, "Exited", Exited)
    monkeypatch.setattr("dsl.tune.run.time.monotonic", lambda: made.now_s)
    return made


@pytest.fixture
def runners(engine: Supervisor) -> Runners:
    assert engine.now_s
    return Runners({"HOME": "/"}, 60, 3.0)


def ended(runners: Runners) -> list[tuple[str, int, str]]:
    done, signals = runners.wait()
    assert signals == []
    return [(end.name, end.exit_code, end.stop) for end in done]


def test_all_experiments_are_one_group_that_waits_for_more(runners: Runners, engine: Supervisor) -> None:
    runners.start("a", (), "/a", {})
    runners.start("b", (), "/b", {"CUDA_VISIBLE_DEVICES": "1"})
    (spec,) = engine.specs
    assert (spec.workers, spec.stays_open, spec.on_failure) == ((), True, "report")
    assert dict(spec.env) == {"HOME": "/"}
    assert [worker.env for worker in engine.added] == [{}, {"CUDA_VISIBLE_DEVICES": "1"}]
    engine.die(1, 3)
    assert ended(runners) == [("b", 3, "")]
    assert runners.running == 1
    runners.stop()
    assert engine.calls == [("stop", 4.0)]
    engine.die(0, 143)
    assert ended(runners) == [("a", 143, "stopped")]
    runners.stop(at_once=True)
    assert engine.calls[1:] == [("stop", 0.0)]
    assert runners.running == 0


def test_an_experiment_is_told_to_end_when_its_time_is_over_and_killed_if_it_does_not(
    runners: Runners, engine: Supervisor
) -> None:
    runners.start("a", (), "/a", {})

    def pass_by() -> None:
        engine.now_s += engine.waits[-1] or 0.0

    engine.interrupts = [pass_by, pass_by, lambda: engine.die(0, 137)]
    assert ended(runners) == [("a", 137, "timeout")]
    assert engine.calls == [("SIGTERM", 0), ("SIGKILL", 0)]
    assert engine.waits == [60.0, 4.0, None]


def test_an_experiment_that_cannot_be_started_is_returned_with_the_reason(
    runners: Runners, engine: Supervisor
) -> None:
    engine.refusal = "no processes are left"
    runners.start("a", (), "/a", {})
    assert runners.running == 1
    ((done,), _) = runners.wait()
    assert (done.name, done.error, runners.running) == ("a", "no processes are left", 0)


def test_signals_are_heard_without_a_wait_and_an_end_beside_them_is_not_lost(
    runners: Runners, engine: Supervisor
) -> None:
    assert runners.heard() == []
    runners.start("a", (), "/a", {})
    runners.hear(15)
    assert runners.wait() == ([], [15])
    engine.interrupts = [lambda: runners.hear(1)]
    assert runners.wait() == ([], [1]), "it ends a wait"
    assert ("wake", None) in engine.calls
    engine.die(0, 0)
    runners.hear(2)
    assert runners.heard() == [2]
    assert ended(runners) == [("a", 0, "")]


def test_the_time_of_an_experiment_stands_still_while_it_is_stopped(
    runners: Runners, engine: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners.start("a", (), "/a", {})

    def stop(_pid: int, _number: int) -> None:
        assert engine.calls == [("SIGTSTP", None), ("answer", None)], "the command has the signal by now"
        engine.now_s += 1000

    monkeypatch.setattr("dsl.tune.run.os.kill", stop)
    runners.suspend()
    assert engine.calls[2:] == [("SIGCONT", None)]
    engine.interrupts = [lambda: engine.die(0, 0)]
    assert ended(runners) == [("a", 0, "")]
    assert engine.waits == [60.0]


def test_a_second_ctrl_z_before_the_first_is_heard_is_the_same(runners: Runners) -> None:
    for number in (signal.SIGTSTP, signal.SIGTSTP, 15, 15):
        runners.hear(number)
    assert runners.heard() == [signal.SIGTSTP, 15, 15]
