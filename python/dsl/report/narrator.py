"""Tells the user what happens to a job, in lines on stderr."""

from __future__ import annotations

import os

from dsl import (
    Exited,
    ForkServerLost,
    ForkServerReady,
    ForkServerSlow,
    Killing,
    LogNotice,
    SignalReceived,
    Stopping,
    Unbound,
)
from dsl._record import replace
from dsl.model.outcome import (
    REQUEUE_CODE,
    AttemptEnded,
    AttemptStarted,
    Awaiting,
    Outcome,
    OutputCut,
    Prewarmed,
    RestartFailed,
    TimerExpired,
)
from dsl.model.request import LEVELS, Level
from dsl.report.speak import complain, say, write
from dsl.report.verdict import NO_EVIDENCE, Evidence, cause_last, file_error, timer_evidence, verdict
from dsl.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl import Exit
    from dsl.model.job import Notice
    from dsl.model.node import NodePlan
    from dsl.model.outcome import AttemptOutcome

LONGEST_MESSAGE = 300
STDERR = 2
USUAL_ROWS = 24
OWN_LINES = 4
"""Lines of a verdict on a terminal besides the quoted ones, including the prompt behind it."""


class Narrator:
    """A listener that tells the user about one job, at the log level of its plan."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._ended = 0
        self._dropped = 0
        self._has_paused = False
        self._is_stopping = False  # a stop was requested; the next request ends the grace
        self._unbound: set[str] = set()

    def say(self, text: str, level: Level = "critical") -> None:
        """Say one line, if the user's log level includes this level."""
        if LEVELS[level] >= LEVELS[self._plan.log_level]:
            say(self._plan.command, text)

    def note(self, notice: Notice) -> None:
        """Say what was found while planning."""
        self.say(notice.line, notice.level)

    def hear(self, event: object) -> None:
        """Tell the user what matters about an event."""
        if isinstance(event, Exited):
            self._ended += 1
        elif isinstance(event, AttemptStarted):
            self._plan, self._ended = event.plan, 0
            if event.plan.attempt:  # the notices of the first attempt were said before the job began
                for notice in event.plan.notices:
                    self.note(notice)
        elif isinstance(event, LogNotice):
            self._hear_notice(event)
        elif isinstance(event, OutputCut):
            self._dropped += event.lines
            self._say_dropped(event.signum)
        elif isinstance(event, SignalReceived):
            if event.action != "forward":
                self._hear_signal(event, len(self._plan.workers) - self._ended)
        elif isinstance(event, Killing):
            if event.workers:
                self.say(f"killing {_workers(len(event.workers))} still alive", "info")
        elif isinstance(event, Unbound):
            self._hear_unbound(event)
        elif isinstance(event, ForkServerLost):
            if not event.workers:  # otherwise the verdict says it
                self.say(f"warning: {lost_server(event)}", "warning")
        elif isinstance(event, ForkServerSlow):
            self.say(f"warning: {slow_server(event)}", "warning")
        elif isinstance(event, ForkServerReady):
            self.say(f"fork server {event.server} is ready", "debug")
        elif isinstance(event, Prewarmed):
            self.say(prewarmed(event), "info")
        elif isinstance(event, TimerExpired):
            self._hear_timer(event)
        elif isinstance(event, Stopping):
            if event.reason == "guard_lost":
                self.say("the guard process is gone: killing the job", "info")
        elif isinstance(event, Awaiting):
            self._hear_pause(event)
        elif isinstance(event, AttemptEnded):
            if event.decision.kind == "restart":
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

    def _hear_notice(self, event: LogNotice) -> None:
        if event.kind == "lines_dropped":
            self._dropped += event.count  # reported at the end
        else:
            self.say(f"warning: {_describe(event)}", "warning")

    def _say_dropped(self, signum: int | None = None) -> None:
        """Say how many lines the console lacks and where to find them, and reset the count."""
        if self._dropped == 0:
            return
        lines = "1 line was" if self._dropped == 1 else f"{self._dropped} lines were"
        why = "because nobody read them in time"
        if signum is not None:
            why = f"because {signal_name(signum)} ended the waiting for their reader"
        self._dropped = 0
        self.say(f"{lines} not shown, {why}: {_full_text(self._plan)}", "warning")

    def _hear_unbound(self, event: Unbound) -> None:
        """Warn once for each stage: what fails for one worker will fail for the others, too."""
        if event.stage in self._unbound:
            return
        self._unbound.add(event.stage)
        from dsl.report.verdict import binding_failure

        label = self._plan.workers[event.worker].label
        reason = binding_failure(event.stage, event.errno)
        strict = ", --bind-strict makes it an error" if self._plan.binding == "wanted" else ""
        self.say(f"warning: {label} {reason} (said once{strict})", "warning")

    def _hear_pause(self, event: Awaiting) -> None:
        """Say it once: a crash loop has many pauses."""
        if event.decision.kind != "pause" or self._has_paused:
            return
        self._has_paused = True
        from dsl.model.progress import SAME_HOSTS

        soon_s, longest_s = SAME_HOSTS.within_s, SAME_HOSTS.longest_s
        text = f"the workers fail within {soon_s:g} s of their start, again and again"
        self.say(f"{text}: from now on each restart waits, up to {longest_s:g} s (said once)", "warning")

    def _hear_signal(self, event: SignalReceived, left: int) -> None:
        plan = self._plan
        name = signal_name(event.signum)
        is_key = event.from_terminal and name == "SIGINT"
        second = "a second Ctrl-C kills at once" if is_key else "a second signal kills at once"
        if event.action == "stop" and self._is_stopping:
            self.say(f"{name} received again: the grace is over", "info")
        elif event.action == "stop" and not left:
            self.say(f"{name} received: the workers are not started again", "info")
        elif event.action == "stop":
            hint = f"(grace {plan.grace_s:g} s, {second})"
            self.say(f"{name} received: stopping {_workers(left)} {hint}", "info")
        elif event.action == "preempt":
            grace_s = plan.grace_s if plan.preempt_grace_s is None else plan.preempt_grace_s
            self.say(f"{name} received: {_workers(left)} have {grace_s:g} s to save their work", "info")
        elif event.action == "reopen":
            self.say(f"{name} received: log files were opened anew", "info")
        else:
            self.say(f"{name} received: already stopping, {second}", "info")
        self._is_stopping |= event.action in ("stop", "ignore")

    def _hear_restart(self, event: AttemptEnded) -> None:
        """Say why the last attempt has failed, and that there will be another one."""
        history = event.history
        count = len(self._plan.workers)
        who = "the worker" if count == 1 else f"all {count} workers"
        if not event.decision.counted:
            self.say(f"starting {who} again: the nodes of the job have changed", "info")
            return
        self.say(self._verdict(history.attempts[-1])[1][0], "error")
        for one in history.attempts[-1].lost_servers:
            if one.workers:
                self.say(
                    f"warning: fork server {one.server} is gone: workers are executed instead", "warning"
                )
        from dsl.model.progress import crash_loop

        loop = crash_loop(history.tried)
        text = f"starting {who} again, restart {history.restarts} of {history.max_restarts}"
        self.say(f"{text} ({loop})" if loop else text, "warning")

    def _hear_outcome(self, outcome: Outcome) -> None:
        """Say how the job ended, in its last attempt."""
        last = outcome.last
        if last.is_preempted:
            self.say(f"the job was preempted, exit code {REQUEUE_CODE}: it can be queued again", "info")
        evidence, lines = self._verdict(last)
        is_screen = os.isatty(STDERR)
        for line in () if is_screen else lines:
            self.say(line)
        if outcome.count > 1 and last.ended.first_failure is not None:
            from dsl.model.progress import crash_loop

            self.say(crash_loop(outcome.tried) or f"{outcome.count} attempts have failed", "error")
        if last.failures:
            from dsl.report.failures import root_cause
            from dsl.report.summary import addition

            box = addition(self._plan.name, last.failures, root_cause(last.failures), evidence.said)
            if box:
                write(box + "\n")
        for line in cause_last(lines) if is_screen else ():
            self.say(line)
        self._say_dropped()

    def _verdict(self, attempt: AttemptOutcome) -> tuple[Evidence, list[str]]:
        """The evidence about the cause, and the verdict's lines; if an error occurs, from the exits alone."""
        try:
            evidence = self._evidence(attempt)
            return evidence, verdict(attempt, evidence)
        except Exception as error:  # noqa: BLE001  we name the failed worker in any case (G3)
            complain(self._plan.command, error)
            return NO_EVIDENCE, verdict(attempt)

    def _evidence(self, attempt: AttemptOutcome) -> Evidence:
        """What is known about the cause."""
        cause, ended = attempt.cause, attempt.ended
        memory, tail, path, problem = "", b"", None, ""
        if cause is not None and ended.first_failure is not None:
            tail = ended.tail if cause.worker == ended.first_failure.worker else b""
            worker = attempt.plan.workers[cause.worker]
            path = worker.log_path
            if path is not None or tail:
                from dsl.report.evidence import last_bytes, space_problem, without_lost_record

                tail = without_lost_record(tail or last_bytes(path or ""), worker.error_file)
                problem = space_problem(path) if path is not None else ""
        if attempt.cause_timer is not None:
            memory = timer_evidence(attempt.cause_timer)
        elif cause is not None and cause.signal == 9:
            from dsl.report.evidence import kernel_log
            from dsl.report.verdict import memory_evidence

            memory = memory_evidence(cause, kernel_log(attempt.begin_s), ended.oom_kills)
        known = memory
        if cause is not None and not tail and not memory:
            known = _recorded(attempt, cause)
        evidence = Evidence(known, tail, path, problem)
        return replace(evidence, is_on_screen=_is_on_screen(evidence, ended.shown_since))


def _is_on_screen(evidence: Evidence, shown_since: int | None) -> bool:
    """Whether the terminal still shows the lines to quote: they fit on its screen with all lines since."""
    if shown_since is None or evidence.words is None:
        return False
    try:
        rows = os.get_terminal_size(STDERR).lines or USUAL_ROWS
    except OSError:
        return False
    return len(evidence.words.lines) + shown_since + OWN_LINES <= rows


def _recorded(attempt: AttemptOutcome, cause: Exit) -> str:
    """The message that the worker recorded, in one line; empty without a record."""
    for failure in attempt.failures:
        if failure.order == cause.order and failure.recorded is not None:
            return " ".join(failure.recorded.message.split())[:LONGEST_MESSAGE]
    return ""


def lost_server(event: ForkServerLost) -> str:
    """Says that a fork server is lost and why, and what this means for its workers."""
    so = "its workers died with it" if event.workers else "workers are executed instead"
    return f"fork server {event.server} {event.text}: {so}"


def slow_server(event: ForkServerSlow) -> str:
    """Says that workers wait for a slow fork server, and how to see what it is doing."""
    who = f"fork server {event.server} (process {event.pid})"
    return (
        f"{who} is still importing after {event.import_s:.0f} s, and the workers wait for it: "
        f"py-spy dump --pid {event.pid} shows where it is"
    )


def prewarmed(event: Prewarmed) -> str:
    """Says how much was read into the page cache."""
    if not event.files:
        return "nothing was read ahead: neither the interpreter's libraries nor torch's were found"
    size = f"{event.read_bytes / (1 << 20):.0f} of {event.file_bytes / (1 << 20):.0f} MiB"
    cut = "" if event.is_whole else ", then stopped"
    return f"read {size} of the interpreter and torch from disk in {event.duration_s:.1f} s{cut}"


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def _describe(notice: LogNotice) -> str:
    reason = file_error(notice.errno or 0)
    if notice.kind == "file_failed":
        return f"cannot write {notice.path}: {reason}, the job goes on without what does not fit"
    if notice.kind == "reopen_failed":
        return f"cannot open {notice.path} anew: {reason}, the output goes on into the file that was open"
    if notice.kind == "console_failed":
        return f"the output of the workers cannot be shown: {reason}, the job goes on without it"
    if notice.kind == "bytes_lost":
        return f"{notice.path} lacks {notice.count} bytes that could not be written"
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
