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
from dsl.report.speak import complain, optional
from dsl.signals import shortage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl import Exit, LaunchSpec, Supervisor
    from dsl.agent.elsewhere import Elsewhere
    from dsl.agent.roles import Channel, Decider, Listener, Source
    from dsl.agent.warm import WarmCalls
    from dsl.model.job import ForkServer, NodePlan
    from dsl.model.observation import RankStacks
    from dsl.view import FailureLook, Metrics, Watchers


LATE_MODULES = (
    "dsl.printable",
    "dsl.model.observation",
    "dsl.model.judgement",
    "dsl.conductor",
    "dsl.conductor.judge",
    "dsl.evidence",
    "dsl.machine.kernel_files",
    "dsl.machine.cgroups",
    "dsl.evidence.segments",
    "dsl.evidence.excerpt",
    "dsl.evidence.error_files",
    "dsl.evidence.reports",
    "dsl.report.verdict",
    "dsl.report.summary",
    "dsl.model.progress",
)
"""Modules that only a failed attempt needs. The package may be gone from disk by then."""

LONGEST_POLL_MS = (1 << 31) - 1

SETTLE_S = 0.005
"""What only a job needs that lasts is made when its workers have run for this time: a Python that is executed
has not reached its script by then."""


class Agent:
    """Runs the attempts of one node's part of a job, whose first is ``plan``.

    The constructor prepares everything that needs no supervisor: a command makes its agent before it forks,
    when nothing has to be copied yet. It raises MetricsError. The agent waits for ``channels`` together with
    the engine. ``decider`` says what follows from an event; None: this node is alone, and its conductor is
    made when there is something to decide. ``stdin_is_terminal``: the worker that reads our stdin gets a
    terminal. ``routine``: listeners also hear of starts and clean exits, at once.
    ``command_pid``: the pid by which the user knows the job; views into it call at a socket with this name.
    0: they call elsewhere. ``elsewhere``: what they see of other hosts. ``records``: a listener records the
    job: as ``routine``, and listeners hear of the first output of each worker.
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
    ) -> None:
        self._source = source
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
        if plan.metrics is not None and command_pid:
            from dsl.view import Metrics

            has_own = elsewhere is None or elsewhere.has_own
            self._metrics = Metrics(plan.metrics, plan.command, counts_exits=has_own)
            listeners = (*listeners, self._metrics)
        self._listeners = listeners
        self._channels = channels
        self._stdin_is_terminal = stdin_is_terminal
        self._last: AttemptOutcome | None = None
        """The last attempt that has ended."""
        self._count = 0
        """How many attempts have ended."""
        self._restarts = 0
        """How many restarts were counted."""
        self._news: list[object] = []
        """Since the last start, in order: signals, the loss of the guard, events of channels but timers."""
        self._queue: list[tuple[object, bool]] = []
        self._fork_servers: list[tuple[ForkServer, int]] = []
        """Started fork servers, each with its number in the engine."""
        self.warm_calls: WarmCalls | None = None
        """Warm servers that were called before the command became guard and agent; None: the agent calls."""
        self._prepare(plan)

    def run(self, supervisor: Supervisor) -> Outcome:
        """Run the job to its end, and wait until its output is written or a signal ends the wait.

        Raises what `dsl.Supervisor.start` raises for the first attempt, before anything is started.
        """
        outcome = self._run(supervisor)
        # The verdict comes after the workers' words if both go to the same place.
        early, _ = supervisor.flush(2)
        self._tell(outcome)
        late, signum = supervisor.flush()
        if early or late:
            self._tell(OutputCut(early + late, signum))
            if outcome.code == 0:
                outcome = replace(outcome, code=1 if signum is None else 128 + signum, lost_output=True)
        if self._watchers is not None:
            optional(self._plan.command, "a view is not closed", self._watchers.end)
        if (metrics := self._metrics) is not None:
            optional(self._plan.command, "the last metrics are missing", lambda: metrics.end(outcome))
        return outcome

    def _prepare(self, plan: NodePlan) -> None:
        self._plan = plan
        self._spec = self._spec_of(plan)

    def _spec_of(self, plan: NodePlan, fork_servers: Sequence[int] = ()) -> LaunchSpec:
        return launch_spec(
            plan,
            stdin_is_terminal=self._stdin_is_terminal,
            fork_servers=fork_servers,
            tells_first_output=self._records,
        )

    def _run(self, supervisor: Supervisor) -> Outcome:
        self._started_ns = time.time_ns()
        self._start(supervisor)
        while True:
            decision = self._attend(supervisor)
            if decision.kind == "go_on":
                self._settle(supervisor)
                decision = self._linger(decision, supervisor)
            if decision.kind == "end":
                return self._end(decision)
            try:
                self._prepare(self._source.prepare(self._source.plan(decision.attempt)))
                self._restarts = decision.restarts
                self._news = []
                self._tell_of(decision)
                self._start(supervisor)
            except (DslError, EngineError) as error:
                return self._give_up(error, supervisor)
            except Exception as error:  # noqa: BLE001  whatever it is, the last attempt has ended as it did
                why = shortage(error) or f"internal error: {type(error).__name__}: {error}"
                return self._give_up(DslError(why), supervisor)

    def _settle(self, supervisor: Supervisor) -> None:
        """Make what only a job needs that lasts: files in memory, a socket for views, watchers."""
        if self._is_settled:
            return
        self._is_settled = True
        _own_process.keep(LATE_MODULES)
        job = self._source.job
        if self._decider is None and job is not None and (job.max_restarts or job.hang_timeout_s is not None):
            import dsl.agent.alone  # noqa: F401  while the workers run: what decides when one has failed
        if self._command_pid:
            channels = optional(
                self._plan.command,
                "nobody can look at this job",
                lambda: self._watchers_of(supervisor).begin(self._plan, self._metrics),
            )
            self._channels = (*self._channels, *(channels or ()))

    def _end_hung(self, hung: EndHung, supervisor: Supervisor) -> None:
        """End those of our workers that hang: their failure is followed as any other."""
        workers = self._plan.workers if hung.attempt == self._plan.attempt else ()
        for index, worker in enumerate(workers):
            if worker.rank in hung.ranks:
                supervisor.signal(SIGKILL, index)

    def _watchers_of(self, supervisor: Supervisor) -> Watchers:
        if self._watchers is None:
            from dsl.view import Watchers

            def state() -> tuple[NodePlan, int, int, float]:
                return self._plan, self._restarts, self._started_ns, self._begin_s

            self._watchers = Watchers(supervisor, state, self._command_pid, self._elsewhere)
        return self._watchers

    def _end(self, decision: Decision) -> Outcome:
        error = DslError(decision.why) if decision.why else None
        if error is not None:
            self._tell(RestartFailed(error))
        return self._outcome(decision, error)

    def _outcome(self, decision: Decision, error: DslError | EngineError | None) -> Outcome:
        assert self._last is not None
        is_lost = self._has_lost_output and not decision.code
        code = decision.code or int(is_lost)
        return Outcome(code, self._last, error, self._count, is_lost)

    def _give_up(self, error: DslError | EngineError, supervisor: Supervisor) -> Outcome:
        """End the job as its last attempt ended: no other attempt can begin."""
        event = RestartFailed(error)
        decision = self._decide(event, self._last)
        self._tell(event)
        if decision.kind == "go_on":
            decision = self._linger(decision, supervisor)
        return self._outcome(decision, error)

    def _decide(self, event: object, last: AttemptOutcome | None = None) -> Decision:
        """What follows from an event. ``last``: the last attempt, if no worker runs."""
        if self._decider is None:
            job = self._source.job
            # There is nothing to decide if all workers have ended well, or may not start again.
            has_failed = last is not None and last.cause is not None
            if job is None or not (isinstance(event, Hang) or (has_failed and job.max_restarts)):
                return GO_ON if last is None else Decision("end", code=last.final_code)
            from dsl.agent.alone import Alone

            self._decider = decider = Alone(job, self._plan, self._begin_s)
            self._channels, self._listeners = (*self._channels, decider), (*self._listeners, decider)
            for one in self._news:
                decider.hear(one)
            if last is not None:
                decider.hear(last)
        return self._decider.decide(event, last)

    def _start(self, supervisor: Supervisor) -> None:
        plan = self._plan
        numbers: Sequence[int] = ()
        if plan.fork_servers:
            numbers = [self._serve(one, supervisor) for one in plan.fork_servers]
            self._spec = self._spec_of(plan, numbers)
        # Before the start, so that the engine knows whether it has to wake us for each worker.
        self._take_in(supervisor, *self._wait(supervisor, 0.0))
        self._begin_s = time.monotonic()
        if plan.hang_timeout_s is not None or self._metrics is not None:
            self._settle(supervisor)  # now there is a thread to be had
        try:
            supervisor.start(self._spec)
        except LimitError as error:
            supervisor.start(self._spec_of(with_few_pipes(plan), numbers))
            text = f"{error}; until then they write straight to the console, untagged"
            self._tell(Notice("warning", text))
        self._tell(AttemptStarted(self._plan))
        if not self._is_settled:
            self._take_in(supervisor, *self._wait(supervisor, 0.0 if plan.fork_servers else SETTLE_S))
            if not any(isinstance(event, Ended) for event, _ in self._queue):
                self._settle(supervisor)

    def _serve(self, server: ForkServer, supervisor: Supervisor) -> int:
        """The number of a fork server. Starts it, unless an earlier attempt had the same one."""
        for known, number in self._fork_servers:
            if known == server:
                return number
        joined = self._join_warm(server, supervisor)
        number = self._execute(server, supervisor) if joined is None else joined
        self._fork_servers.append((server, number))
        return number

    def _join_warm(self, server: ForkServer, supervisor: Supervisor) -> int | None:
        """The number of the branch that a warm server makes for this job; None if none is called."""
        if server.warm is None:
            return None
        if self.warm_calls is None:
            from dsl.agent.warm import call

            found = call(server)
        else:
            found = self.warm_calls.take(server)
        return None if found is None else supervisor.join_fork_server(found.fd, found.is_ready)

    def _execute(self, server: ForkServer, supervisor: Supervisor) -> int:
        from dsl.forkserver.boot import words_of

        return supervisor.start_fork_server(words_of(server), env=server.env, cpus=server.cpus)

    def _attend(self, supervisor: Supervisor) -> Decision:
        """Handle events until the group has ended, and return what follows."""
        plan, begin_s = self._plan, self._begin_s
        exits: list[Exit] = []
        timers: list[TimerExpired] = []
        servers: list[ForkServerLost] = []
        while True:
            event = self._next(supervisor)
            if isinstance(event, Exited):
                exits.append(event.exit)
            elif isinstance(event, TimerExpired):
                timers.append(event)
            elif isinstance(event, ForkServerLost):
                servers.append(event)
            elif isinstance(event, LogNotice):
                self._has_lost_output |= event.kind == "file_failed"
            elif isinstance(event, Ended):
                duration_s = time.monotonic() - begin_s
                outcome = AttemptOutcome(plan, tuple(exits), event, begin_s, duration_s)
                outcome = replace(outcome, timers=tuple(timers), lost_servers=tuple(servers))
                last = self._note(replace(outcome, news=tuple(self._news), stacks=self._end_look()))
            elif isinstance(event, EndHung):
                self._end_hung(event, supervisor)
            elif event is self._look and self._stop is not None:
                self._carry_out(self._stop, supervisor)
            self._tell(event)
            if isinstance(event, Ended):
                self._tell(last)
                return self._decide(last, last)
            decision = self._decide(event)
            if _stops_others(event, decision) and plan.stacks_on_failure and self._begin_look(supervisor):
                self._stop = Decision("stop") if decision.kind == "go_on" else decision
                continue
            self._carry_out(decision, supervisor)

    def _begin_look(self, supervisor: Supervisor) -> bool:
        """Whether the workers are stopped when a look at them is over, because a worker has failed."""
        if self._look is None:

            def look() -> FailureLook:
                from dsl.view import FailureLook

                return FailureLook(self._plan, supervisor.pids())

            what = "what the other workers did is unknown"
            self._look = optional(self._plan.command, what, look, lambda _: supervisor.stop())
        return self._look is not None and self._look.is_going_on

    def _end_look(self) -> tuple[RankStacks, ...]:
        """Forget the look of an attempt that has ended, but for what it has found."""
        look, self._look, self._stop = self._look, None, None
        if look is None:
            return ()
        look.close()
        return look.stacks

    def _linger(self, decision: Decision, supervisor: Supervisor) -> Decision:
        """Wait, while no worker runs, until the job goes on or ends."""
        while decision.kind == "go_on":
            self._tell_of(decision)
            event = self._next(supervisor)
            self._tell(event)
            decision = self._decide(event, self._last)
        return decision

    def _tell_of(self, decision: Decision) -> None:
        if decision.told is not None:
            self._tell(decision.told)

    def _next(self, supervisor: Supervisor) -> object:
        """The next event. Later events stay queued for the next call."""
        while not self._queue:
            self._take_in(supervisor, *self._wait(supervisor))
        event, is_news = self._queue.pop(0)
        if is_news:
            self._news.append(event)
        return event

    def _take_in(self, supervisor: Supervisor, told: Sequence[object], happened: Sequence[object]) -> None:
        """Queue events of the channels and of the engine, and mark those that matter to later decisions."""
        for event in told:
            if isinstance(event, Asked):
                self._show(supervisor, event)
            else:
                self._queue.append((event, not isinstance(event, TimerExpired)))
        for event in happened:
            if isinstance(event, Called) or (isinstance(event, SignalReceived) and event.action == "explain"):
                self._show(supervisor, event)
            else:
                self._queue.append((event, _is_news(event)))

    def _show(self, supervisor: Supervisor, event: Asked | Called | SignalReceived) -> None:
        """Serve somebody who looks at the job, or turn him away."""

        def serve() -> None:
            views = self._watchers_of(supervisor).views
            if isinstance(event, Asked):
                views.answer(event.look, event.reply)
            elif isinstance(event, Called):
                views.welcome()
            else:
                views.explain()

        def turn_away(_why: str) -> None:
            try:
                callers = supervisor.callers()
            except EngineError:
                return  # they cannot be taken
            for fd in callers:
                os.close(fd)

        optional(self._plan.command, "somebody who looks at this job gets no answer", serve, turn_away)

    def _carry_out(self, decision: Decision, supervisor: Supervisor) -> None:
        """Apply a decision to a running group. What follows is decided when the group has ended."""
        if decision.kind == "signal":
            supervisor.signal(decision.signum)
        elif decision.kind == "stop":
            supervisor.stop(signum=decision.signum, grace_s=decision.grace_s)

    def _wait(
        self, supervisor: Supervisor, within_s: float | None = None
    ) -> tuple[Sequence[object], Sequence[object]]:
        """The events of the channels, and those of the engine. ``within_s``: the longest wait."""
        channels = self._channels
        if self._look is not None and self._look.is_going_on:
            channels = (*channels, self._look)
        now_s = time.monotonic()
        due = [one.deadline_s for one in channels]
        left = [within_s, *[None if one is None else max(one - now_s, 0.0) for one in due]]
        left_s = min([one for one in left if one is not None], default=None)
        if not channels:
            return (), supervisor.wait(left_s, routine=self._routine)
        fds = [fd for one in channels if (fd := one.fileno()) >= 0]
        ready = wait_for(supervisor.fileno(), *fds, left_s=left_s) if fds else set()
        happened = () if fds else supervisor.wait(left_s, routine=self._routine)
        now_s = time.monotonic()
        events = [
            event
            for one in channels
            if one.fileno() in ready or (one.deadline_s is not None and one.deadline_s <= now_s)
            for event in one.read()
        ]
        return events, happened or supervisor.wait(0, routine=self._routine)

    def _note(self, attempt: AttemptOutcome) -> AttemptOutcome:
        """Note that an attempt has ended. Returns it with what is known about its failures."""
        ended = attempt.ended
        # Only the caller knows what it has added to an open group.
        cause = None if attempt.plan.group.stays_open else ended.first_failure
        attempt = replace(attempt, cause=cause)
        has_ended_well = cause is None and ended.stop_signal is None and not ended.survivors
        if not has_ended_well or attempt.fatal_hang is not None:
            try:
                from dsl.evidence.reports import with_report

                attempt = with_report(attempt)
            except Exception as error:  # noqa: BLE001  our own files are gone: the job ends as it has to
                complain(attempt.plan.command, error, "the evidence of the failure is missing")
        if any(one.signal is not None for one in attempt.exits):
            optional(attempt.plan.command, "shared memory may be left", lambda: self._clear_up(attempt))
        self._count += 1
        self._last = attempt
        return attempt

    def _clear_up(self, attempt: AttemptOutcome) -> None:
        if any(exit_.signal is not None for exit_ in attempt.exits):  # else its imports are for nothing
            from dsl.evidence.segments import clear_segments

            for line in clear_segments(attempt.exits):
                self._tell(Notice("warning", line))

    def _tell(self, event: object) -> None:
        for listener in self._listeners:
            try:
                listener.hear(event)
            except Exception as error:  # noqa: BLE001  what listeners do never changes what the agent does
                complain(self._plan.command, error, "a line about the job, or a record of it, is missing")


def wait_for(*fds: int, left_s: float | None) -> set[int]:
    """Wait until one of these descriptors is readable. Returns those that are; negative ones never are."""
    import select

    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    # Rounded up: before the time is due there is nothing to read.
    left_ms = None if left_s is None else min(left_s * 1000 + (left_s > 0), LONGEST_POLL_MS)
    return {fd for fd, _ in poller.poll(left_ms)}


def _is_news(event: object) -> bool:
    """Whether an event of the engine also matters to the decision after the group's end."""
    return isinstance(event, SignalReceived) or (isinstance(event, Stopping) and event.reason == "guard_lost")


def _stops_others(event: object, decision: Decision) -> bool:
    """Whether the workers are to be stopped because one has failed, here or on another node."""
    if isinstance(event, Exited):
        return event.exit.status != 0 and not event.exit.caused_by_stop and decision.kind == "go_on"
    return decision.kind == "stop" and bool(decision.why)
