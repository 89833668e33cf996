"""Runs experiments side by side: each is a ``dsl`` command of its own, which the engine supervises.

A command of its own has a guard, a cgroup and a process tree that is killed as a whole. It reaches other
hosts by any launcher, and dies with us however we end. It costs the start of a Python, some tens of
milliseconds.

If the user wants fork servers, the tuner holds warm ones, which fork the workers of all experiments: the
imports of the script run once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from dsl import EngineError, Exited, LaunchSpec, Stdio, Supervisor, WorkerSpec
from dsl._own_process import START
from dsl._record import Record
from dsl.errors import AutotuningError
from dsl.tune.experiment import GRACE_S, Order

MARGIN_S = 1.0
"""Seconds after the grace of its workers, for the command of an experiment to end."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)

START_EXPERIMENT = (
    f"{START}from dsl import _own_process; _own_process.claim(); from dsl.report import speak; "
    "speak.end_path = sys.argv.pop(1); from dsl.__main__ import main; sys.exit(main())"
)
"""Python code of an experiment. The first word behind it is the file for the facts of its end."""


class Done(Record):
    """How an experiment ended."""

    order: Order
    exit_code: int
    """Exit code of its job."""
    elapsed_s: float
    """From start to end, in seconds."""
    stop: str = ""
    """Why we ended it: ``timeout`` or ``stopped``; empty: it ended by itself."""
    error: str = ""
    """Why its command could not be started; empty: it was started."""


class _Running:
    """An experiment whose command runs."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.begin_s = time.monotonic()
        self.deadline_s = self.begin_s + order.limit_s if order.limit_s else None
        """`time.monotonic` when we end the experiment, and later when we kill it."""
        self.stop = ""


class Runners:
    """Runs experiments side by side. In a ``with`` block signals wait for `wait` and `heard`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """``environ``: the environment of the experiments. Raises AutotuningError."""
        grace_s = GRACE_S + MARGIN_S
        group = LaunchSpec((), environ, on_failure="report", grace_s=grace_s, stays_open=True, inherits=True)
        try:
            self._supervisor = Supervisor()
            self._supervisor.start(group)
        except EngineError as error:
            raise AutotuningError(f"no experiment can be started: {error}") from None
        self._running: dict[int, _Running] = {}
        """Experiments by the engine's numbers of their commands."""
        self._failed: list[Done] = []
        """Experiments that could not be started."""
        self._heard: list[int] = []
        """Numbers of signals that have come."""
        self._old: dict[int, Any] = {}

    def __enter__(self) -> None:
        """Take the signals. Ignored signals stay ignored (nohup)."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self.hear)

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, old in self._old.items():
            signal.signal(number, old)

    @property
    def running(self) -> int:
        """How many experiments run."""
        return len(self._running) + len(self._failed)

    def start(self, order: Order, env: Mapping[str, str]) -> None:
        """Start an experiment with variables of its own; `wait` returns its end."""
        worker = WorkerSpec(
            (sys.executable, "-c", START_EXPERIMENT, order.end, *order.words),
            env=env,
            stdout=Stdio.file(order.stdout, append=True),
            stderr=Stdio.file(order.stderr, append=True),
        )
        try:
            self._running[self._supervisor.add(worker)] = _Running(order)
        except EngineError as error:
            self._failed.append(Done(order, 1, 0.0, error=str(error)))

    def hear(self, number: int, _frame: FrameType | None = None) -> None:
        """Take a signal, which ends `wait`."""
        self._heard.append(number)
        self._supervisor.wake()

    def heard(self) -> list[int]:
        """Numbers of signals that have come; does not wait."""
        numbers: list[int] = []
        while self._heard:
            number = self._heard.pop(0)
            # A user who presses Ctrl-Z twice wants one pause.
            if number != signal.SIGTSTP or number not in numbers:
                numbers.append(number)
        return numbers

    def wait(self) -> tuple[list[Done], list[int]]:
        """Wait for something: experiments that have ended, and numbers of signals that have come."""
        done: list[Done] = []
        signals = self.heard()
        while not (done or signals):
            done, self._failed = self._failed or self._look(), []
            signals = self.heard()
        return done, signals

    def stop(self, *, at_once: bool = False) -> None:
        """End all experiments, for good. `wait` still has to return those that run."""
        grace_s = max([one.order.grace_s for one in self._running.values()], default=0.0) + MARGIN_S
        for one in self._running.values():
            one.stop = one.stop or "stopped"
            one.deadline_s = None
        self._supervisor.stop(grace_s=0.0 if at_once else grace_s)

    def suspend(self) -> None:
        """Stop all experiments and this process, as Ctrl-Z stops a program, until a shell continues it."""
        begin_s = time.monotonic()
        self._supervisor.signal(signal.SIGTSTP)
        self._supervisor.pids()  # the answer comes when the signal is sent: the engine's thread stops with us
        old = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when we are continued, or at once without a shell
        signal.signal(signal.SIGTSTP, old)
        self._supervisor.signal(signal.SIGCONT)
        for one in self._running.values():
            if one.deadline_s is not None:  # the pause does not count as time
                one.deadline_s += time.monotonic() - begin_s

    def close(self) -> None:
        """End what runs, and wait for it."""
        self._supervisor.close()

    def _look(self) -> list[Done]:
        """Wait for experiments that end, and end those whose time is over."""
        due = [one.deadline_s for one in self._running.values() if one.deadline_s is not None]
        left_s = max(min(due) - time.monotonic(), 0.0) if due else None
        done = []
        for event in self._supervisor.wait(left_s):
            if isinstance(event, Exited):
                one = self._running.pop(event.exit.worker)
                done.append(Done(one.order, event.exit.status, time.monotonic() - one.begin_s, one.stop))
        for worker, one in self._running.items():
            if one.deadline_s is not None and one.deadline_s <= time.monotonic():
                self._supervisor.signal(signal.SIGKILL if one.stop else signal.SIGTERM, worker)
                one.deadline_s = None if one.stop else time.monotonic() + one.order.grace_s + MARGIN_S
                one.stop = "timeout"
        return done
