"""Runs experiments one after another on the same slots of this host, as the tuner orders.

With ``--start-method forkserver`` the fork servers of the first experiment fork the workers of all, so that
the imports of a script run once. Each experiment is an attempt of one agent. The lane reads orders from
stdin, and writes answers to stdout: one JSON object a line.

| order | |
| --- | --- |
| what `order_to_line` makes | run the job of this command line |
| ``{"stop": SECONDS}`` | end the experiment; its workers get so many seconds |

| answer | |
| --- | --- |
| ``{"begun": true}`` | the imports are done, and the workers of the experiment start now |
| ``{"code": CODE, "stop": WHY}`` | the experiment has ended; ``timeout`` or ``stopped``: the lane ended it |
| ``{"error": TEXT}`` | the experiment cannot be run |
"""

from __future__ import annotations

import os
import time
from json import dumps, loads

from dsl import ForkServerLost, ForkServerReady, SignalReceived, Stopping
from dsl._record import record, replace
from dsl.agent.planner import Planner
from dsl.agent.policy import decide
from dsl.agent.session import Crew, Session
from dsl.autotune.experiment import Order, order_of
from dsl.errors import DslError, UnsupportedError
from dsl.facts import this_machine
from dsl.machine.check import check_program
from dsl.model.node import Route
from dsl.model.outcome import AttemptEnded, AttemptOutcome, AttemptStarted, Decision, Membership, Outcome
from dsl.plan.job import plan_job
from dsl.report import speak
from dsl.report.narrator import Narrator
from dsl.report.speak import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from dsl.facts import Facts
    from dsl.model.node import NodePlan, WorkerPlan
    from dsl.model.outcome import History
    from dsl.model.request import Request

    Reader: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], tuple[Request, Any]]
    """Makes the request of the words of a command line and an environment. Raises DslError."""

READ_BYTES = 65536
SIGCONT, SIGTSTP = 18, 20  # as on all machines that we run on
STOPPED = 143
"""Exit code of an experiment that was stopped before it began: that of SIGTERM."""


@record
class StopExperiment:
    """Order to end the experiment."""

    reason: str
    """``timeout`` or ``stopped``."""
    grace_s: float
    """Seconds until its workers are killed."""


@record
class NoMoreOrders:
    """The tuner sends no more orders."""


class OrderChannel:
    """The orders of the tuner, and the answers to it: a channel of the agent."""

    def __init__(self, orders_fd: int, answers_fd: int) -> None:
        self._orders_fd = orders_fd
        self._answers_fd = answers_fd
        self._rest = b""
        self._limit: tuple[float, float] | None = None
        self._left: tuple[float, float] | None = None
        """Seconds left of a paused limit, and the grace after it."""
        self._stop = ""

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when the experiment's time limit ends; None without a running limit."""
        return None if self._limit is None else self._limit[0]

    def fileno(self) -> int:
        """The descriptor of the orders."""
        return self._orders_fd

    def read(self) -> Sequence[Order | StopExperiment | NoMoreOrders]:
        """Return new orders, or a stop if the time limit has passed; else wait for orders."""
        if self._limit is not None and time.monotonic() >= self._limit[0]:
            grace_s = self._limit[1]
            self._limit = None
            return (self._end("timeout", grace_s),)
        data = os.read(self._orders_fd, READ_BYTES)
        if not data:
            os.close(self._orders_fd)
            self._orders_fd = -1
            return (NoMoreOrders(),)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._order(loads(line)) for line in lines]

    def first(self) -> Order | None:
        """Wait for the first experiment; None if there is none. One that was stopped before is not run."""
        order = None
        while order is None:
            for message in self.read():
                if isinstance(message, NoMoreOrders):
                    return None
                if order is not None and isinstance(message, StopExperiment):
                    self._stop = message.reason
                    self.end(STOPPED)
                order = message if isinstance(message, Order) else None
        self._stop = ""
        return order

    def begin(self, order: Order) -> None:
        """Start the time limit of an experiment, and tell the tuner that it has begun."""
        self._limit = (time.monotonic() + order.limit_s, order.grace_s) if order.limit_s else None
        self._tell({"begun": True})

    def pause(self) -> None:
        """Pause the time limit of the experiment."""
        if self._limit is not None:
            self._left = (self._limit[0] - time.monotonic(), self._limit[1])
            self._limit = None

    def go_on(self) -> None:
        """Resume the time limit after `pause`."""
        if self._left is not None:
            self._limit = (time.monotonic() + self._left[0], self._left[1])
            self._left = None

    def end(self, code: int) -> None:
        """Tell the tuner how the experiment has ended."""
        self._limit = self._left = None
        self._tell({"code": code, "stop": self._stop})
        self._stop = ""

    def refuse(self, text: str) -> None:
        """Tell the tuner why an experiment cannot be run."""
        self._tell({"error": text})

    def leave(self) -> None:
        """Close the descriptors here: another process serves the orders."""
        os.close(self._orders_fd)
        os.close(self._answers_fd)

    def _end(self, reason: str, grace_s: float) -> StopExperiment:
        self._stop = self._stop or reason
        return StopExperiment(reason, grace_s)

    def _order(self, words: dict[str, object]) -> Order | StopExperiment:
        if "stop" in words:
            return self._end("stopped", float(words["stop"]))  # type: ignore[arg-type]
        return order_of(words)

    def _tell(self, answer: dict[str, object]) -> None:
        try:
            os.write(self._answers_fd, dumps(answer).encode() + b"\n")
        except OSError:
            return  # the tuner is gone


class Jobs:
    """The plans of the experiments, one attempt each."""

    max_restarts = 0

    def __init__(self, facts: Facts, orders: OrderChannel, read: Reader) -> None:
        self._facts = facts
        self._read = read
        self._orders = orders
        self._planner: Planner | None = None
        self.next: Order | None = None
        """The order of the current experiment, or of the next one."""

    def plan(self, _attempt: int) -> NodePlan:
        """Plan the next experiment. Raises DslError."""
        order = self.next
        assert order is not None
        try:
            return self._plan(order)
        except DslError as error:
            self._orders.refuse(str(error))
            raise

    def _plan(self, order: Order) -> NodePlan:
        _show_in(order.stderr, 2)
        speak.end_path = order.end
        self._finish(succeeded=False)
        request, _ = self._read(order.words, self._facts.environ)
        planned = plan_job(request, self._facts)
        if planned.remote is not None:
            raise UnsupportedError("a lane is for the workers of this host")
        check_program(planned.job.program, planned.job.flavour, self._facts.environ)
        self._planner = Planner(planned, self._facts)
        plan = self._planner.plan(0)
        workers = tuple([_with_files(worker, order) for worker in plan.workers])
        return replace(plan, workers=workers, notices=(*planned.notices, *plan.notices))

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make the directories that the plan needs. Raises DslError."""
        assert self._planner is not None
        assert self.next is not None
        return self._planner.prepare(plan)

    def membership(self) -> Membership:
        """The node itself: no node joins or leaves."""
        return Membership(1)

    def finish(self, *, succeeded: bool) -> None:
        """Remove the files that were made for the last experiment."""
        self._finish(succeeded=succeeded)

    def _finish(self, *, succeeded: bool) -> None:
        if self._planner is not None:
            self._planner.finish(succeeded=succeeded)
            self._planner = None


class Lane(Crew):
    """The crew of a lane: it reports the experiments, and decides what the agent does next."""

    def __init__(self, jobs: Jobs, orders: OrderChannel, plan: NodePlan, own_fd: int) -> None:
        super().__init__([self], [orders], self.decide, routine=True)  # to get `ForkServerReady`
        self._jobs = jobs
        self._orders = orders
        self._narrator = Narrator(plan)
        self._own_fd = own_fd
        self._imports = True
        """Whether the fork servers of the first experiment may still be importing."""
        self._is_last = False
        """Whether no other experiment will follow."""

    def stay(self) -> None:
        """Leave the orders and the files of experiments to the agent."""
        self._orders.leave()
        os.dup2(self._own_fd, 2)

    def refuse(self, command: str, text: str, code: int) -> None:
        """Report it to the user and to the tuner."""
        super().refuse(command, text, code)
        self._orders.refuse(text)

    def hear(self, event: object) -> None:
        """Report the events of an experiment in the experiment's own file."""
        if isinstance(event, AttemptStarted):
            self._narrator = Narrator(event.plan)
            for notice in event.plan.notices:
                self._narrator.note(notice)
            self._imports = self._imports and bool(event.plan.fork_servers)
            if not self._imports:
                self._begin()
        elif isinstance(event, AttemptOutcome):
            self._narrator.hear(Outcome(event.code, (event,)))
        elif not isinstance(event, (AttemptEnded, Outcome)):
            self._narrator.hear(event)
            if isinstance(event, (ForkServerReady, ForkServerLost)) and self._imports:
                self._imports = False
                self._begin()

    def _begin(self) -> None:
        assert self._jobs.next is not None
        self._orders.begin(self._jobs.next)

    def decide(self, history: History, event: object, membership: Membership) -> Decision:
        """Decide what the agent does next: after an experiment it waits for the next one."""
        if history.gives_up:
            return Decision("end", code=1)
        self._is_last = self._is_last or _is_end(event)
        if isinstance(event, SignalReceived) and event.signum in (SIGTSTP, SIGCONT):
            self._orders.pause() if event.signum == SIGTSTP else self._orders.go_on()
        if isinstance(event, StopExperiment):
            return Decision("stop", grace_s=event.grace_s) if not history.awaits else Decision("go_on")
        if isinstance(event, NoMoreOrders):
            return Decision("end") if history.awaits else Decision("stop", grace_s=0.0)
        if isinstance(event, Order):
            self._jobs.next = event
            return Decision("restart", counted=False)
        if history.awaits:
            return Decision("end") if self._is_last else Decision("go_on")
        decision = decide(replace(history, max_restarts=0), event, membership)
        if decision.kind != "end":
            return decision
        last = history.attempts[-1].ended
        if self._is_last or last.stop_signal is not None or last.survivors:
            return decision  # the end of this process tells the tuner
        self._orders.end(decision.code)
        return Decision("finish", code=decision.code)


def _is_end(event: object) -> bool:
    """Whether no other experiment can follow this event."""
    if isinstance(event, SignalReceived):
        return event.action != "forward"
    return isinstance(event, NoMoreOrders) or (isinstance(event, Stopping) and event.reason == "guard_lost")


def _with_files(worker: WorkerPlan, order: Order) -> WorkerPlan:
    """The worker, writing its streams directly to the files of its experiment."""
    stderr = None if worker.stderr is None else Route(path=order.stderr)
    return replace(worker, stdout=Route(path=order.stdout), stderr=stderr, prefix="")


def _show_in(path: str, fd: int) -> None:
    """Redirect a descriptor of this process to a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    os.dup2(file, fd)
    os.close(file)


def main(read: Reader) -> int:
    """Follow the orders on stdin until there are no more. ``read`` makes the request of a command line."""
    orders_fd, answers_fd, own_fd = os.dup(0), os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    orders = OrderChannel(orders_fd, answers_fd)
    jobs = Jobs(this_machine(), orders, read)
    jobs.next = orders.first()
    if jobs.next is None:
        return 0
    try:
        return Session(jobs, lambda plan: Lane(jobs, orders, plan, own_fd)).run_guarded()
    except DslError as error:
        say("dsl", f"error: {error}")
        return error.exit_code
