"""Runs experiments side by side: each is a ``dsl`` command of its own, which an agent supervises.

A command of its own has a guard, a cgroup and a process tree that is killed whole, reaches other hosts by any
launcher, and dies with us however we end. It costs a Python that starts, some tens of milliseconds.

Where fork servers are asked for, the experiments on the same slots of this host share a command, a lane
(`dsl.cli.lane`).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from json import dumps, loads

from dsl import EngineError, Output, Started
from dsl._record import record, replace
from dsl.agent.agent import Agent
from dsl.agent.once import Once
from dsl.agent.policy import decide
from dsl.autotune.order import GRACE_S, order_to_line
from dsl.errors import DslError
from dsl.functions.signals import supervise
from dsl.model.node import NodePlan, Route, WorkerPlan
from dsl.model.outcome import Decision

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl.agent.agent import Listener
    from dsl.autotune.order import Order
    from dsl.model.outcome import History, Membership

MARGIN_S = 1.0
"""Beyond that, for its command to end."""

PATIENCE_S = 5.0
"""Beyond what an experiment has, for its lane to say that it has ended."""

INTERNAL_ERROR = 70
READ_BYTES = 4096


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

    def shorten(self, left_s: float) -> None:
        """Let the time be over in so many seconds; 0: never. From any thread."""
        with self._lock:
            self.deadline_s = time.monotonic() + left_s if left_s else None
            if self._write_fd >= 0:
                os.write(self._write_fd, b"d")  # whoever waits looks again

    def read(self) -> Sequence[_Stop]:
        """What is wanted."""
        try:
            words = os.read(self._read_fd, READ_BYTES)
        except BlockingIOError:
            words = b""
        if words.strip(b"d"):
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


class _Single:
    """One experiment, on a thread that supervises its command."""

    def __init__(self, order: Order, done: Callable[[Done], None]) -> None:
        self._leash = _Leash(order)
        self._thread = threading.Thread(target=self._run, args=(order, done), name=order.name)
        self._thread.start()

    def stop(self, *, at_once: bool) -> None:
        """End it."""
        self._leash.pull(at_once=at_once)

    def settle(self) -> None:
        """After its end."""
        self._thread.join()
        self._leash.close()

    def _run(self, order: Order, done: Callable[[Done], None]) -> None:
        begin_s = time.monotonic()
        code, error = run_order(order, self._leash)
        done(Done(order, code, time.monotonic() - begin_s, self._leash.reason, error))


class _Lane:
    """Experiments one after another, on a thread that supervises the lane."""

    def __init__(self, order: Order, done: Callable[[Done], None]) -> None:
        """Start the lane with its first experiment."""
        self._done = done
        self._lock = threading.Lock()
        self._order: Order | None = order
        self._begin_s = time.monotonic()
        self._is_stopped = False
        """The end of the experiment was asked for."""
        self._is_over = False
        """It takes no more orders."""
        self._rest = b""
        self._leash = _Leash(replace(order, limit_s=0.0))
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        host = replace(order, name=f"lane of {order.name}", argv=order.lane, stdout="", stderr=os.devnull)
        self._thread = threading.Thread(target=self._run, args=(host,), name=host.name)
        self._thread.start()
        self._write(order_to_line(order))

    def give(self, order: Order) -> bool:
        """Run another experiment; one at a time. False: it takes no more orders."""
        with self._lock:
            if self._is_over:
                return False
            self._order = order
            self._begin_s = time.monotonic()
            self._is_stopped = False
        self._write(order_to_line(order))
        return True

    def stop(self, *, at_once: bool) -> None:
        """End the experiment; at once: the lane, too."""
        with self._lock:
            order = self._order
            self._is_stopped = True
            if order is not None:
                self._leash.shorten(order.grace_s + PATIENCE_S)
        if at_once or order is None:
            self._leash.pull(at_once=True)
        else:
            self._write(dumps({"stop": order.grace_s}).encode() + b"\n")

    def settle(self) -> None:
        """After the end of an experiment."""

    def close(self) -> None:
        """Give no more orders, and wait for the end of the lane."""
        os.close(self._write_fd)
        self._leash.shorten(GRACE_S + PATIENCE_S)
        self._thread.join()
        self._leash.close()

    def hear(self, event: object) -> None:
        """Listen to what the lane answers, on its thread."""
        if isinstance(event, Started):
            self._let_go()
        if not isinstance(event, Output) or event.stream != 1:
            return
        *lines, self._rest = (self._rest + event.data).split(b"\n")
        for line in lines:
            answer = loads(line)
            if "begun" in answer:
                self._begin()
            elif "error" in answer:
                self._tell(1, "", answer["error"])
            else:
                self._tell(answer["code"], answer["stop"], "")

    def _tell(self, code: int, stop: str, error: str) -> None:
        with self._lock:
            order, self._order = self._order, None
            if order is not None:
                self._leash.shorten(0.0)
        if order is not None:
            self._done(Done(order, code, time.monotonic() - self._begin_s, stop or self._leash.reason, error))

    def _begin(self) -> None:
        with self._lock:
            order = self._order
            self._begin_s = time.monotonic()
            # The lane ends it by itself, and is ended if it does not.
            if order is not None and order.limit_s and not self._is_stopped:
                self._leash.shorten(order.limit_s + order.grace_s + PATIENCE_S)

    def _let_go(self) -> None:
        """Nobody but the lane reads orders, so what is written after its end does not wait for a reader."""
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._write_fd, line)
        except OSError:
            return  # it has ended, and says so

    def _run(self, host: Order) -> None:
        code, error = run_order(host, self._leash, (self,), self._read_fd)
        with self._lock:
            self._is_over = True
        self._let_go()
        self._tell(code or INTERNAL_ERROR, "", error)


class Runners:
    """Runs experiments side by side. One thread owns it."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write_fd, False)
        self._done: deque[Done] = deque()
        self._runners: dict[str, _Single | _Lane] = {}
        self._lanes: dict[str, _Lane] = {}

    @property
    def bell_fd(self) -> int:
        """What a signal may write its number to, to end `wait` (see `signal.set_wakeup_fd`)."""
        return self._write_fd

    @property
    def running(self) -> int:
        """How many experiments run."""
        return len(self._runners)

    def start(self, order: Order, place: str = "") -> None:
        """Start an experiment; `wait` tells of its end. ``place``: those of one place share a lane."""
        if not order.lane:
            self._runners[order.name] = _Single(order, self._note)
            return
        lane = self._lanes.get(place)
        if lane is None or not lane.give(order):
            if lane is not None:
                lane.close()
            lane = self._lanes[place] = _Lane(order, self._note)
        self._runners[order.name] = lane

    def heard(self) -> list[int]:
        """Numbers of signals that have come; does not wait."""
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        return self._read() if poll.poll(0) else []

    def wait(self) -> tuple[list[Done], list[int]]:
        """Wait for something: experiments that have ended, and numbers of signals that have come."""
        signals = self.heard()
        if not signals and not self._done:
            signals = self._read()
        done = []
        while self._done:
            one = self._done.popleft()
            self._runners.pop(one.order.name).settle()
            done.append(one)
        return done, signals

    def stop(self, *, at_once: bool = False) -> None:
        """End all experiments that run; they are still to be waited for."""
        for runner in self._runners.values():
            runner.stop(at_once=at_once)

    def close(self) -> None:
        """End what runs, and wait for it."""
        self.stop(at_once=True)
        while self._runners:
            self.wait()
        for lane in self._lanes.values():
            lane.close()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _read(self) -> list[int]:
        return [number for number in os.read(self._read_fd, READ_BYTES) if number]

    def _note(self, done: Done) -> None:
        self._done.append(done)
        os.write(self._write_fd, b"\0")


def run_order(
    order: Order, leash: _Leash, listeners: Sequence[Listener] = (), orders_fd: int | None = None
) -> tuple[int, str]:
    """Run a command to its end: its exit code, and why it could not be run.

    ``listeners`` hear what it writes to stdout, if that is no file; ``orders_fd`` is its stdin.
    """
    plan = NodePlan(
        host="",
        node_rank=0,
        workers=(
            WorkerPlan(
                rank=0,
                local_rank=0,
                argv=order.argv,
                env={},
                stdin_fd=orders_fd,
                stdout=Route(path=order.stdout) if order.stdout else Route(pipe=True),
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
    try:
        return supervise(Agent(Once(plan), plan, listeners, (leash,), policy=_decide), plan).code, ""
    except (DslError, EngineError, OSError) as problem:
        return 1, str(problem)
    except Exception as problem:  # noqa: BLE001  whatever it is, the tuning goes on
        return INTERNAL_ERROR, f"internal error: {type(problem).__name__}: {problem}"


def _decide(history: History, event: object, membership: Membership) -> Decision:
    """As always, but for the end that was asked for."""
    if isinstance(event, _Stop):
        return Decision("stop", grace_s=event.grace_s)
    return decide(history, event, membership)
