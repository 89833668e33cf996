"""Runs experiments side by side: each is a ``dsl`` command of its own, which the engine supervises.

A command of its own has a guard, a cgroup and a process tree that is killed as a whole. It reaches other
hosts by any launcher, and dies with us however we end. It costs the start of a Python, some tens of
milliseconds.

If the user wants fork servers, the tuner holds warm ones, which fork the workers of all experiments: the
imports of the script run once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from dsl import Ended, EngineError, Exited, LaunchSpec, Started, Stdio, Supervisor, WorkerSpec
from dsl._own_process import START
from dsl._record import Record
from dsl.tune.experiment import GRACE_S, Order

MARGIN_S = 1.0
"""Seconds after the grace of its workers, for the command of an experiment to end."""

INTERNAL_ERROR = 70
READ_BYTES = 4096
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


class _Command:
    """The command of an experiment."""

    def __init__(self, order: Order, env: Mapping[str, str]) -> None:
        """Start it. Raises EngineError."""
        self._order = order
        self._begin_s = time.monotonic()
        self.deadline_s = self._begin_s + order.limit_s if order.limit_s else None
        """`time.monotonic` when we end the experiment."""
        self._stop = ""
        self._pid = 0
        self._status = INTERNAL_ERROR
        worker = WorkerSpec(
            (sys.executable, "-c", START_EXPERIMENT, order.end, *order.words),
            stdin=Stdio.null(),
            stdout=Stdio.file(order.stdout, append=True),
            stderr=Stdio.file(order.stderr, append=True),
        )
        self.supervisor = Supervisor()
        try:
            self.supervisor.start(LaunchSpec((worker,), env=env, inherits=True, grace_s=GRACE_S + MARGIN_S))
        except EngineError:
            self.supervisor.close()
            raise

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """End the experiment; ``at_once`` without any grace."""
        self._stop = self._stop or reason
        self.deadline_s = None
        self.supervisor.stop(grace_s=0.0 if at_once else self._order.grace_s + MARGIN_S)

    def look(self) -> Done | None:
        """The end of the experiment, if it has come. Ends an experiment whose time is over."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            self.stop("timeout")
        for event in self.supervisor.wait(0):
            if isinstance(event, Started):
                self._pid = event.pid
            elif isinstance(event, Exited):
                self._status = event.exit.status
            elif isinstance(event, Ended):
                self.supervisor.close()
                return Done(self._order, self._status, time.monotonic() - self._begin_s, self._stop)
        return None

    def tell(self, number: int) -> None:
        """Send the command a signal before this call returns; the command passes it on to its workers."""
        if not self._pid:
            return
        try:
            fd = os.pidfd_open(self._pid)
        except OSError:
            return  # it has ended
        try:
            # Until its status is taken, no other process gets its pid: the descriptor is the command's.
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            signal.pidfd_send_signal(fd, number)
        except OSError:
            return
        finally:
            os.close(fd)


class Runners:
    """Runs experiments side by side. In a ``with`` block signals wait for `wait` and `heard`."""

    def __init__(self) -> None:
        self._read_fd, self.bell_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """`bell_fd` takes the number of a signal and ends `wait` (see `signal.set_wakeup_fd`)."""
        self._commands: dict[str, _Command] = {}
        """The command of each experiment that runs, by its name."""
        self._failed: list[Done] = []
        """Experiments that could not be started."""
        self._old: dict[int, Any] = {}

    def __enter__(self) -> None:
        """Take the signals. Ignored signals stay ignored (nohup)."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, _heard)
        signal.set_wakeup_fd(self.bell_fd, warn_on_full_buffer=False)

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, old in self._old.items():
            signal.signal(number, old)
        # Last: from here on a signal that we do not get finds its old handler.
        signal.set_wakeup_fd(-1)

    @property
    def running(self) -> int:
        """How many experiments run."""
        return len(self._commands) + len(self._failed)

    def start(self, order: Order, env: Mapping[str, str]) -> None:
        """Start an experiment in an environment; `wait` returns its end."""
        try:
            self._commands[order.name] = _Command(order, env)
        except (EngineError, OSError) as error:
            self._failed.append(Done(order, 1, 0.0, error=str(error)))

    def heard(self) -> list[int]:
        """Numbers of signals that have come; does not wait."""
        try:
            numbers = [number for number in os.read(self._read_fd, READ_BYTES) if number]
        except BlockingIOError:
            return []
        # A user who presses Ctrl-Z twice wants one pause.
        return [one for at, one in enumerate(numbers) if one not in numbers[:at] or one != signal.SIGTSTP]

    def wait(self) -> tuple[list[Done], list[int]]:
        """Wait for something: experiments that have ended, and numbers of signals that have come."""
        while True:
            done, self._failed = [*self._failed, *self._look()], []
            signals = self.heard()
            if done or signals:
                return done, signals
            self._sleep()

    def stop(self, *, at_once: bool = False) -> None:
        """End all experiments that run. `wait` still has to return them."""
        for command in self._commands.values():
            command.stop("stopped", at_once=at_once)

    def suspend(self) -> None:
        """Stop all experiments and this process, as Ctrl-Z stops a program, until a shell continues it."""
        commands, begin_s = [*self._commands.values()], time.monotonic()
        for command in commands:
            command.tell(signal.SIGTSTP)  # at once: the engine's thread stops with us
        old = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when we are continued, or at once without a shell
        signal.signal(signal.SIGTSTP, old)
        for command in commands:
            command.tell(signal.SIGCONT)
            if command.deadline_s is not None:  # the pause does not count as time
                command.deadline_s += time.monotonic() - begin_s

    def close(self) -> None:
        """End what runs, and wait for it."""
        self.stop(at_once=True)
        while self._commands:
            self._sleep()
            self._look()
        os.close(self._read_fd)
        os.close(self.bell_fd)

    def _look(self) -> list[Done]:
        done = [one for one in [command.look() for command in self._commands.values()] if one is not None]
        for one in done:
            del self._commands[one.order.name]
        return done

    def _sleep(self) -> None:
        """Wait for a signal, an event of a command or its deadline."""
        poller = select.poll()
        poller.register(self._read_fd, select.POLLIN)
        due = []
        for command in self._commands.values():
            poller.register(command.supervisor.fileno(), select.POLLIN)
            if command.deadline_s is not None:
                due.append(command.deadline_s)
        left_s = max(min(due) - time.monotonic(), 0.0) if due else None
        poller.poll(None if left_s is None else left_s * 1000 + 1)


def _heard(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the wakeup descriptor already has the number."""
