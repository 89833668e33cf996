"""Runs experiments side by side: each is a ``dsl`` command of its own, which an agent supervises.

A command of its own has a guard, a cgroup and a process tree that is killed as a whole. It reaches other
hosts by any launcher, and dies with us however we end. It costs the start of a Python, some tens of
milliseconds.

If the user wants fork servers, the experiments on the same slots of this host share a command, a lane
(`dsl.autotune.lane`).
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from json import dumps, loads

from dsl import EngineError, Output, Started
from dsl._record import record, replace
from dsl.agent.policy import decide
from dsl.agent.session import Crew, run_once
from dsl.autotune.experiment import GRACE_S, order_to_line
from dsl.errors import DslError
from dsl.model.node import NodePlan, Route, WorkerPlan
from dsl.model.outcome import Decision

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl.agent.agent import Listener
    from dsl.autotune.experiment import Order
    from dsl.model.outcome import History, Membership

MARGIN_S = 1.0
"""Seconds after the grace of its workers, for the command of an experiment to end."""

START_S = 1.0
"""Seconds that we wait for a starting command to have a pid; without a pid, a signal is skipped."""

PATIENCE_S = 5.0
"""Seconds after the time of an experiment, for its lane to say that it has ended."""

_SUSPEND = signal.SIGTSTP
_LEAST_S = 0.001
"""Least time that is left: 0 would mean no limit."""

INTERNAL_ERROR = 70
READ_BYTES = 4096


@record
class Done:
    """How an experiment ended."""

    order: Order
    exit_code: int
    """Exit code of its command."""
    elapsed_s: float
    """From start to end, in seconds."""
    stop: str = ""
    """Why we ended it: ``timeout`` or ``stopped``; empty: it ended by itself."""
    error: str = ""
    """Why its command could not be run; empty: it ran."""


@record
class _Stop:
    """A request to end an experiment."""

    grace_s: float


class Leash:
    """A channel of an experiment's agent: ends the experiment when its time is over, or on request."""

    def __init__(self, order: Order) -> None:
        self.deadline_s = time.monotonic() + order.limit_s if order.limit_s else None
        self._grace_s = order.grace_s + MARGIN_S
        self.reason = ""
        self._left_s: float | None = None
        """Seconds until the deadline, while the clock is paused."""
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """A descriptor that is readable when there is a request."""
        return self._read_fd

    def pull(self, *, at_once: bool) -> None:
        """End the experiment; from any thread."""
        with self._lock:
            if self._write_fd >= 0:
                os.write(self._write_fd, b"k" if at_once else b"s")

    def shorten(self, left_s: float) -> None:
        """Set the seconds that are left; 0: no limit. From any thread."""
        with self._lock:
            self.deadline_s = time.monotonic() + left_s if left_s else None
            if self._write_fd >= 0:
                os.write(self._write_fd, b"d")  # wakes the agent, which reads the new deadline

    def pause(self) -> None:
        """Stop its clock; from any thread."""
        with self._lock:
            if self.deadline_s is not None:
                self._left_s = self.deadline_s - time.monotonic()
                self.deadline_s = None

    def go_on(self) -> None:
        """Let its clock go on; from any thread."""
        left_s, self._left_s = self._left_s, None
        if left_s is not None:
            self.shorten(max(left_s, _LEAST_S))

    def read(self) -> Sequence[_Stop]:
        """The requests that are due."""
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
        """Close its descriptors, when the agent has ended."""
        with self._lock:
            os.close(self._write_fd)
            self._write_fd = -1
        os.close(self._read_fd)


class _Process:
    """A listener that knows the process of a command. The command passes signals on to its workers."""

    def __init__(self) -> None:
        self._pid = 0
        self._is_known = threading.Event()

    def hear(self, event: object) -> None:
        """Note its pid."""
        if isinstance(event, Started):
            self._pid = event.pid
            self._is_known.set()

    def over(self) -> None:
        """Note that the command has ended, or was never started."""
        self._is_known.set()

    def tell(self, number: int) -> None:
        """Send the command a signal, if it runs; from any thread."""
        if not self._is_known.wait(START_S) or not self._pid:
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


class _Runner:
    """A command that runs experiments, with its time limit."""

    def __init__(self, order: Order) -> None:
        self._leash = Leash(order)
        self._process = _Process()

    def pause(self) -> None:
        """Stop its processes and its clock, until `go_on`."""
        self._leash.pause()
        self._process.tell(_SUSPEND)

    def go_on(self) -> None:
        """Continue its processes and its clock."""
        self._process.tell(signal.SIGCONT)
        self._leash.go_on()


class _Single(_Runner):
    """One experiment, on a thread that supervises its command."""

    def __init__(self, order: Order, done: Callable[[Done], None]) -> None:
        super().__init__(order)
        self._thread = threading.Thread(target=self._run, args=(order, done), name=order.name)
        self._thread.start()

    def stop(self, *, at_once: bool) -> None:
        """End it."""
        self._leash.pull(at_once=at_once)

    def settle(self) -> None:
        """Clean up after its end."""
        self._thread.join()
        self._leash.close()

    def _run(self, order: Order, done: Callable[[Done], None]) -> None:
        begin_s = time.monotonic()
        code, error = run_order(order, self._leash, (self._process,))
        self._process.over()
        done(Done(order, code, time.monotonic() - begin_s, self._leash.reason, error))


class _Lane(_Runner):
    """Experiments one after another, on a thread that supervises the lane."""

    def __init__(self, order: Order, done: Callable[[Done], None]) -> None:
        """Start the lane with its first experiment."""
        super().__init__(replace(order, limit_s=0.0))
        self._done = done
        self._lock = threading.Lock()
        self._order: Order | None = order
        self._begin_s = time.monotonic()
        self._is_stopped = False
        """Whether the end of the experiment was requested."""
        self._is_over = False
        """Whether the lane takes no more orders."""
        self._rest = b""
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        host = replace(order, name=f"lane of {order.name}", argv=order.lane, stdout="", stderr=os.devnull)
        self._thread = threading.Thread(target=self._run, args=(host,), name=host.name)
        self._thread.start()
        self._write(order_to_line(order))

    def give(self, order: Order) -> bool:
        """Run another experiment; one at a time. False: the lane takes no more orders."""
        with self._lock:
            if self._is_over:
                return False
            self._order = order
            self._begin_s = time.monotonic()
            self._is_stopped = False
        self._write(order_to_line(order))
        return True

    def stop(self, *, at_once: bool) -> None:
        """End the experiment; ``at_once`` ends the lane, too."""
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
        """Do nothing after the end of an experiment: the lane goes on."""

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
            # The lane ends the experiment by itself. If it does not, we end the lane.
            if order is not None and order.limit_s and not self._is_stopped:
                self._leash.shorten(order.limit_s + order.grace_s + PATIENCE_S)

    def _let_go(self) -> None:
        """Close our read end: only the lane reads orders, so a write after its end fails and never waits."""
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._write_fd, line)
        except OSError:
            return  # the lane has ended, and `_run` reports that

    def _run(self, host: Order) -> None:
        code, error = run_order(host, self._leash, (self, self._process), self._read_fd)
        self._process.over()
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
        """The descriptor that takes the number of a signal and ends `wait` (see `signal.set_wakeup_fd`)."""
        return self._write_fd

    @property
    def running(self) -> int:
        """How many experiments run."""
        return len(self._runners)

    def start(self, order: Order, place: str = "") -> None:
        """Start an experiment; `wait` returns its end. Experiments of the same ``place`` share a lane."""
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
        """End all experiments that run. `wait` still has to return them."""
        for runner in self._runners.values():
            runner.stop(at_once=at_once)

    def suspend(self) -> None:
        """Stop all experiments and this process, as Ctrl-Z stops a program, until a shell continues it."""
        runners = {*self._runners.values(), *self._lanes.values()}
        for runner in runners:
            runner.pause()
        old = signal.signal(_SUSPEND, signal.SIG_DFL)
        os.kill(os.getpid(), _SUSPEND)  # returns when we are continued, or at once if no shell could do that
        signal.signal(_SUSPEND, old)
        for runner in runners:
            runner.go_on()

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
        numbers = [number for number in os.read(self._read_fd, READ_BYTES) if number]
        # A user who presses Ctrl-Z twice wants one pause.
        return [
            number for at, number in enumerate(numbers) if number not in numbers[:at] or number != _SUSPEND
        ]

    def _note(self, done: Done) -> None:
        self._done.append(done)
        os.write(self._write_fd, b"\0")


def run_order(
    order: Order, leash: Leash, listeners: Sequence[Listener] = (), orders_fd: int | None = None
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
        return run_once(plan, Crew(listeners, (leash,), _decide, routine=True)).code, ""
    except (DslError, EngineError, OSError) as problem:
        return 1, str(problem)
    except Exception as problem:  # noqa: BLE001  whatever it is, the tuning goes on
        return INTERNAL_ERROR, f"internal error: {type(problem).__name__}: {problem}"


def _decide(history: History, event: object, membership: Membership) -> Decision:
    """The usual policy, except that a request ends the experiment."""
    if isinstance(event, _Stop):
        return Decision("stop", grace_s=event.grace_s)
    return decide(history, event, membership)
