"""The verdict: words for the end of a job, from the facts that its members have reported.

No other module words a failure, and nothing reads these words again.
"""

from __future__ import annotations

import os

from dsl.model.outcome import HANG_CODE, SIGNAL_CODES
from dsl.words import end_on_request, format_ranges, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Literal

    from dsl import Exit
    from dsl.model.judgement import Absence, Alike, Evidence, Failed, Judgement, Report, ServerLost, Survivor
    from dsl.model.outcome import Hang

# Words for the steps of a start whose engine names would not tell the user much.
STAGES = {"stdio": "its log file or stream"}
BINDING_STAGES = ("affinity", "affinity-check", "mempolicy", "mempolicy-check")

# The kernel's error numbers, the same on every Linux.
EPERM, ENOENT, ENXIO, E2BIG, ENOEXEC, ECHILD, EACCES, ENOSYS = 1, 2, 6, 7, 8, 10, 13, 38

SIGKILL = 9

# Characters of an exception that fit behind the exit code; a longer exception gets a line of its own.
SHORT = 160


def verdict(judgement: Judgement) -> list[str]:
    """Lines that say why the job ended, the cause first; none for a job that succeeded (G3).

    No line holds a control character but the tab.
    """
    lines = [judgement.fault] if judgement.fault else _causes(judgement)
    if judgement.quitter:
        lines.append(f"{judgement.quitter} has stopped its workers, exit code {judgement.code}")
    lines += _victims(judgement)
    lines += [_left(one, judgement) for one in judgement.survivors]
    lines += others_then(judgement)
    lines += [f"before: {line}" for line in judgement.replaced]
    lines += [not_tried(judgement.not_tried)] if judgement.not_tried else []
    return [line if line.isprintable() else _printable(line) for line in lines]


def not_tried(why: str) -> str:
    """A line about a failure after which no restart follows, though some are left."""
    return f"not tried again: {why}"


def headlines(judgement: Judgement) -> list[str]:
    """The lines about an attempt that another one follows."""
    return [*verdict(judgement)[:1], *others_then(judgement)]


def others_then(judgement: Judgement) -> list[str]:
    """What the other workers executed when the first had failed."""
    if not judgement.stacks:
        return []
    from dsl.view import explain_stacks

    first, *rest = explain_stacks(judgement.stacks)
    return [f"the others at that moment: {first}", *[f"  {line}" for line in rest if line]]


def hang_lines(hang: Hang) -> list[str]:
    """Lines about a job that hangs: what its ranks do, and what follows."""
    ranks = name_workers(map(str, hang.ranks))
    following = {
        "report": "the job goes on (--hang-action report)",
        "stop": f"ending the job with exit code {HANG_CODE} (--hang-action stop)",
        "restart": f"ending {ranks}, as if it had failed (--hang-action restart)",
    }
    first = f"the job hangs, no rank has made progress for {hang.still_s:g} s: {following[hang.action]}"
    return [first, *hang.lines]


def _causes(judgement: Judgement) -> list[str]:
    """The first failure with all that is known about it, then the other failures."""
    if not judgement.causes:
        return []
    first, *others = judgement.causes
    how = "" if judgement.rivals or judgement.scope == "worker" else " first"
    how += " on this node" if how and judgement.scope == "node" else ""
    lines = [headline(first, judgement.command, how)]
    if first.cause is not None:
        lines += _details(first, first.cause)
    if judgement.rivals:
        lines.append("which of these was first cannot be known, the clocks of their hosts are too far apart:")
    for number, one in enumerate(others):
        who = "or first" if number < judgement.rivals else "also failed"
        lines.append(f"{who}: {headline(one, judgement.command)}")
    return lines


def headline(report: Report, command: str, how: str = "") -> str:
    """One line about the cause at one member. ``how`` follows "failed": `` first``."""
    if report.absence is not None:
        return absent(report.absence)
    cause, evidence = report.cause, report.evidence
    if cause is None:
        return f"host {report.host} failed with {report.code}"
    if report.server is not None:
        return _blame_server(report.server, report.host, evidence)
    pid = f", pid {cause.pid}" if cause.pid else ""
    place = f"local rank {cause.local_rank}{pid}, host {report.host}"
    if cause.noun != "rank":
        place = f"pid {cause.pid}" if cause.pid else "not started"
    # The worker recorded an error before we stopped it, so its exit shows only our signal.
    why = f"an exception, stopped by {command} ({_ending(cause)})" if cause.caused_by_stop else reason(cause)
    known = _known(evidence)
    why += known and ": " + known
    quoted = f": {evidence.said}" if _is_reason(cause, evidence) else ""
    return f"{cause.noun} {cause.name} ({place}) failed{how}: {why}{quoted}"


def absent(absence: Absence) -> str:
    """One line about a member that did not report."""
    if not absence.is_lost:
        return f"{absence.name}: {absence.why}"
    ranks = range(absence.first_rank, absence.first_rank + absence.rank_count)
    line = f"{absence.name} ({name_workers(map(str, ranks))}) was lost: {absence.why}"
    return line if absence.rank < 0 else f"rank {absence.rank} failed with {absence.status}, then {line}"


def _known(evidence: Evidence) -> str:
    return evidence.known or ("" if evidence.lines else evidence.recorded)


def _is_reason(cause: Failed, evidence: Evidence) -> bool:
    """Whether the exception in the output fits behind the exit code, and is the reason.

    It is not after SIGKILL, or if the reason is known from elsewhere.
    """
    return 0 < len(evidence.said) <= SHORT and not _known(evidence) and cause.signal != SIGKILL


def _details(report: Report, cause: Failed) -> list[str]:
    """What follows the headline of the first failure."""
    evidence, label = report.evidence, f"{cause.noun} {cause.name}"
    lines = []
    if report.server is None:
        if evidence.said and not _is_reason(cause, evidence):
            lines.append(f"  {evidence.said}")
        lines += _last_words(label, evidence)
    lines += evidence.mends
    for one in report.others:
        delay_ms = (one.ended_ns - cause.ended_ns) / 1e6
        lines.append(f"also failed: {one.noun} {one.name} ({delay_ms:+.1f} ms): {reason(one)}")
    return [*lines, *([f"also failed: {name_workers(report.more, cause.noun)}"] if report.more else [])]


def _victims(judgement: Judgement) -> list[str]:
    """How the other workers ended after the stop: by our signals, or in another way."""
    if judgement.signum is not None:
        what = end_on_request(judgement.signum, is_key=judgement.is_key, is_preemption=judgement.is_preempted)
        told = _told(judgement, judgement.after, [_answer(one, judgement.signum) for one in judgement.after])
        whole = f"{told} ended" if judgement.members > 1 else told
        return [f"{what}: {whole}"] if told else []
    if not (judgement.causes or judgement.fault or judgement.quitter or judgement.members > 1):
        return []
    lines = []
    for who, by_stop in ((f"stopped by {judgement.command}", True), ("ended because of it", False)):
        after = [one for one in judgement.after if one.by_stop == by_stop]
        told = _told(judgement, after, [f"({_ending(one)})" for one in after])
        lines += [f"{who}: {told}"] if told else []
    return lines


def _told(judgement: Judgement, after: Sequence[Alike], hows: Sequence[str]) -> str:
    """Names of workers, each group with how it ended. Of several members there are too many ways."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one, how in zip(after, hows, strict=True):
        groups.setdefault((one.noun, how if judgement.members == 1 else ""), []).extend(one.names)
    return ", ".join([f"{name_workers(names, noun)} {how}".rstrip() for (noun, how), names in groups.items()])


def _answer(one: Alike, signum: int) -> str:
    """How workers ended after a signal that ended the job."""
    if not one.is_started:
        return "not started"
    if one.signal == SIGKILL:
        return "killed (SIGKILL)"
    if signum in (one.signal, (one.code or 0) - SIGNAL_CODES):
        return "ended"
    return f"ended ({_ending(one)})"


def _blame_server(server: ServerLost, host: str, evidence: Evidence) -> str:
    """One line about a fork server that died, and its workers."""
    how = server.text if server.signum is None else f"was killed by {signal_name(server.signum)}"
    known = _known(evidence)
    return (
        f"the fork server of {name_workers(server.names, server.noun)} (pid {server.pid}, host {host}) {how}"
        f"{known and f' ({known})'}: its workers died with it"
    )


def _left(one: Survivor, judgement: Judgement) -> str:
    line = survivor(one.pid, one.state, one.name, one.wchan, one.errno)
    return line if judgement.members == 1 else f"host {one.host}: {line}"


def survivor(pid: int, state: str, name: str, wchan: str | None, errno: int | None = None) -> str:
    """A line about a surviving process, from `dsl.Ended.survivors` or from a guard."""
    if not pid and errno == ECHILD:
        why = "the fork server that would end them is gone or does not answer"
        return f"processes of the job may be left: {why}"
    if not pid:
        why = "does not show them to this user" if errno == EACCES else "cannot be read, so nobody can look"
        return f"processes of the job may be left: /proc {why}"
    if errno == EPERM:
        return f"process {pid} ({name}, state {state}) is left: no permission to end it"
    where = f" (waits in {wchan})" if wchan else ""
    return f"process {pid} ({name}, state {state}) did not die of SIGKILL{where}"


def _last_words(label: str, evidence: Evidence) -> list[str]:
    """The lines that show the worker's last output."""
    lines = []
    if evidence.lines and not evidence.is_on_screen:
        lines = [f"last output of {label}:", *[f"  | {line}".rstrip() for line in evidence.lines]]
    path, problem = evidence.log_path, evidence.log_problem
    if path and problem:
        lines.append(last_words(path, problem))
    elif path:
        lines.append(f"full log: {path}")
    return lines


def last_words(path: str, problem: str) -> str:
    """A line about a file on a disk that has no more room."""
    return f"{path} may lack its last words: {problem}, make room on its disk"


def cause_last(lines: Sequence[str]) -> list[str]:
    """The lines of a verdict with the cause last: on a terminal, people read the last lines first."""
    count = 2 if len(lines) > 1 and lines[1].startswith("  ") else 1  # a long exception has its own line
    return [*lines[count:], *lines[:count]]


def _printable(line: str) -> str:
    from dsl.words import printable

    return printable(line)


def reason(exit_: Exit | Failed) -> str:
    """One clause: ``exit code 3``, ``killed by SIGKILL (signal 9)``, ``could not be executed: ...``."""
    if exit_.exec_errno is not None:
        return _start_failure(exit_)
    if exit_.signal is not None:
        core = ", core dumped" if exit_.core_dumped else ""
        return f"killed by {signal_name(exit_.signal)} (signal {exit_.signal}{core})"
    if exit_.code is None:
        return "its exit status was lost"
    return f"exit code {exit_.code}"


def _start_failure(exit_: Exit | Failed) -> str:
    number = exit_.exec_errno or 0
    path = exit_.exec_path or ""
    target = exit_.target if hasattr(exit_, "target") else target_of(path)
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
    if number == ENOENT and target != "missing":
        hint = ", the interpreter of its #! line is missing"
    elif number == ENOENT and "/" not in path:
        hint = ", it is not on PATH"
    elif number == ENOEXEC:
        hint = ", a script needs a #! line"
    elif number == EACCES and target == "folder":
        hint = ", it is a directory"
    elif number == EACCES and target == "missing":
        hint = ", this user may not enter one of its directories"
    elif number == EACCES:
        hint = f", make it executable with chmod +x {path}"
    elif number == E2BIG:
        hint = ", its arguments and environment are too long together"
    return f"could not be executed: {path}: {text}{hint}"


def target_of(path: str) -> Literal["missing", "file", "folder"]:
    """What this machine has at a path."""
    if not os.path.exists(path):
        return "missing"
    return "folder" if os.path.isdir(path) else "file"


def file_error(number: int) -> str:
    """Why a log file cannot be opened or written; the engine reports ENXIO for a file that may block."""
    return "it is not a regular file" if number == ENXIO else os.strerror(number)


def binding_failure(stage: str, number: int) -> str:
    """Why a worker is not bound: a clause about the step of the binding that failed with this errno."""
    if stage == "affinity-check":
        return "it got other CPUs than it was bound to, the cpuset of this job may have changed"
    if stage == "mempolicy-check":
        return "it got another memory policy than it was given, the cpuset of this job may have changed"
    if stage == "affinity":
        return f"cannot be bound to its CPUs: {os.strerror(number)}"
    refused = number in (EPERM, ENOSYS)
    hint = ", a container needs the capability SYS_NICE for it, or use --mem-policy none" if refused else ""
    return f"cannot be given its memory policy: {os.strerror(number)}{hint}"


def _ending(exit_: Alike | Failed) -> str:
    if getattr(exit_, "is_started", True) is False:
        return "not started"
    if exit_.signal is not None:
        return signal_name(exit_.signal)
    return f"exit code {exit_.code}"


def name_workers(names: Iterable[str], noun: str = "rank") -> str:
    """``rank 3``, ``ranks 0-2,5``, ``hosts n1,n2``."""
    names = list(names)
    noun = f"{noun}s" if len(names) > 1 else noun
    if all(name.isdecimal() for name in names):
        return f"{noun} {format_ranges(sorted(map(int, names)))}"
    return f"{noun} {','.join(names)}"
