"""Tells the user what happens to a job, in lines on stderr."""

from __future__ import annotations

import os

from dsl import Killing, LogNotice, SignalReceived, Stopping, Unbound
from dsl.model import LEVELS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Event, Exit
    from dsl.attempts import Attempt
    from dsl.model import NodePlan

STALL_MS = 500
LONGEST_MESSAGE = 300


def say(command: str, text: str) -> None:
    """One line on stderr, unless nobody takes it: a stopped terminal or pager must not hold the job."""
    write(f"{command}: {' '.join(text.splitlines())}\n")


def write(text: str) -> None:
    """Text on stderr, as it is, unless nobody takes it."""
    import select

    rest = text.encode(errors="backslashreplace")
    try:
        poller = select.poll()
        poller.register(2, select.POLLOUT)
        while rest and poller.poll(STALL_MS):
            rest = rest[os.write(2, rest[: select.PIPE_BUF]) :]
    except OSError:
        return  # nobody reads it


class Narrator:
    """Speaks for one job, as loud as its plan says."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._unbound: set[str] = set()

    def prepare(self) -> Callable[[Event, int], None]:
        """Make ready what is needed at the end, while the workers start; returns `hear`."""
        import dsl.report  # noqa: F401  for the verdict

        return self.hear

    def say(self, text: str, level: str = "critical") -> None:
        """One line, if the user wants to hear what is of this level."""
        if LEVELS[level] >= LEVELS[self._plan.log_level]:
            say(self._plan.command, text)

    def hear(self, event: Event, ended: int) -> None:
        """Pass on what the user should know, while ``ended`` workers have ended."""
        if isinstance(event, LogNotice):
            self.say(f"warning: {_describe(event)}", "warning")
        elif isinstance(event, SignalReceived):
            if event.action != "forward":
                self._hear_signal(event, len(self._plan.workers) - ended)
        elif isinstance(event, Killing):
            if event.workers:
                self.say(f"killing {_workers(len(event.workers))} still alive", "info")
        elif isinstance(event, Unbound):
            self._hear_unbound(event)
        elif isinstance(event, Stopping) and event.reason == "guard_lost":
            self.say("the guard process is gone: killing the job", "info")

    def _hear_unbound(self, event: Unbound) -> None:
        """Once for each reason: what one worker is refused the others will be, too."""
        if event.stage in self._unbound:
            return
        self._unbound.add(event.stage)
        from dsl.report import binding_failure

        rank = self._plan.workers[event.worker].rank
        reason = binding_failure(event.stage, event.errno)
        strict = ", --bind-strict makes it an error" if self._plan.binding == "wanted" else ""
        self.say(f"warning: rank {rank} {reason} (said once{strict})", "warning")

    def _hear_signal(self, event: SignalReceived, left: int) -> None:
        from dsl.signals import signal_name

        plan = self._plan
        name = signal_name(event.signum)
        if event.action == "stop":
            hint = f"(grace {plan.grace_s:g} s, a second signal kills at once)"
            self.say(f"{name} received: stopping {_workers(left)} {hint}", "info")
        elif event.action == "preempt":
            grace_s = plan.grace_s if plan.preempt_grace_s is None else plan.preempt_grace_s
            self.say(f"{name} received: {_workers(left)} have {grace_s:g} s to save their work", "info")
        elif event.action == "reopen":
            self.say(f"{name} received: log files were opened anew", "info")
        else:
            self.say(f"{name} received: already stopping, a second signal kills at once", "info")

    def restart(self, failed: Sequence[Attempt], maximum: int) -> None:
        """Say why the attempts so far have failed, and that there will be another one."""
        from dsl.attempts import crash_loop

        self.say(self._verdict(failed[-1])[0], "error")
        loop = crash_loop(failed)
        count = len(self._plan.workers)
        who = "the worker" if count == 1 else f"all {count} workers"
        text = f"starting {who} again, restart {len(failed)} of {maximum}"
        self.say(f"{text} ({loop})" if loop else text, "warning")

    def end(self, attempts: Sequence[Attempt]) -> None:
        """Say how the job ended, in its last attempt."""
        last = attempts[-1]
        if last.is_preempted:
            from dsl.attempts import REQUEUE_CODE

            self.say(f"the job was preempted, exit code {REQUEUE_CODE}: it can be queued again", "info")
        lines = self._verdict(last)
        for line in lines:
            self.say(line)
        if len(attempts) > 1 and last.ended.first_failure is not None:
            from dsl.attempts import crash_loop

            loop = crash_loop(attempts)
            self.say(loop or f"{len(attempts)} attempts have failed", "error")
        failures = last.failures()
        if failures and LEVELS["critical"] >= LEVELS[self._plan.log_level]:
            from dsl.elastic.failures import root_cause
            from dsl.elastic.summary import format_summary

            root = root_cause(failures)
            evidence = lines[:1] if root.recorded is None else []
            write(format_summary(self._plan.name, failures, root, evidence) + "\n")

    def _verdict(self, attempt: Attempt) -> list[str]:
        from dsl.report import verdict

        plan, ended = attempt.plan, attempt.ended
        evidence, tail, path = "", b"", None
        cause = attempt.cause()
        if cause is not None and ended.first_failure is not None:
            tail = ended.tail if cause.worker == ended.first_failure.worker else b""
            path = plan.workers[cause.worker].log_path
            if path is not None and not tail:
                from dsl.evidence import last_bytes

                tail = last_bytes(path)
        if cause is not None and cause.signal == 9:
            from dsl.evidence import kernel_log
            from dsl.report import memory_evidence

            evidence = memory_evidence(cause, kernel_log(attempt.begin_s), ended.oom_kills)
        if cause is not None and not tail and not evidence:
            evidence = _recorded(attempt, cause)
        return verdict(plan, attempt.exits, ended, evidence, tail, path, cause=cause)


def _recorded(attempt: Attempt, cause: Exit) -> str:
    """What the worker recorded of its end, in one line; empty if it did not."""
    for failure in attempt.failures():
        if failure.order == cause.order and failure.recorded is not None:
            return " ".join(failure.recorded.message.split())[:LONGEST_MESSAGE]
    return ""


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def _describe(notice: LogNotice) -> str:
    if notice.kind == "file_failed":
        reason = os.strerror(notice.errno or 0)
        return f"cannot write {notice.path}: {reason}, the job goes on without what does not fit"
    if notice.kind == "bytes_lost":
        return f"{notice.path} lacks {notice.count} bytes that could not be written"
    if notice.kind == "console_closed":
        return "nobody reads the output any more, the job goes on"
    return f"{notice.count} lines were not shown, because nobody read them in time"
