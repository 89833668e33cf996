"""Carries a job from its first plan to its outcome: starts attempts and does what policy decides."""

from __future__ import annotations

import time

from dsl import Ended, Exited
from dsl._record import replace
from dsl.agent.policy import decide
from dsl.errors import DslError
from dsl.model.outcome import (
    AttemptEnded,
    AttemptOutcome,
    AttemptStarted,
    History,
    Outcome,
    RestartFailed,
)
from dsl.spec import launch_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from dsl import Event, Exit, Supervisor
    from dsl.model.node import NodePlan
    from dsl.model.outcome import Decision, Membership

    class Listener(Protocol):
        """Whoever wants to know what happens. It must not raise."""

        def hear(self, event: object) -> None:
            """Take note of an event: one of the engine's, or one of `dsl.model.outcome`."""

    class Source(Protocol):
        """Where the plans of a job come from: a node, a head, an experiment."""

        max_restarts: int

        def plan(self, attempt: int) -> NodePlan:
            """Decide what is started in an attempt, counted from 0. Raises DslError."""

        def prepare(self, plan: NodePlan) -> None:
            """Make what the plan needs, such as directories. Raises DslError."""

        def membership(self) -> Membership:
            """Say who takes part."""

    class Channel(Protocol):
        """Another source of events than the engine: a store, another node."""

        def fileno(self) -> int:
            """Give a descriptor that is readable when there are events."""

        def read(self) -> Sequence[object]:
            """Take the events that are there, without waiting."""


SILENCE_S = 1.0
"""A group that runs says at once that it is being stopped; after this long, none does."""


class Agent:
    """Runs the attempts of one node's part of a job.

    ``listen`` makes the listeners; it is called while the first workers start, so that they may import what
    they need then. ``channels`` are waited for together with the engine.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        source: Source,
        listen: Callable[[], Sequence[Listener]],
        channels: Sequence[Channel] = (),
    ) -> None:
        self._supervisor = supervisor
        self._source = source
        self._listen = listen
        self._channels = channels
        self._listeners: Sequence[Listener] | None = None
        self._history = History(source.max_restarts)

    def run(self, plan: NodePlan, *, stdin_is_terminal: bool = False) -> Outcome:
        """Run the job, whose first attempt is ``plan``, to its end.

        ``stdin_is_terminal``: the worker that reads our stdin gets a terminal. Raises what
        `dsl.Supervisor.start` raises, before anything is started.
        """
        outcome = self._run(plan, stdin_is_terminal=stdin_is_terminal)
        self._tell(outcome)
        return outcome

    def stop(self, signum: int, grace_s: float) -> None:
        """Stop the workers from outside `run`, and wait until nothing of them is left."""
        self._supervisor.stop(signum=signum, grace_s=grace_s)
        deadline_s = time.monotonic() + grace_s + SILENCE_S
        events = self._supervisor.wait(SILENCE_S)
        while events and not any(isinstance(event, Ended) for event in events):
            events = self._supervisor.wait(max(0.0, deadline_s - time.monotonic()))

    def _run(self, plan: NodePlan, *, stdin_is_terminal: bool) -> Outcome:
        while True:
            decision = self._attempt(plan, stdin_is_terminal=stdin_is_terminal)
            history = self._history
            if decision.kind != "restart":
                self._tell(AttemptEnded(history, decision))
                return Outcome(decision.code, history.attempts)
            try:
                plan = self._source.plan(len(history.attempts))
                self._source.prepare(plan)
            except DslError as error:
                return self._give_up(error)
            self._history = replace(history, restarts=history.restarts + decision.counted, regroups=False)
            self._tell(AttemptEnded(self._history, decision))

    def _give_up(self, error: DslError) -> Outcome:
        """The job ends as its last attempt did: no other one can be begun."""
        self._history = history = replace(self._history, max_restarts=0, regroups=False)
        decision = decide(history, history.attempts[-1].ended, self._source.membership())
        self._tell(RestartFailed(error))
        self._tell(AttemptEnded(history, decision))
        return Outcome(decision.code, history.attempts, error)

    def _attempt(self, plan: NodePlan, *, stdin_is_terminal: bool) -> Decision:
        """Start the workers, wait until nothing of them is left, and say what follows."""
        begin_s = time.monotonic()
        spec = launch_spec(plan, stdin_is_terminal=stdin_is_terminal)
        self._supervisor.start(spec)
        if self._listeners is None:
            self._listeners = self._listen()
        self._tell(AttemptStarted(plan))
        exits: list[Exit] = []
        while True:
            for event in self._wait():
                if isinstance(event, Exited):
                    exits.append(event.exit)
                elif isinstance(event, Ended):
                    duration_s = time.monotonic() - begin_s
                    self._note(AttemptOutcome(plan, tuple(exits), event, begin_s, duration_s))
                self._tell(event)
                decision = decide(self._history, event, self._source.membership())
                if isinstance(event, Ended):
                    return decision
                self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        """Do to a running group what was decided; what follows is decided when it has ended."""
        if decision.kind == "restart":
            self._history = replace(self._history, regroups=True)
        if decision.kind in ("restart", "stop"):
            self._supervisor.stop()

    def _wait(self) -> Sequence[Event | object]:
        if not self._channels:
            return self._supervisor.wait(routine=False)
        import select

        poller = select.poll()
        for fd in (self._supervisor.fileno(), *[one.fileno() for one in self._channels]):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        events = [event for one in self._channels if one.fileno() in ready for event in one.read()]
        return [*events, *self._supervisor.wait(0)]

    def _note(self, attempt: AttemptOutcome) -> None:
        """Add an attempt that has ended to the history, with what is known of its failures."""
        cause = attempt.ended.first_failure
        if cause is not None and attempt.plan.workers[0].error_file is not None:
            from dsl.report.failures import collect, root_cause

            failures = tuple(collect(attempt.plan, attempt.exits))
            if failures:
                order = root_cause(failures).order
                cause = next(exit_ for exit_ in attempt.exits if exit_.order == order)
            attempt = replace(attempt, failures=failures)
        attempt = replace(attempt, cause=cause)
        self._history = replace(self._history, attempts=(*self._history.attempts, attempt))

    def _tell(self, event: object) -> None:
        for listener in self._listeners or ():
            listener.hear(event)
