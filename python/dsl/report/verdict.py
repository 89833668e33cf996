"""The verdict: from the exits of a group to a few lines that name the cause, the victims and the evidence."""

from __future__ import annotations

from dsl import SignalReceived
from dsl._record import kept, record
from dsl.lists import format_ranges
from dsl.model.outcome import SIGNAL_CODES
from dsl.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl import Ended, Exit, ForkServerLost
    from dsl.model.node import Label, NodePlan, WorkerPlan
    from dsl.model.outcome import AttemptOutcome, TimerExpired
    from dsl.report.excerpt import Excerpt

# Words for the steps of a start whose engine names would not tell the user much.
STAGES = {"stdio": "its log file or stream"}
BINDING_STAGES = ("affinity", "affinity-check", "mempolicy", "mempolicy-check")

# The kernel's error numbers, the same on every Linux.
EPERM = 1
EACCES = 13

SIGINT, SIGQUIT, SIGKILL, SIGTERM = 2, 3, 9, 15
KEYS = {SIGINT: "Ctrl-C", SIGQUIT: "Ctrl-\\"}
"""Keys that make a terminal send a signal."""

# Characters of an exception that fit behind the exit code; a longer exception gets a line of its own.
SHORT = 160


@record
class Evidence:
    """What is known about a failure besides the exit."""

    known: str = ""
    """One clause from elsewhere, such as an out-of-memory kill or a recorded exception."""
    tail: bytes = b""
    """The end of what the worker wrote."""
    log_path: str | None = None
    """The file with all of the worker's output."""
    log_problem: str = ""
    """Why that file may lack the end of the output."""
    is_on_screen: bool = False
    """Whether the user's terminal still shows the end of the output."""

    @kept
    def words(self) -> Excerpt | None:
        """What the worker's output says about its end; None without output."""
        if not self.tail:
            return None
        from dsl.report.excerpt import excerpt

        return excerpt(self.tail)

    @property
    def said(self) -> str:
        """The exception and where it was raised, in one line; empty if none was found."""
        words: Excerpt | None = self.words
        if words is None or not words.exception:
            return ""
        return words.exception + (f" ({words.where})" if words.where else "")


NO_EVIDENCE = Evidence()


def verdict(attempt: AttemptOutcome, evidence: Evidence = NO_EVIDENCE) -> list[str]:
    """Lines that say why the job ended, the cause first; none for a job that succeeded (G3).

    ``evidence`` is about the cause. No line holds a control character but the tab.
    """
    lines = []
    exits, ended, cause = attempt.exits, attempt.ended, attempt.cause
    workers = attempt.plan.workers
    if cause is not None:
        worker = workers[cause.worker]
        server = attempt.cause_server
        if server is not None:
            lines.append(_blame_server(attempt, server, evidence))
            exits = tuple(one for one in exits if one.signal != 9 or one.worker not in server.workers)
        else:
            lines.extend(_blame(attempt.plan, cause, evidence, is_alone=len(exits) == 1))
        lines.extend(_debugger_hint(attempt.plan, worker, evidence.tail))
        others = [exit_ for exit_ in exits if exit_.status and not exit_.caused_by_stop]
        others = [exit_ for exit_ in others if workers[exit_.worker] is not worker]
        lines.extend(_also_failed(workers, cause, others))
    if not attempt.plan.is_conducted:  # the head says it for all hosts together
        lines.extend(_victims(attempt, exits))
    lines.extend(survivor(*one) for one in ended.survivors)
    return [line if line.isprintable() else _printable(line) for line in lines]


def _victims(attempt: AttemptOutcome, exits: Sequence[Exit]) -> list[str]:
    """How the other workers ended after the stop: by our signals, or in another way."""
    ended, workers = attempt.ended, attempt.plan.workers
    by_us: dict[str, list[Label]] = {}
    others: dict[str, list[Label]] = {}
    asked: dict[str, list[Label]] = {}
    for exit_ in exits:
        if exit_.caused_by_stop and exit_ is not attempt.cause:
            label = workers[exit_.worker].label
            (by_us if is_stopped(exit_, ended) else others).setdefault(_ending(exit_), []).append(label)
            asked.setdefault(_answer(exit_, ended), []).append(label)
    if attempt.cause is not None:
        lines = ((f"stopped by {attempt.plan.command}", by_us), ("ended because of it", others))
        return [
            f"{who}: {', '.join([f'{name_labels(labels)} ({how})' for how, labels in groups.items()])}"
            for who, groups in lines
            if groups
        ]
    if ended.stop_signal is None or not asked:
        return []
    is_key = any(
        isinstance(event, SignalReceived) and event.signum == ended.stop_signal and event.from_terminal
        for event in attempt.news
    )
    what = end_on_request(ended.stop_signal, is_key=is_key, is_preemption=attempt.is_preempted)
    return [f"{what}: {', '.join([f'{name_labels(labels)} {how}' for how, labels in asked.items()])}"]


def is_stopped(exit_: Exit, ended: Ended) -> bool:
    """Whether the stop ended a worker: by one of our signals, or before the worker was started.

    A worker with another exit code may have lost its peer, or may have handled our signal in its own way.
    """
    ours = (SIGTERM, SIGKILL, ended.stop_signal)
    return exit_.exec_stage == "cancelled" or _ended_by(exit_) in ours


def _ended_by(exit_: Exit) -> int:
    """The signal that ended a worker, or that its exit code means as in a shell (128 + n); below 1: none."""
    return exit_.signal if exit_.signal is not None else (exit_.code or 0) - SIGNAL_CODES


def _answer(exit_: Exit, ended: Ended) -> str:
    """How a worker ended after a signal that ended the job."""
    if exit_.exec_stage == "cancelled":
        return "not started"
    if exit_.signal == SIGKILL:
        return "killed (SIGKILL)"
    if _ended_by(exit_) == ended.stop_signal:
        return "ended"
    return f"ended ({_ending(exit_)})"


def end_on_request(signum: int, *, is_key: bool, is_preemption: bool = False) -> str:
    """What ended a job: ``interrupted (Ctrl-C)``, ``terminated (SIGTERM)``.

    ``is_key``: a key of the terminal sent the signal. ``is_preemption``: the signal announced a preemption.
    """
    name = KEYS.get(signum) if is_key else None
    what = "interrupted" if signum == SIGINT else "terminated"
    return f"{'preempted' if is_preemption else what} ({name or signal_name(signum)})"


def _blame(plan: NodePlan, cause: Exit, evidence: Evidence, *, is_alone: bool) -> list[str]:
    """One line with the cause and its reason, then the worker's last output."""
    worker = plan.workers[cause.worker]
    pid = f", pid {cause.pid}" if cause.pid else ""
    place = f"local rank {worker.local_rank}{pid}, host {plan.host}"
    if worker.noun != "rank":
        place = f"pid {cause.pid}" if cause.pid else "not started"
    first = "" if is_alone else " first"
    if plan.is_conducted:
        first = ""  # only the head knows which worker was first
    elif plan.world_size > len(plan.workers):
        first = " first on this node"  # we cannot compare with the other nodes
    # The worker recorded an error before we stopped it, so its exit shows only our signal.
    why = (
        f"an exception, stopped by {plan.command} ({_ending(cause)})"
        if cause.caused_by_stop
        else reason(cause)
    )
    why += evidence.known and ": " + evidence.known
    said, output = evidence.said, _last_words(worker.label, evidence)
    # After SIGKILL, or with a reason known from elsewhere, an exception in the output is not the reason.
    is_reason = bool(said) and len(said) <= SHORT and not evidence.known and cause.signal != 9
    line = f"{worker.label} ({place}) failed{first}: {why}{': ' + said if is_reason else ''}"
    return [line, *([f"  {said}"] if said and not is_reason else []), *output]


def _blame_server(attempt: AttemptOutcome, server: ForkServerLost, evidence: Evidence) -> str:
    """One line about a fork server that died, and its workers."""
    plan = attempt.plan
    whose = name_labels([plan.workers[number].label for number in server.workers])
    how = server.text if server.signum is None else f"was killed by {signal_name(server.signum)}"
    known = evidence.known and f" ({evidence.known})"
    return (
        f"the fork server of {whose} (pid {server.pid}, host {plan.host}) {how}{known}: "
        "its workers died with it"
    )


def _debugger_hint(plan: NodePlan, worker: WorkerPlan, tail: bytes) -> list[str]:
    """A hint for a debugger that found no input: how to give it the command's standard input."""
    last = tail[-1000:]
    has_quit = b"bdb.BdbQuit" in last or b"Quitting pdb will kill the process" in last
    if not has_quit or worker.stdin or not any(other.stdin for other in plan.workers):
        return []
    mend = f"--stdin {worker.rank} gives its debugger the standard input of {plan.command}"
    return [f"{worker.label} has nothing to read: {mend}"]


def survivor(pid: int, state: str, name: str, wchan: str | None, errno: int | None = None) -> str:
    """A line about a surviving process, from `dsl.Ended.survivors` or from a guard."""
    if not pid:
        why = "does not show them to this user" if errno == EACCES else "cannot be read, so nobody can look"
        return f"processes of the job may be left: /proc {why}"
    if errno == EPERM:
        return f"process {pid} ({name}, state {state}) is left: no permission to end it"
    where = f" (waits in {wchan})" if wchan else ""
    return f"process {pid} ({name}, state {state}) did not die of SIGKILL{where}"


def _last_words(label: Label, evidence: Evidence) -> list[str]:
    """The lines that show the worker's last output."""
    shown = () if evidence.words is None else evidence.words.lines
    lines = [f"last output of {label}:", *[f"  | {line}".rstrip() for line in shown]] if shown else []
    if evidence.is_on_screen:
        lines = []
    path, problem = evidence.log_path, evidence.log_problem
    if path and problem:
        lines.append(f"{path} may lack its last words: {problem}, make room on its disk")
    elif path:
        lines.append(f"full log: {path}")
    return lines


def cause_last(lines: Sequence[str]) -> list[str]:
    """The lines of a verdict with the cause last: on a terminal, people read the last lines first."""
    count = 2 if len(lines) > 1 and lines[1].startswith("  ") else 1  # a long exception has its own line
    return [*lines[count:], *lines[:count]]


def _printable(line: str) -> str:
    from dsl.printable import printable

    return printable(line)


def _also_failed(workers: Sequence[WorkerPlan], cause: Exit, others: Sequence[Exit]) -> list[str]:
    shown = [
        f"also failed: {workers[exit_.worker].label} "
        f"({(exit_.ended_ns - cause.ended_ns) / 1e6:+.1f} ms): {reason(exit_)}"
        for exit_ in others[:8]
    ]
    rest = [workers[exit_.worker].label for exit_ in others[8:]]
    return [*shown, *([f"also failed: {name_labels(rest)}"] if rest else [])]


def reason(exit_: Exit) -> str:
    """One clause: ``exit code 3``, ``killed by SIGKILL (signal 9)``, ``could not be executed: ...``."""
    if exit_.exec_errno is not None:
        return _start_failure(exit_)
    if exit_.signal is not None:
        core = ", core dumped" if exit_.core_dumped else ""
        return f"killed by {signal_name(exit_.signal)} (signal {exit_.signal}{core})"
    if exit_.code is None:
        return "its exit status was lost"
    return f"exit code {exit_.code}"


def _start_failure(exit_: Exit) -> str:
    import errno
    import os

    number = exit_.exec_errno or 0
    path = exit_.exec_path or ""
    text = os.strerror(number)
    if exit_.exec_stage == "chdir":
        return f"cannot enter the working directory {path}: {text}"
    if exit_.exec_stage in BINDING_STAGES:
        return f"could not be started: {binding_failure(exit_.exec_stage, number)}"
    if exit_.exec_stage != "exec":
        stage = STAGES.get(exit_.exec_stage or "", exit_.exec_stage)
        if exit_.exec_stage == "stdio":
            text = file_error(number)
        return f"could not be started ({stage}): {path and path + ': '}{text}"
    hint = ""
    if number == errno.ENOENT and os.path.exists(path):
        hint = ", the interpreter of its #! line is missing"
    elif number == errno.ENOENT and "/" not in path:
        hint = ", it is not on PATH"
    elif number == errno.ENOEXEC:
        hint = ", a script needs a #! line"
    elif number == errno.EACCES and os.path.isdir(path):
        hint = ", it is a directory"
    elif number == errno.EACCES:
        hint = f", make it executable with chmod +x {path}"
    elif number == errno.E2BIG:
        hint = ", its arguments and environment are too long together"
    return f"could not be executed: {path}: {text}{hint}"


def file_error(number: int) -> str:
    """Why a log file cannot be opened or written; the engine reports ENXIO for a file that may block."""
    import errno
    import os

    return "it is not a regular file" if number == errno.ENXIO else os.strerror(number)


def binding_failure(stage: str, number: int) -> str:
    """Why a worker is not bound: a clause about the step of the binding that failed with this errno."""
    import errno
    import os

    if stage == "affinity-check":
        return "it got other CPUs than it was bound to, the cpuset of this job may have changed"
    if stage == "mempolicy-check":
        return "it got another memory policy than it was given, the cpuset of this job may have changed"
    if stage == "affinity":
        return f"cannot be bound to its CPUs: {os.strerror(number)}"
    refused = number in (errno.EPERM, errno.ENOSYS)
    hint = ", a container needs the capability SYS_NICE for it, or use --mem-policy none" if refused else ""
    return f"cannot be given its memory policy: {os.strerror(number)}{hint}"


def _ending(exit_: Exit) -> str:
    if exit_.exec_stage == "cancelled":
        return "not started"
    if exit_.signal is not None:
        return signal_name(exit_.signal)
    return f"exit code {exit_.code}"


def name_labels(labels: Sequence[Label]) -> str:
    """``rank 3``, ``ranks 0-2,5``, ``hosts n1,n2``: labels of one noun."""
    noun = f"{labels[0].noun}s" if len(labels) > 1 else labels[0].noun
    names = [label.name for label in labels]
    if all(name.isdecimal() for name in names):
        return f"{noun} {format_ranges(sorted(map(int, names)))}"
    return f"{noun} {','.join(names)}"


def timer_evidence(timer: TimerExpired) -> str:
    """The evidence for a death by an expired timer."""
    scope = timer.scope if len(timer.scope) <= SHORT else f"{timer.scope[: SHORT - 3]}..."
    return f"its timer {scope!r} had expired"


def memory_evidence(exit_: Exit, kernel_log: Sequence[str], oom_kills: int) -> str:
    """The evidence for an out-of-memory kill: the kernel's line about the pid, or a counter that moved."""
    if exit_.signal != 9:
        return ""
    peak = f"peak memory {exit_.max_rss_bytes / 2**20:.0f} MiB"
    for line in kernel_log:
        if f"process {exit_.pid} " in line or f"pid={exit_.pid}," in line:
            return f"the kernel killed it because memory ran out ({peak})"
    if oom_kills > 0:
        return f"memory of this job's cgroup ran out ({oom_kills} out-of-memory kill, {peak})"
    return ""
