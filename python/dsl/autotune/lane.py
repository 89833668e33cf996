"""Runs experiments one after another on the same slots of this host, as the tuner orders.

With ``--start-method forkserver`` the fork servers of the first experiment fork the workers of all, so that
the imports of a script run once. Each experiment is an attempt of one agent. The lane reads orders from
stdin, and writes answers to stdout: the messages of `dsl.autotune.experiment`, a line each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from dsl import ForkServerLost, ForkServerReady, SignalReceived, Stopping
from dsl._record import record, replace
from dsl.agent.planner import Planner
from dsl.agent.policy import decide
from dsl.agent.session import Crew, Hooks, Session
from dsl.autotune.experiment import Begun, ExperimentOver, Order, StopExperiment
from dsl.errors import DslError
from dsl.facts import Facts, this_machine
from dsl.machine.this_process import use_null
from dsl.model.codec import to_line
from dsl.model.lines import Lines
from dsl.model.node import NodePlan, Route, WorkerPlan
from dsl.model.outcome import (
    AttemptEnded,
    AttemptOutcome,
    AttemptStarted,
    Decision,
    History,
    Membership,
    Outcome,
)
from dsl.model.request import Request
from dsl.plan.job import plan_job
from dsl.report import speak
from dsl.report.narrator import Narrator

Reader: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], tuple[Request, Any]]
"""Makes the request of the words of a command line and an environment. Raises DslError."""

READ_BYTES = 65536


@record
class NoMoreOrders:
    """The tuner sends no more orders."""


class OrderChannel:
    """The orders of the tuner, and the answers to it: a channel of the agent."""

    def __init__(self, orders_fd: int, answers_fd: int) -> None:
        self._orders_fd = orders_fd
        self._answers_fd = answers_fd
        self._lines = Lines(Order, StopExperiment)
        self._unread: list[Order | StopExperiment] = []

    @property
    def deadline_s(self) -> float | None:
        """0 if `first` has left an order unread, else None."""
        return 0.0 if self._unread else None

    def fileno(self) -> int:
        """The descriptor of the orders."""
        return self._orders_fd

    def read(self) -> Sequence[Order | StopExperiment | NoMoreOrders]:
        """Return orders. Waits for them if none is there."""
        order = self.first()
        return (NoMoreOrders() if order is None else order,)

    def first(self) -> Order | StopExperiment | None:
        """Wait for an order, and return it; None if there is none."""
        while not self._unread:
            data = os.read(self._orders_fd, READ_BYTES)
            if not data:
                os.close(self._orders_fd)
                self._orders_fd = -1
                return None
            self._unread += self._lines.feed(data)
        return self._unread.pop(0)

    def answer(self, message: Begun | ExperimentOver) -> None:
        """Tell the tuner."""
        try:
            os.write(self._answers_fd, to_line(message))
        except OSError:
            return  # the tuner is gone

    def leave(self) -> None:
        """Close the descriptors here: another process serves the orders."""
        os.close(self._orders_fd)
        os.close(self._answers_fd)


class Lane(Hooks):
    """Plans the experiments, one attempt each, reports them, and decides what the agent does next."""

    max_restarts = 0

    def __init__(self, facts: Facts, orders: OrderChannel, order: Order, read: Reader) -> None:
        self._facts = facts
        self._orders = orders
        self._order = order
        """The current experiment, or the next one."""
        self._read = read
        self._planner: Planner | None = None
        self._narrator: Narrator | None = None
        self._imports = True
        """Whether the fork servers of the first experiment may still be importing."""
        self._is_last = False
        """Whether no other experiment will follow."""

    def plan(self, _attempt: int) -> NodePlan:
        """Plan the next experiment. Raises DslError."""
        order = self._order
        _show_in(order.stderr)
        speak.end_path = order.end
        self.finish(succeeded=False)
        request, _ = self._read(order.words, self._facts.environ)
        planned = plan_job(request, self._facts)
        self._planner = Planner(planned, self._facts)
        plan = self._planner.plan(0)
        workers = tuple([_with_files(worker, order) for worker in plan.workers])
        return replace(plan, workers=workers, notices=(*planned.notices, *plan.notices))

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make the directories that the plan needs. Raises DslError."""
        assert self._planner is not None
        plan = self._planner.prepare(plan)
        self._narrator = Narrator(plan)
        return plan

    def membership(self) -> Membership:
        """The node itself: no node joins or leaves."""
        return Membership(1)

    def finish(self, *, succeeded: bool) -> None:
        """Remove the files that were made for the last experiment."""
        if self._planner is not None:
            self._planner.finish(succeeded=succeeded)
            self._planner = None

    def stay(self) -> None:
        """Leave the orders and the files of experiments to the agent."""
        self._orders.leave()
        _show_in(os.devnull)

    def hear(self, event: object) -> None:
        """Report the events of an experiment in the experiment's own file."""
        assert self._narrator is not None
        if isinstance(event, AttemptStarted):
            for notice in event.plan.notices:
                self._narrator.note(notice)
            self._imports = self._imports and bool(event.plan.fork_servers)
            if not self._imports:
                self._orders.answer(Begun())
        elif isinstance(event, AttemptOutcome):
            self._narrator.hear(Outcome(event.code, (event,)))
        elif not isinstance(event, (AttemptEnded, Outcome)):
            self._narrator.hear(event)
            if isinstance(event, (ForkServerReady, ForkServerLost)) and self._imports:
                self._imports = False
                self._orders.answer(Begun())

    def decide(self, history: History, event: object, membership: Membership) -> Decision:
        """Decide what the agent does next: after an experiment it waits for the next one."""
        if history.gives_up:
            return Decision("end", code=1)
        self._is_last = self._is_last or _is_end(event)
        if isinstance(event, StopExperiment):
            return Decision("stop", grace_s=event.grace_s) if not history.awaits else Decision("go_on")
        if isinstance(event, NoMoreOrders):
            return Decision("end") if history.awaits else Decision("stop", grace_s=0.0)
        if isinstance(event, Order):
            self._order = event
            return Decision("restart", counted=False)
        if history.awaits:
            return Decision("end") if self._is_last else Decision("go_on")
        decision = decide(replace(history, max_restarts=0), event, membership)
        if decision.kind != "end":
            return decision
        last = history.attempts[-1].ended
        if self._is_last or last.stop_signal is not None or last.survivors:
            return decision  # the end of this process tells the tuner
        self._orders.answer(ExperimentOver(decision.code))
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


def _show_in(path: str) -> None:
    """Redirect our stderr to a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    os.dup2(file, 2)
    os.close(file)


def main(read: Reader) -> int:
    """Follow the orders on stdin until there are no more. ``read`` makes the request of a command line."""
    orders = OrderChannel(os.dup(0), os.dup(1))
    use_null(0, 1)
    order = orders.first()
    if not isinstance(order, Order):
        return 0
    lane = Lane(this_machine(), orders, order, read)
    crew = Crew([lane], [orders], lane.decide, hooks=lane, routine=True)  # to get `ForkServerReady`
    try:
        return Session(lane, lambda _: crew).run_guarded()
    except DslError as error:
        speak.say("dsl", f"error: {error}")
        return error.exit_code
