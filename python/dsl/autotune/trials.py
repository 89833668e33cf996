"""Runs experiments side by side: each is a ``dsl`` command of its own, which an agent supervises.

A command of its own has a guard, a cgroup and a process tree that is killed whole, reaches other hosts by any
launcher, and dies with us however we end. It costs a Python that starts, some tens of milliseconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from dsl import EngineError
from dsl._record import record
from dsl.agent.agent import Agent
from dsl.agent.policy import decide
from dsl.errors import DslError
from dsl.functions.signals import supervise
from dsl.model.node import NodePlan, Route, WorkerPlan
from dsl.model.outcome import Decision, Membership

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.model.outcome import History, Outcome

GRACE_S = 3.0
"""An experiment that is ended has nothing to save: its workers get so long after SIGTERM, or less."""

MARGIN_S = 1.0
"""Beyond that, for its command to end."""

INTERNAL_ERROR = 70
READ_BYTES = 4096


@record
class Order:
    """One experiment to run."""

    name: str
    """Of the experiment."""
    argv: tuple[str, ...]
    """The words of its command."""
    env: Mapping[str, str]
    """Its whole environment."""
    stdout: str
    """File of its stdout, which is appended to."""
    stderr: str
    """The same of stderr."""
    limit_s: float
    """Seconds that it may take; 0: no limit."""
    grace_s: float = GRACE_S
    """Seconds that its workers get between SIGTERM and SIGKILL."""


@record
class Done:
    """How an experiment ended."""

    order: Order
    exit_code: int
    """Of its command."""
    elapsed_s: float
    """From start to end, in seconds."""
    stop: str = ""
    """Why we ended it: ``timeout`` or ``stopped``; empty: it ended by itself."""
    error: str = ""
    """Why its command could not be run; empty: it was."""


@record
class _Stop:
    """Somebody wants the end of an experiment."""

    grace_s: float


class _Leash:
    """Ends an experiment when its time is over, or when told to: a channel of its agent."""

    def __init__(self, order: Order) -> None:
        self.deadline_s = time.monotonic() + order.limit_s if order.limit_s else None
        self._grace_s = order.grace_s + MARGIN_S
        self.reason = ""
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._read_fd

    def pull(self, *, at_once: bool) -> None:
        """End the experiment; from any thread."""
        with self._lock:
            if self._write_fd >= 0:
                os.write(self._write_fd, b"k" if at_once else b"s")

    def read(self) -> Sequence[_Stop]:
        """What is wanted."""
        try:
            words = os.read(self._read_fd, READ_BYTES)
        except BlockingIOError:
            words = b""
        if words:
            self.reason = self.reason or "stopped"
            return (_Stop(0.0 if b"k" in words else self._grace_s),)
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            self.deadline_s = None
            self.reason = self.reason or "timeout"
            return (_Stop(self._grace_s),)
        return ()

    def close(self) -> None:
        with self._lock:
            os.close(self._write_fd)
            self._write_fd = -1
        os.close(self._read_fd)


class Crew:
    """Runs experiments side by side, a thread for each that runs. One thread owns it."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write_fd, False)
        self._done: deque[Done] = deque()
        self._threads: dict[str, tuple[threading.Thread, _Leash]] = {}

    @property
    def bell_fd(self) -> int:
        """What a signal may write its number to, to end `wait` (see `signal.set_wakeup_fd`)."""
        return self._write_fd

    @property
    def running(self) -> int:
        """How many experiments run."""
        return len(self._threads)

    def start(self, order: Order) -> None:
        """Start an experiment; `wait` tells of its end."""
        leash = _Leash(order)
        thread = threading.Thread(target=self._run, args=(order, leash), name=order.name)
        self._threads[order.name] = (thread, leash)
        thread.start()

    def wait(self) -> tuple[list[Done], list[int]]:
        """Wait for something: experiments that have ended, and numbers of signals that have come."""
        told = os.read(self._read_fd, READ_BYTES)
        done = []
        while self._done:
            one = self._done.popleft()
            thread, leash = self._threads.pop(one.order.name)
            thread.join()
            leash.close()
            done.append(one)
        return done, [number for number in told if number]

    def stop(self, *, at_once: bool = False) -> None:
        """End all experiments that run; they are still to be waited for."""
        for _, leash in self._threads.values():
            leash.pull(at_once=at_once)

    def close(self) -> None:
        """End what runs, and wait for it."""
        self.stop(at_once=True)
        while self._threads:
            self.wait()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _run(self, order: Order, leash: _Leash) -> None:
        begin_s = time.monotonic()
        try:
            outcome = run_order(order, leash)
            code, error = outcome.code, ""
        except (DslError, EngineError, OSError) as problem:
            code, error = 1, str(problem)
        except Exception as problem:  # noqa: BLE001  whatever it is, the tuning goes on
            code, error = INTERNAL_ERROR, f"internal error: {type(problem).__name__}: {problem}"
        self._done.append(Done(order, code, time.monotonic() - begin_s, leash.reason, error))
        os.write(self._write_fd, b"\0")


def run_order(order: Order, leash: _Leash) -> Outcome:
    """Run an experiment to its end. Raises EngineError if it cannot be started."""
    plan = NodePlan(
        host="",
        node_rank=0,
        workers=(
            WorkerPlan(
                rank=0,
                local_rank=0,
                argv=order.argv,
                env={},
                stdout=Route(path=order.stdout),
                stderr=Route(path=order.stderr),
                noun="experiment",
                name=order.name,
            ),
        ),
        env=order.env,
        master_addr="",
        master_port=0,
        world_size=1,
        grace_s=order.grace_s + MARGIN_S,
        name=order.name,
    )
    return supervise(Agent(_Source(plan), plan, (), (leash,), policy=_decide), plan)


def _decide(history: History, event: object, membership: Membership) -> Decision:
    """As always, but for the end that was asked for."""
    if isinstance(event, _Stop):
        return Decision("stop", grace_s=event.grace_s)
    return decide(history, event, membership)


class _Source:
    """The one attempt of an experiment."""

    max_restarts = 0

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan

    def plan(self, _attempt: int) -> NodePlan:
        """Give the plan."""
        return self._plan

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make nothing."""
        return plan

    def membership(self) -> Membership:
        """Nobody joins or leaves."""
        return Membership(1)
