"""Runs experiments side by side: each is a ``dsl`` command of its own, which the engine supervises.

A command of its own has a guard, a cgroup and a process tree that is killed as a whole. It reaches other
hosts by any launcher, and dies with us however we end. It costs the start of a Python, some tens of
milliseconds.

If the user wants fork servers, the experiments on the same slots of this host share a command, a lane
(`dsl.autotune.lane`). A lane differs in two things: it reads its experiments as orders from stdin, and it
tells when their workers start and how they end.
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

from dsl import Ended, EngineError, Exited, LaunchSpec, Output, Started, Stdio, Supervisor, WorkerSpec
from dsl._own_process import START
from dsl._record import record
from dsl.autotune.experiment import GRACE_S, Begun, ExperimentOver, Order, StopExperiment
from dsl.model.codec import to_line
from dsl.model.lines import Lines

MARGIN_S = 1.0
"""Seconds after the grace of its workers, for the command of an experiment to end."""

PATIENCE_S = 5.0
"""Seconds after the grace of its workers, for a lane to say that its experiment has ended."""

INTERNAL_ERROR = 70
READ_BYTES = 4096
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)

_START = f"{START}from dsl import _own_process; "

START_EXPERIMENT = (
    f"{_START}_own_process.claim(); from dsl.report import speak; speak.end_path = sys.argv.pop(1); "
    "from dsl.__main__ import main; sys.exit(main())"
)
"""Python code of an experiment. The first word behind it is the file for the facts of its end."""

START_LANE = (
    f"{_START}_own_process.claim(); from dsl.autotune.lane import main; from dsl.cli.deepspeed import read; "
    "sys.exit(main(read))"
)
"""Python code of a lane."""


@record
class Done:
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
    """A command that runs experiments: the only one, or as a lane one after another."""

    def __init__(self, order: Order, env: Mapping[str, str], *, is_lane: bool) -> None:
        """Start it with its first experiment. Raises EngineError."""
        self.order: Order | None = order
        """The experiment that runs; None: the lane has nothing to do."""
        self.deadline_s = None if is_lane or not order.limit_s else time.monotonic() + order.limit_s
        """`time.monotonic` when we end the experiment, or else the whole command."""
        self._begin_s = time.monotonic()
        self._stop = ""
        self._pid = 0
        self._status = INTERNAL_ERROR
        self._is_lane = is_lane
        self._lines = Lines(Begun, ExperimentOver)
        self._orders = to_line(order)
        """Orders that wait for the start of the lane."""
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC) if is_lane else (-1, -1)
        words = ("-c", START_LANE) if is_lane else ("-c", START_EXPERIMENT, order.end, *order.words)
        worker = WorkerSpec(
            (sys.executable, *words),
            stdin=Stdio.fd(self._read_fd) if is_lane else Stdio.null(),
            stdout=Stdio.pipe() if is_lane else Stdio.file(order.stdout, append=True),
            stderr=Stdio.null() if is_lane else Stdio.file(order.stderr, append=True),
        )
        self.supervisor: Supervisor | None = Supervisor()
        """None: the command has ended."""
        try:
            self.supervisor.start(LaunchSpec((worker,), env=env, inherits=True, grace_s=GRACE_S + MARGIN_S))
        except EngineError:
            self._close()
            raise

    def give(self, order: Order) -> bool:
        """Run another experiment in the lane. False: the lane has ended."""
        if self.supervisor is None or not self._write(to_line(order)):
            self._close()
            return False
        self.order = order
        self.deadline_s = None
        self._begin_s = time.monotonic()
        self._stop = ""
        return True

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """End the experiment. ``at_once`` ends its command, too, without any grace."""
        self._stop = self._stop or reason
        grace_s = GRACE_S if self.order is None else self.order.grace_s
        self.deadline_s = None
        if self._is_lane and not at_once:
            self.deadline_s = time.monotonic() + grace_s + PATIENCE_S
            self._write(to_line(StopExperiment(grace_s)))
        elif self.supervisor is not None:
            self.supervisor.stop(grace_s=0.0 if at_once else grace_s + MARGIN_S)

    def look(self) -> Done | None:
        """The end of the experiment, if it has come. Ends an experiment whose time is over."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            self.stop("timeout", at_once=bool(self._stop))
        done = None
        for event in self.supervisor.wait(0) if self.supervisor is not None else ():
            if isinstance(event, Started):
                self._pid = event.pid
                self._let_go()
            elif isinstance(event, Output):
                done = self._hear(event.data) or done
            elif isinstance(event, Exited):
                self._status = event.exit.status
            elif isinstance(event, Ended):
                # A lane that ends on its own has not done what it was ordered to do.
                done = self._end(self._status or (INTERNAL_ERROR if self._is_lane else 0)) or done
                self._close()
        return done

    def tell(self, number: int) -> None:
        """Send the command a signal before this call returns; the command passes it on to its workers."""
        if self.supervisor is None or not self._pid:
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

    def dismiss(self) -> None:
        """Give no more orders: the lane ends."""
        self._stop = "stopped"
        self.deadline_s = time.monotonic() + GRACE_S + PATIENCE_S
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def _hear(self, data: bytes) -> Done | None:
        done = None
        for answer in self._lines.feed(data):
            if not isinstance(answer, Begun):
                done = self._end(answer.code)
            elif self.order is not None and not self._stop:
                self._begin_s = time.monotonic()
                self.deadline_s = self._begin_s + self.order.limit_s if self.order.limit_s else None
        return done

    def _end(self, code: int) -> Done | None:
        order, self.order = self.order, None
        self.deadline_s = None
        return None if order is None else Done(order, code, time.monotonic() - self._begin_s, self._stop)

    def _let_go(self) -> None:
        """Close our read end: only the lane reads orders, so a write after its end fails and never waits."""
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1
            self._write(b"")

    def _write(self, line: bytes) -> bool:
        self._orders += line
        if self._read_fd >= 0:
            return True  # the lane starts
        try:
            os.write(self._write_fd, self._orders)
        except OSError:
            return False
        self._orders = b""
        return True

    def _close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()
            self.supervisor = None
        self.dismiss()
        self._let_go()
        self.deadline_s = None


class Runners:
    """Runs experiments side by side. In a ``with`` block signals wait for `wait` and `heard`."""

    def __init__(self) -> None:
        self._read_fd, self.bell_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """`bell_fd` takes the number of a signal and ends `wait` (see `signal.set_wakeup_fd`)."""
        self._commands: dict[str, _Command] = {}
        """The command of each experiment that runs, by its name."""
        self._lanes: dict[str, _Command] = {}
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

    def start(self, order: Order, env: Mapping[str, str], lane: str = "") -> None:
        """Start an experiment in an environment; `wait` returns its end.

        ``lane``: experiments with the same word share a command; empty: each has a command of its own.
        """
        command = self._lanes.get(lane)
        if command is None or not command.give(order):
            try:
                command = _Command(order, env, is_lane=bool(lane))
            except (EngineError, OSError) as error:
                self._failed.append(Done(order, 1, 0.0, error=str(error)))
                return
            if lane:
                self._lanes[lane] = command
        self._commands[order.name] = command

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
        commands, begin_s = self._all(), time.monotonic()
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
        for lane in self._lanes.values():
            lane.dismiss()
        while any(command.supervisor is not None for command in self._all()):
            self._sleep()
            self._look()
        os.close(self._read_fd)
        os.close(self.bell_fd)

    def _all(self) -> list[_Command]:
        return [*dict.fromkeys((*self._commands.values(), *self._lanes.values()))]

    def _look(self) -> list[Done]:
        done = [one for one in [command.look() for command in self._all()] if one is not None]
        for one in done:
            del self._commands[one.order.name]
        return done

    def _sleep(self) -> None:
        """Wait for a signal, an event of a command or its deadline."""
        poller = select.poll()
        poller.register(self._read_fd, select.POLLIN)
        due = []
        for command in self._all():
            if command.supervisor is not None:
                poller.register(command.supervisor.fileno(), select.POLLIN)
            if command.deadline_s is not None:
                due.append(command.deadline_s)
        left_s = max(min(due) - time.monotonic(), 0.0) if due else None
        poller.poll(None if left_s is None else left_s * 1000 + 1)


def _heard(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the wakeup descriptor already has the number."""
