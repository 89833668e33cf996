"""Runs a job from its first plan to its outcome: starts attempts and does what is decided about them."""

from __future__ import annotations

import os
import time

from dsl import (
    Called,
    Ended,
    EngineError,
    Exited,
    ForkServerLost,
    LimitError,
    LogNotice,
    SignalReceived,
    Stopping,
    _own_process,
)
from dsl._record import replace
from dsl.agent.planner import launch_spec, with_few_pipes
from dsl.errors import DslError
from dsl.machine import wait_for
from dsl.model.job import Notice
from dsl.model.outcome import (
    GO_ON,
    SIGKILL,
    Asked,
    AttemptOutcome,
    AttemptStarted,
    Decision,
    EndHung,
    Hang,
    Outcome,
    OutputCut,
    RestartFailed,
    TimerExpired,
)
from dsl.model.request import NO_POLICY
from dsl.report.speak import complain, optional
from dsl.words import shortage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl import LaunchSpec, Supervisor
    from dsl.agent.elsewhere import Elsewhere
    from dsl.agent.roles import Channel, Decider, Listener, Source
    from dsl.agent.warm import WarmCalls
    from dsl.model.job import ForkServer, NodePlan
    from dsl.model.observation import RankStacks
    from dsl.view import FailureLook, Metrics, Watchers


LATE_MODULES = (
    "dsl.words",
    "dsl.model.observation",
    "dsl.model.judgement",
    "dsl.conductor",
    "dsl.conductor.judge",
    "dsl.conductor.restarts",
    "dsl.agent.alone",
    "dsl.evidence",
    "dsl.machine.kernel",
    "dsl.evidence.excerpt",
    "dsl.evidence.reports",
    "dsl.report.verdict",
    "dsl.report.failures",
)
"""Modules that only a failed attempt needs. The package may be gone from disk by then."""

SETTLE_S = 0.005
"""What only a job needs that lasts is made when its workers have run for this time: a Python that is executed
has not reached its script by then."""

START_S, LONGEST_START_S = 0.001, 0.25
"""Seconds that the start of a worker takes, and of a group at most: until then the workers need the CPUs."""


class Agent:
    """Runs the attempts of one node's part of a job, whose first is ``plan``.

    The constructor prepares everything that needs no supervisor: a command makes its agent before it forks,
    when nothing has to be copied yet. It raises MetricsError. The agent waits for ``channels`` together with
    the engine. ``decider`` says what follows from an event; None: this node is alone, and its conductor is
    made when there is something to decide. ``stdin_is_terminal``: the worker that reads our stdin gets a
    terminal. ``routine``: listeners also hear of starts and clean exits, at once.
    ``command_pid``: the pid by which the user knows the job; views into it call at a socket with this name.
    0: they call elsewhere. ``elsewhere``: what they see of other hosts. ``records``: a listener records the
    job: as ``routine``, and listeners hear of the first output of each worker. ``warm_calls``: connections
    with warm servers, made before the command became guard and agent; None: the agent calls. ``lasts``: views
    can look at the job as soon as listeners hear that it has started.
    """

    def __init__(
        self,
        source: Source,
        plan: NodePlan,
        listeners: Sequence[Listener],
        channels: Sequence[Channel] = (),
        *,
        decider: Decider | None = None,
        stdin_is_terminal: bool = False,
        routine: bool = False,
        command_pid: int = 0,
        elsewhere: Elsewhere | None = None,
        records: bool = False,
        warm_calls: WarmCalls | None = None,
        lasts: bool = False,
    ) -> None:
        self._source = source
        self._lasts = lasts
        self._records = records
        self._command_pid = command_pid
        self._elsewhere = elsewhere
        self._watchers: Watchers | None = None
        """What watches the workers; None: the job has not lasted so far, and nobody has asked about it."""
        self._look: FailureLook | None = None
        """The look at the workers of this attempt after a failure; None: there was none."""
        self._stop: Decision | None = None
        """What follows when the look is over; None: nothing."""
        self._has_lost_output = False
        self._is_settled = False
        """Whether what only a job needs that lasts is made."""
        self._decider = decider
        self._routine = routine or records
        self._metrics: Metrics | None = None
        if plan.job.metrics is not None and command_pid:
            from dsl.view import Metrics

            has_own = elsewhere is None or elsewhere.has_own()
            self._metrics = Metrics(plan.job.metrics, plan.command, counts_exits=has_own)
            listeners = (*listeners, self._metrics)
        self._listeners = listeners
        self._channels = channels
        self._stdin_is_terminal = stdin_is_terminal
        self._last: AttemptOutcome | None = None
        """The last attempt that has ended."""
        self._count = 0
        """How many attempts have ended."""
        self._news: list[object] = []
        """Since the last start, in order: signals, the loss of the guard, events of channels but timers."""
        self._queue: list[tuple[object, bool]] = []
        """Events that are still to be handled, the next one last, each with whether it is news."""
        self._fork_servers: list[tuple[ForkServer, Sequence[int]]] = []
        """Started fork servers, each with its numbers in the engine."""
        self._warm_calls = warm_calls
        self._supervisor: Supervisor
        """That of the job, from `run` on."""
        self._prepare(plan)

    def run(self, supervisor: Supervisor) -> Outcome:
        """Run the job to its end, and wait until its output is written or a signal ends the wait.

        Raises what `dsl.Supervisor.start` raises for the first attempt, before anything is started.
        """
        self._supervisor = supervisor
        outcome = self._run()
        # The verdict comes after the workers' words if both go to the same place.
        early, _ = supervisor.flush(2)
        self._tell(outcome)
        late, signum = supervisor.flush()
        if early or late:
            self._tell(OutputCut(early + late, signum))
            if outcome.code == 0:
                outcome = replace(outcome, code=1 if signum is None else 128 + signum, lost_output=True)
        if self._watchers is not None:
            optional(self.plan.command, "a view is not closed", self._watchers.end)
        if (metrics := self._metrics) is not None:
            optional(self.plan.command, "the last metrics are missing", lambda: metrics.end(outcome))
        return outcome

    def _prepare(self, plan: NodePlan) -> None:
        self.plan = plan
        """That of the present attempt."""
        self._spec = self._spec_of(plan)

    def _spec_of(self, plan: NodePlan, fork_servers: Sequence[Sequence[int]] = ()) -> LaunchSpec:
        return launch_spec(
            plan,
            stdin_is_terminal=self._stdin_is_terminal,
            fork_servers=fork_servers,
            tells_first_output=self._records or plan.job.policy != NO_POLICY,
        )

    def _run(self) -> Outcome:
        self._started_ns = time.time_ns()
        self._start()
        while True:
            decision = self._attend()
            if decision.kind == "go_on":
                self._settle()
                decision = self._linger(decision)
            if decision.kind == "end":
                error = DslError(decision.why) if decision.why else None
                if error is not None:
                    self._tell(RestartFailed(error))
                return self._outcome(decision, error)
            try:
                self._prepare(self._source.prepare(self._source.plan(decision.attempt)))
                self._news = []
                self._tell(decision.told)
                self._start()
            except (DslError, EngineError) as error:
                return self._give_up(error)
            except Exception as error:  # noqa: BLE001  whatever it is, the last attempt has ended as it did
                why = shortage(error) or f"internal error: {type(error).__name__}: {error}"
                return self._give_up(DslError(why))

    def _settle(self) -> None:
        """Make what only a job needs that lasts: files in memory, a socket for views, watchers."""
        if self._is_settled:
            return
        self._is_settled = True
        _own_process.keep(LATE_MODULES)
        if self._command_pid:
            channels = optional(
                self.plan.command,
                "nobody can look at this job",
                lambda: self._watching().begin(self.plan, self._metrics),
            )
            self._channels = (*self._channels, *(channels or ()))

    def _end_hung(self, hung: EndHung) -> None:
        """End those of our workers that hang: their failure is followed as any other."""
        workers = self.plan.workers if hung.attempt == self.plan.meeting.attempt else ()
        for index, worker in enumerate(workers):
            if worker.rank in hung.ranks:
                self._supervisor.signal(SIGKILL, index)

    def _watching(self) -> Watchers:
        if self._watchers is None:
            from dsl.view import Watchers

            def state() -> tuple[NodePlan, int, float]:
                return self.plan, self._started_ns, self._begin_s

            self._watchers = Watchers(self._supervisor, state, self._command_pid, self._elsewhere)
        return self._watchers

    def _outcome(self, decision: Decision, error: DslError | EngineError | None) -> Outcome:
        assert self._last is not None
        is_lost = self._has_lost_output and not decision.code
        code = decision.code or int(is_lost)
        if decision.not_tried:
            self._last = replace(self._last, not_tried=decision.not_tried)
        return Outcome(code, self._last, error, self._count, is_lost)

    def _give_up(self, error: DslError | EngineError) -> Outcome:
        """End the job as its last attempt ended: no other attempt can begin."""
        event = RestartFailed(error)
        decision = self._decide(event, self._last)
        self._tell(event)
        return self._outcome(self._linger(decision), error)

    def _decide(self, event: object, last: AttemptOutcome | None = None) -> Decision:
        """What follows from an event. ``last``: the last attempt, if no worker runs."""
        if self._decider is None:
            # There is nothing to decide if all workers have ended well, or may not start again.
            has_failed = last is not None and last.cause is not None
            if not (isinstance(event, Hang) or (has_failed and self.plan.job.max_restarts)):
                return GO_ON if last is None else Decision("end", code=last.final_code)
            from dsl.agent.alone import Alone

            self._decider = decider = Alone(self.plan.job)
            self._channels = (*self._channels, decider)
        return self._decider.decide(event, last)

    def _start(self) -> None:
        plan, supervisor = self.plan, self._supervisor
        numbers: Sequence[Sequence[int]] = ()
        if plan.fork_servers:
            numbers = [self._serve(server) for server in plan.fork_servers]
            self._spec = self._spec_of(plan, numbers)
        # Other nodes may ask about them at once.
        self._begin_s, self._spoke_ns, self._stopped_ns = time.monotonic(), 0, 0
        # Before the start, so that the engine knows whether it has to wake us for each worker.
        self._take_in(0.0)
        if self._lasts or plan.job.hang_timeout_s is not None or self._metrics is not None:
            self._settle()  # now there is a thread to be had
        try:
            supervisor.start(self._spec)
        except LimitError as error:
            supervisor.start(self._spec_of(with_few_pipes(plan), numbers))
            self._spoke_ns = 1  # nobody can know
            text = f"{error}; until then they write straight to the console, untagged"
            self._tell(Notice("warning", text))
        self._tell(AttemptStarted(self.plan))
        if not self._is_settled:
            start_s = min(START_S * len(plan.workers), LONGEST_START_S)
            self._take_in(0.0 if plan.fork_servers else max(SETTLE_S, start_s))
            if not any(isinstance(event, Ended) for event, _ in self._queue):
                self._settle()

    def _serve(self, server: ForkServer) -> Sequence[int]:
        """The number of a fork server, which is started unless it is warm or an earlier attempt had it.

        A warm server has one for each branch.
        """
        for known, numbers in self._fork_servers:
            if known == server:
                return numbers
        called = None
        if server.warm is not None:
            from dsl.agent.warm import call

            take = call if self._warm_calls is None else self._warm_calls.take
            called = take(server, len(self.plan.workers))
        if called is not None:
            numbers = [self._supervisor.join_fork_server(fd, called.is_ready) for fd in called.fds]
        else:
            from dsl.forkserver.boot import words_of

            number = self._supervisor.start_fork_server(words_of(server), env=server.env, cpus=server.cpus)
            numbers = [number]
        self._fork_servers.append((server, numbers))
        return numbers

    def _attend(self) -> Decision:
        """Handle events until the group has ended, and return what follows."""
        plan, begin_s = self.plan, self._begin_s
        kept: list[Exited | TimerExpired | ForkServerLost] = []
        is_stopping = False
        while True:
            event = self._next()
            if isinstance(event, (Exited, TimerExpired, ForkServerLost)):
                kept.append(event)
            elif isinstance(event, LogNotice):
                self._has_lost_output |= event.kind == "file_failed"
                if event.kind == "first_output" and (not is_stopping or event.worker == _failed_first(kept)):
                    self._spoke_ns = self._spoke_ns or time.time_ns()
            elif isinstance(event, Stopping):
                is_stopping = True
            elif isinstance(event, Ended):
                outcome = AttemptOutcome(
                    plan,
                    tuple([one.exit for one in kept if isinstance(one, Exited)]),
                    event,
                    begin_s,
                    time.monotonic() - begin_s,
                    timers=tuple([one for one in kept if isinstance(one, TimerExpired)]),
                    lost_servers=tuple([one for one in kept if isinstance(one, ForkServerLost)]),
                    news=tuple(self._news),
                    stacks=self._end_look(),
                    spoke_ns=self._spoke_ns,
                    stopped_ns=self._stopped_ns,
                )
                last = self._note(outcome)
            elif isinstance(event, EndHung):
                self._end_hung(event)
            elif event is self._look and self._stop is not None:
                self._carry_out(self._stop)
            self._tell(event)
            if isinstance(event, Ended):
                self._tell(last)
                return self._decide(last, last)
            decision = self._decide(event)
            if plan.job.stacks_on_failure and _stops_others(event, decision) and self._begin_look():
                self._stop = Decision("stop") if decision.kind == "go_on" else decision
                continue
            self._carry_out(decision)

    def _begin_look(self) -> bool:
        """Whether the workers are stopped when a look at them is over, because a worker has failed."""
        if self._look is None:

            def look() -> FailureLook:
                from dsl.view import FailureLook

                return FailureLook(self.plan, self._supervisor.pids())

            what = "what the other workers did is unknown"
            self._look = optional(self.plan.command, what, look, lambda _: self._supervisor.stop())
        return self._look is not None and self._look.is_going_on

    def _end_look(self) -> tuple[RankStacks, ...]:
        """Forget the look of an attempt that has ended, but for what it has found."""
        look, self._look, self._stop = self._look, None, None
        if look is None:
            return ()
        look.close()
        return look.stacks

    def _linger(self, decision: Decision) -> Decision:
        """Wait, while no worker runs, until the job goes on or ends."""
        while decision.kind == "go_on":
            self._tell(decision.told)
            event = self._next()
            self._tell(event)
            decision = self._decide(event, self._last)
        return decision

    def _next(self) -> object:
        """The next event. Later events stay queued for the next call."""
        while not self._queue:
            self._take_in()
        event, is_news = self._queue.pop()
        if is_news:
            self._news.append(event)
        return event

    def _take_in(self, within_s: float | None = None) -> None:
        """Wait at most ``within_s`` for events, and queue them, marked if they matter to later decisions."""
        told, happened = self._wait(within_s)
        later = []
        for event in told:
            if isinstance(event, Asked):
                self._show(event)
            else:
                later.append((event, not isinstance(event, TimerExpired)))
        for event in happened:
            if isinstance(event, Called) or (isinstance(event, SignalReceived) and event.action == "explain"):
                self._show(event)
            else:
                later.append((event, _is_news(event)))
        self._queue[:0] = reversed(later)

    def _show(self, event: Asked | Called | SignalReceived) -> None:
        """Serve somebody who looks at the job, or turn him away."""

        def turn_away(_why: str) -> None:
            try:
                callers = self._supervisor.callers()
            except EngineError:
                return  # they cannot be taken
            for fd in callers:
                os.close(fd)

        what = "somebody who looks at this job gets no answer"
        optional(self.plan.command, what, lambda: self._watching().serve(event), turn_away)

    def _carry_out(self, decision: Decision) -> None:
        """Apply a decision to a running group. What follows is decided when the group has ended."""
        if decision.kind == "signal":
            self._supervisor.signal(decision.signum)
        elif decision.kind == "stop":
            self._stopped_ns = self._stopped_ns or (time.time_ns() if decision.why else 0)
            self._supervisor.stop(signum=decision.signum, grace_s=decision.grace_s)

    def _wait(self, within_s: float | None) -> tuple[Sequence[object], Sequence[object]]:
        """The events of the channels, and those of the engine."""
        supervisor, channels = self._supervisor, self._channels
        if self._look is not None and self._look.is_going_on:
            channels = (*channels, self._look)
        now_s = time.monotonic()
        due = [channel.deadline_s for channel in channels]
        left = [within_s, *[None if due_s is None else max(due_s - now_s, 0.0) for due_s in due]]
        left_s = min([one for one in left if one is not None], default=None)
        fds = [fd for channel in channels if (fd := channel.fileno()) >= 0]
        ready = wait_for(supervisor.fileno(), *fds, left_s=left_s) if fds else set()
        happened = () if fds else supervisor.wait(left_s, routine=self._routine)
        if not channels:
            return (), happened
        now_s = time.monotonic()
        events = [
            event
            for channel in channels
            if channel.fileno() in ready or ((due_s := channel.deadline_s) is not None and due_s <= now_s)
            for event in channel.read()
        ]
        return events, happened or supervisor.wait(0, routine=self._routine)

    def _note(self, attempt: AttemptOutcome) -> AttemptOutcome:
        """Note that an attempt has ended. Returns it with what is known about its failures."""
        ended = attempt.ended
        # Only the caller knows what it has added to an open group.
        cause = None if attempt.plan.group.stays_open else ended.first_failure
        attempt = replace(attempt, cause=cause)
        has_ended_well = cause is None and ended.stop_signal is None and not ended.survivors
        if not has_ended_well or attempt.stopped_ns or attempt.fatal_hang is not None:
            what = "the evidence of the failure is missing"
            attempt = optional(attempt.plan.command, what, lambda: _with_report(attempt)) or attempt
        if any(one.signal is not None for one in attempt.exits):
            optional(attempt.plan.command, "shared memory may be left", lambda: self._clear_up(attempt))
        self._count += 1
        self._last = attempt
        return attempt

    def _clear_up(self, attempt: AttemptOutcome) -> None:
        if any(exit_.signal is not None for exit_ in attempt.exits):  # else its imports are for nothing
            from dsl.evidence.reports import clear_segments

            for line in clear_segments(attempt.exits):
                self._tell(Notice("warning", line))

    def _tell(self, event: object) -> None:
        """Let the listeners hear an event; None: there is none."""
        for listener in () if event is None else self._listeners:
            try:
                listener.hear(event)
            except Exception as error:  # noqa: BLE001  what listeners do never changes what the agent does
                complain(self.plan.command, error, "a line about the job, or a record of it, is missing")


def _with_report(attempt: AttemptOutcome) -> AttemptOutcome:
    from dsl.evidence.reports import with_report

    return with_report(attempt)


def _failed_first(events: Sequence[object]) -> int | None:
    """The worker whose failure has stopped the others, as far as these events tell."""
    exits = [one.exit for one in events if isinstance(one, Exited)]
    return next((one.worker for one in exits if one.status and not one.caused_by_stop), None)


def _is_news(event: object) -> bool:
    """Whether an event of the engine also matters to the decision after the group's end."""
    return isinstance(event, SignalReceived) or (isinstance(event, Stopping) and event.reason == "guard_lost")


def _stops_others(event: object, decision: Decision) -> bool:
    """Whether the workers are to be stopped because one has failed, here or on another node."""
    if isinstance(event, Exited):
        return event.exit.status != 0 and not event.exit.caused_by_stop and decision.kind == "go_on"
    return decision.kind == "stop" and bool(decision.why)
