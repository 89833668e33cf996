"""Tells the user what happens to a job: one narrator for all jobs, and a function that shows its lines.

Commands show them on the console. Launches from Python have the logger (`dsl.functions.launcher`), and an
agent that a head conducts sends the lines to the head (`dsl.agent.node`).
"""

from __future__ import annotations

import os

from dsl import (
    Exited,
    ForkServerLost,
    ForkServerReady,
    ForkServerSlow,
    Killing,
    Leftovers,
    LogNotice,
    SignalReceived,
    Stopping,
    Unbound,
)
from dsl._record import replace
from dsl.model.job import Notice
from dsl.model.outcome import (
    REQUEUE_CODE,
    AttemptOutcome,
    AttemptStarted,
    Awaiting,
    Hang,
    Outcome,
    OutputCut,
    RestartFailed,
    Restarting,
    TimerExpired,
)
from dsl.model.request import LEVELS, Level
from dsl.report import speak
from dsl.report.speak import say, write
from dsl.words import counted, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from dsl.conductor.restarts import Tried
    from dsl.model.job import NodePlan
    from dsl.model.judgement import Judgement

    Show: TypeAlias = Callable[[NodePlan, str, Level, str], None]
    """Shows one line. The last text stands before it where lines do not show their level: ``warning: ``."""


LONGEST_MESSAGE = 300
STDERR = 2


def to_console(plan: NodePlan, text: str, level: Level, mark: str) -> None:
    """Write one line to stderr if the plan's log level includes it."""
    if LEVELS[level] >= LEVELS[plan.job.log_level]:
        say(plan.command, mark + text)


class Narrator:
    """A listener that tells the user about one job."""

    def __init__(
        self,
        plan: NodePlan,
        show: Show = to_console,
        *,
        has_verdict: bool = True,
        judged: Callable[[], Judgement | None] | None = None,
    ) -> None:
        """``has_verdict``: the narrator says it; otherwise the user gets the verdict in another way.

        ``judged``: a conductor judges the end for all nodes, and this gives its judgement once the job has
        ended. The user hears of restarts from the conductor, too. None: this node judges for itself.
        """
        self._judged = judged
        self._plan = plan
        self._show, self._has_verdict = show, has_verdict
        self._tried: tuple[Tried, ...] = ()
        """What is kept of the attempts so far."""
        self._ended = 0
        self._dropped = 0
        self._is_stopping = False  # a stop was requested; the next request ends the grace
        self._lingers = False  # what the workers have left running has time to end
        self._warned: set[object] = set()
        """What the user has heard of once, which is enough."""

    def judge_here(self) -> None:
        """From now on no conductor judges."""
        self._judged = None

    def say(self, text: str, level: Level = "critical") -> None:
        """Say one line."""
        self._show(self._plan, text, level, "")

    def warn(self, text: str) -> None:
        """Say one line that is marked as a warning."""
        self._show(self._plan, text, "warning", "warning: ")

    def note(self, notice: Notice) -> None:
        """Say what was found while planning."""
        self.warn(notice.text) if notice.level == "warning" else self.say(notice.text, notice.level)

    def hear(self, event: object) -> None:
        """Tell the user what matters about an event."""
        if isinstance(event, Exited):
            self._ended += 1
        elif isinstance(event, AttemptStarted):
            self._plan, self._ended = event.plan, 0
            if event.plan.meeting.attempt:  # those of the first attempt were told before the job began
                for notice in event.plan.notices:
                    self.note(notice)
        elif isinstance(event, Notice):
            self.note(event)
        elif isinstance(event, LogNotice):
            if event.kind == "lines_dropped":
                self._dropped += event.count  # reported at the end
            elif event.kind != "first_output":
                self.warn(_describe(event))
        elif isinstance(event, OutputCut):
            self._dropped += event.lines
            self._say_dropped(event.signum)
        elif isinstance(event, SignalReceived):
            if event.action != "forward":
                self._hear_signal(event, len(self._plan.workers) - self._ended)
        elif isinstance(event, Killing):
            if event.workers:
                self.say(f"killing {counted(len(event.workers), 'worker')} still alive", "info")
        elif isinstance(event, Leftovers):
            self._hear_leftovers(event)
        elif isinstance(event, Unbound):
            self._hear_unbound(event)
        elif isinstance(event, ForkServerLost):
            if not event.workers:  # otherwise the verdict says it
                text = f"fork server {event.server} {event.text}: workers are executed instead"
                self._warn_once(event.text, text)
        elif isinstance(event, ForkServerSlow):
            who = f"fork server {event.server} (process {event.pid})"
            text = f"{who} is still importing after {event.import_s:.0f} s, and the workers wait for it"
            text = f"{text}: py-spy dump --pid {event.pid} shows where it is"
            self._warn_once((event.pid, round(event.import_s)), text)
        elif isinstance(event, ForkServerReady):
            self.say(f"fork server {event.server} is ready", "debug")
        elif isinstance(event, TimerExpired):
            self._hear_timer(event)
        elif isinstance(event, Hang):
            from dsl.report.verdict import hang_lines

            for line in hang_lines(event):
                self.say(line, "error")
        elif isinstance(event, Stopping):
            if event.reason == "guard_lost":
                self.say("the guard process is gone: killing the job", "info")
        elif isinstance(event, Awaiting):
            if event.what == "end" or (self._judged is not None and not event.last.final_code):
                self.say("all workers of this node ended well, waiting for the other nodes", "info")
        elif isinstance(event, AttemptOutcome):
            if self._tried or event.cause is not None:
                from dsl.conductor.restarts import with_attempt

                self._tried = with_attempt(self._tried, event)
        elif isinstance(event, Restarting):
            if self._judged is None and not self._plan.is_conducted:  # else the conductor says it
                self._hear_restart(event)
        elif isinstance(event, RestartFailed):
            self.say(f"error: the workers cannot be started again: {event.error}")
        elif isinstance(event, Outcome):
            self._hear_outcome(event)

    def _hear_timer(self, event: TimerExpired) -> None:
        name = f"the timer {event.scope[:LONGEST_MESSAGE]!r} of process {event.pid} has expired"
        if event.signum:
            self.say(f"{name}: sent {signal_name(event.signum)} to it", "error")
        else:
            self.say(f"{name}, it asks for no signal", "warning")

    def _say_dropped(self, signum: int | None = None) -> None:
        """Say how many lines the console lacks and where to find them, and reset the count."""
        if self._dropped == 0:
            return
        lines = counted(self._dropped, "line", "was", "were")
        why = "because nobody read them in time"
        if signum is not None:
            why = f"because {signal_name(signum)} ended the waiting for their reader"
        self._dropped = 0
        self.say(f"{lines} not shown, {why}: {_full_text(self._plan)}", "warning")

    def _hear_unbound(self, event: Unbound) -> None:
        """Warn once for each stage: what fails for one worker will fail for the others, too."""
        from dsl.report.verdict import binding_failure

        label = self._plan.workers[event.worker].label
        reason = binding_failure(event.stage, event.errno)
        strict = ", --bind-strict makes it an error" if self._plan.group.binding == "wanted" else ""
        self._warn_once(event.stage, f"{label} {reason} (said once{strict})")

    def _hear_leftovers(self, event: Leftovers) -> None:
        from dsl.words import name_few

        said = []
        for pid, command, worker in event.processes:
            of = "" if worker is None else f" of {self._plan.workers[worker].label}"
            said.append(f"process {pid}{of} ({command})")
        what = name_few(said)
        self._lingers = event.grace_s > 0
        if self._lingers:
            text = f"all workers have ended, waiting at most {event.grace_s:.0f} s for what they left running"
            self.say(f"{text} (Ctrl-C ends it): {what}", "warning")
        else:
            self.warn(f"ended what the workers had left running: {what}")

    def _hear_signal(self, event: SignalReceived, left: int) -> None:
        plan = self._plan
        name = signal_name(event.signum)
        is_key = event.from_terminal and name == "SIGINT"
        second = "a second Ctrl-C kills at once" if is_key else "a second signal kills at once"
        if event.action == "stop" and self._is_stopping:
            self.say(f"{name} received again: the grace is over", "info")
        elif event.action == "stop" and not left:
            what = "what is left is ended" if self._lingers else "the workers are not started again"
            self.say(f"{name} received: {what}", "info")
        elif event.action == "stop":
            hint = f"(grace {plan.group.grace_s:g} s, {second})"
            self.say(f"{name} received: stopping {counted(left, 'worker')} {hint}", "info")
        elif event.action == "preempt":
            grace_s = plan.job.signals.preempt_grace_s
            grace_s = plan.group.grace_s if grace_s is None else grace_s
            who = counted(left, "worker", "has", "have")
            whose = "its" if left == 1 else "their"
            self.say(f"{name} received: {who} {grace_s:g} s to save {whose} work", "info")
        elif event.action == "reopen":
            self.say(f"{name} received: log files were opened anew", "info")
        else:
            self.say(f"{name} received: already stopping, {second}", "info")
        self._is_stopping |= event.action in ("stop", "ignore")

    def _warn_once(self, what: object, text: str) -> None:
        """Warn unless this is known: a warm server says the same in place of each of its branches."""
        if what not in self._warned:
            self._warned.add(what)
            self.warn(text)

    def _hear_restart(self, event: Restarting) -> None:
        """Say why the last attempt has failed, and that there will be another one."""
        count = len(self._plan.workers)
        who = "the worker" if count == 1 else f"all {count} workers"
        if not event.is_counted:
            self.say(f"starting {who} again: the nodes of the job have changed", "info")
            return
        judgement = judge_attempt(event.last)
        if judgement is not None:
            from dsl.report.verdict import headlines

            for line in headlines(judgement):
                self.say(line, "error")
        for one in event.last.lost_servers:
            if one.workers:
                self.warn(f"fork server {one.server} is gone: workers are executed instead")
        from dsl.conductor.restarts import restart_line

        self.say(
            restart_line(who, event.number, event.last.plan.job.max_restarts, self._tried, event.wait_s),
            "warning",
        )

    def _hear_outcome(self, outcome: Outcome) -> None:
        """Say how the job ended, in its last attempt."""
        if self._has_verdict:
            self._say_end(outcome)
        elif not self._plan.is_conducted:
            from dsl.report.verdict import headlines, not_tried, others_then, survivor

            judgement = self._judged() if self._judged else judge_attempt(outcome.last)
            if judgement is not None:
                tell = headlines if self._judged and outcome.cause is None else others_then
                for line in tell(judgement):
                    self.say(line, "error")
            if why := outcome.last.not_tried or (judgement.not_tried if judgement else ""):
                self.say(not_tried(why), "error")
            for one in outcome.last.ended.survivors:
                self.warn(survivor(*one))
        self._say_dropped()

    def _say_end(self, outcome: Outcome) -> None:
        last = outcome.last
        if last.is_preempted and self._judged is None:
            self.say(f"the job was preempted, exit code {REQUEUE_CODE}: it can be queued again", "info")
        judgement = self._judged() if self._judged else judge_attempt(last)
        tell_end(judgement, self.say, lambda: self._say_beside(outcome, judgement))

    def _say_beside(self, outcome: Outcome, judgement: Judgement | None) -> None:
        """Say what stands beside the verdict: how many attempts have failed, and what workers recorded."""
        last = outcome.last
        causes = judgement.causes if judgement is not None else ()
        if causes and outcome.count > 1:
            from dsl.conductor.restarts import failures_line

            self.say(failures_line(outcome.count, self._tried), "error")
        if last.failures and last.cause is not None and judgement is not None:
            from dsl.report.failures import addition

            said = causes[0].evidence.said if causes else ""
            root = next(one for one in last.failures if one.order == last.cause.order)
            box = addition(self._plan.job.program.name, last.failures, root, said)
            if box:
                write(box + "\n")


def judge_attempt(attempt: AttemptOutcome) -> Judgement | None:
    """What follows from the facts about an attempt, if this node is the only one that we know about."""
    if attempt.report is None:
        return None
    from dsl.conductor.judge import Context, judge_alone

    plan, signum = attempt.plan, attempt.ended.stop_signal
    is_key = any(
        isinstance(event, SignalReceived) and event.signum == signum and event.from_terminal
        for event in attempt.news
    )
    hang = attempt.fatal_hang
    context = Context(
        plan.command,
        signum,
        is_key=is_key,
        is_preempted=attempt.is_preempted,
        preempt_signal=plan.job.signals.preempt,
        hang="" if hang is None else hang.why,
        sees_all=plan.meeting.world_size <= len(plan.workers),
    )
    return replace(judge_alone(attempt.report, context), not_tried=attempt.not_tried)


def tell_end(judgement: Judgement | None, say: Callable[[str], None], say_beside: Callable[[], None]) -> None:
    """Say how a job has ended, and hand the facts to the tuner that started it.

    ``say_beside`` says the rest. On a terminal, the verdict comes after it, and the cause is the last line.
    """
    if judgement is None:
        say_beside()
        return
    from dsl.report.verdict import cause_last, verdict

    lines = verdict(judgement)
    if speak.end_path:
        from dsl.model.codec import to_json, to_plain

        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(speak.end_path, flags, 0o640), "wb") as file:
                file.write(to_json(to_plain(judgement)))
        except OSError:
            speak.end_path = ""  # the tuner can do without
    is_screen = os.isatty(STDERR)
    if is_screen:
        say_beside()
    for line in cause_last(lines) if is_screen else lines:
        say(line)
    if not is_screen:
        say_beside()


def _describe(notice: LogNotice) -> str:
    from dsl.report.verdict import file_error

    reason = file_error(notice.errno or 0)
    if notice.kind == "file_failed":
        return f"cannot write {notice.path}: {reason}, the job goes on without what does not fit"
    if notice.kind == "reopen_failed":
        return f"cannot open {notice.path} anew: {reason}, the output goes on into the file that was open"
    if notice.kind == "bytes_lost":
        return f"{notice.path} lacks {counted(notice.count or 0, 'byte')} that could not be written"
    return "nobody reads the output any more, the job goes on"


def _full_text(plan: NodePlan) -> str:
    """Where to find the lines that the console lacks."""
    routes = [
        route for worker in plan.workers for route in (worker.stdout, worker.stderr) if route is not None
    ]
    paths = [route.path for route in routes if route.console is not None and route.path is not None]
    if len(paths) < sum(1 for route in routes if route.console is not None):
        return "not all of them are in log files, --log-dir would keep them"
    if len(paths) == 1:
        return f"{paths[0]} has them"
    return f"the log files below {os.path.commonpath(paths)} have them"
