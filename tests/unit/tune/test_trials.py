"""Ends and signals of runners, without any process: the engine is made up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dsl._record import Record, replace
from dsl.tune import trials
from dsl.tune.experiment import Order
from dsl.tune.trials import Runners

ORDER = Order(name="a", words=(), stdout="", stderr="", end="", limit_s=60, grace_s=3.0)


class Exit(Record):
    """Only the engine makes the real ones."""

    status: int
    """As there."""


class Exited(Record):
    """The same of its event."""

    exit: Exit
    """As there."""


class Started(Record):
    """The same of the event that the command runs."""

    pid: int = 0
    """As there; 0: no process."""


class Ended(Record):
    """The same of the last event."""


class Supervisor:
    """In place of the engine: its command does what the test says."""

    def __init__(self) -> None:
        self.events: list[object] = [Started()]
        self.calls: list[object] = []
        self.is_closed = False
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK)
        os.write(self._write_fd, b"\0")

    def start(self, _spec: Any) -> None:
        pass

    def tell(self, *events: object) -> None:
        self.events += events
        os.write(self._write_fd, b"\0")

    def die(self, status: int = 1) -> None:
        self.tell(Exited(Exit(status)), Ended())

    def wait(self, _timeout_s: float) -> list[object]:
        try:
            os.read(self._read_fd, 100)
        except BlockingIOError:
            return []
        events, self.events = self.events, []
        return events

    def fileno(self) -> int:
        return self._read_fd

    def stop(self, *, grace_s: float) -> None:
        self.calls.append(grace_s)
        self.die(143)

    def close(self) -> None:
        self.is_closed = True
        os.close(self._read_fd)
        os.close(self._write_fd)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Supervisor]:
    """The commands that were started."""
    found: list[Supervisor] = []

    def make() -> Supervisor:
        found.append(Supervisor())
        return found[-1]

    monkeypatch.setattr(trials, "Supervisor", make)
    for kind in (Exited, Started, Ended):
        monkeypatch.setattr(trials, kind.__name__, kind)
    return found


@pytest.fixture
def runners(made: list[Supervisor]) -> Iterator[Runners]:
    runners = Runners()
    yield runners
    for one in made:
        if not one.is_closed:
            one.die()
    runners.close()


def ended(runners: Runners) -> list[tuple[str, int, str]]:
    done, signals = runners.wait()
    assert signals == []
    return [(one.order.name, one.exit_code, one.stop) for one in done]


def test_a_command_of_its_own_ends_with_its_experiment(runners: Runners, made: list[Supervisor]) -> None:
    runners.start(ORDER, {})
    runners.start(replace(ORDER, name="b"), {})
    made[1].die(3)
    assert ended(runners) == [("b", 3, "")]
    runners.stop()
    assert ended(runners) == [("a", 143, "stopped")]
    assert (made[0].calls, runners.running) == ([4.0], 0)


def test_a_command_of_its_own_is_ended_when_its_time_is_over(
    runners: Runners, made: list[Supervisor]
) -> None:
    runners.start(replace(ORDER, limit_s=0.01), {})
    assert ended(runners) == [("a", 143, "timeout")]
    assert made[0].calls == [4.0]


def test_signals_are_heard_without_a_wait_and_an_end_beside_them_is_not_lost(
    runners: Runners, made: list[Supervisor]
) -> None:
    assert runners.heard() == []
    runners.start(ORDER, {})
    os.write(runners.bell_fd, b"\x0f")
    assert runners.wait() == ([], [15])
    made[0].die(0)
    os.write(runners.bell_fd, b"\x02")
    assert runners.heard() == [2]
    assert ended(runners) == [("a", 0, "")]


@pytest.mark.usefixtures("made")
def test_the_time_of_an_experiment_stands_still_while_it_is_stopped(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    clock = [now_s]
    monkeypatch.setattr("dsl.tune.trials.time.monotonic", lambda: clock[0])
    runners.start(ORDER, {})
    monkeypatch.setattr("dsl.tune.trials.os.kill", lambda *_: clock.append(clock.pop() + 1000))
    runners.suspend()
    os.write(runners.bell_fd, b"\x01")
    assert runners.wait() == ([], [1]), "its time is not over"
    clock[0] += 61
    assert ended(runners) == [("a", 143, "timeout")]


def test_a_second_ctrl_z_before_the_first_is_heard_is_the_same(runners: Runners) -> None:
    os.write(runners.bell_fd, bytes([signal.SIGTSTP, signal.SIGTSTP, 15, 15]))
    assert runners.heard() == [signal.SIGTSTP, 15, 15]
