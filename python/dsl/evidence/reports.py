"""The facts of how an attempt ended, with what this machine knows about the cause, and what mends it.

That is the kernel's log, the end of a log file, a full disk, what the terminal still shows, and the shared
memory that killed ranks have left. Imported only when an attempt has ended otherwise than well.
"""

from __future__ import annotations

import errno
import os
import stat

from dsl._record import Record, replace
from dsl.model.judgement import (
    MOST_OTHERS,
    MOST_SURVIVORS,
    NO_EVIDENCE,
    Alike,
    Evidence,
    Failed,
    Report,
    ServerLost,
    Survivor,
)
from dsl.model.outcome import SIGNAL_CODES, own_code
from dsl.model.request import NO_POLICY
from dsl.report.speak import complain
from dsl.report.verdict import target_of
from dsl.words import name_few, parse_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl import Ended, Exit
    from dsl.model.job import NodePlan, WorkerPlan
    from dsl.model.judgement import Judgement
    from dsl.model.outcome import AttemptOutcome


SIGKILL, SIGTERM = 9, 15
STDERR = 2
USUAL_ROWS = 24
OWN_LINES = 4
"""Lines of a verdict on a terminal besides the quoted ones, including the prompt behind it."""

LONGEST_MESSAGE = 300
LONGEST_SCOPE = 160

OOM_WORDS = ("oom-kill:", "Killed process", "Out of memory", "Memory cgroup out of memory")

HANDLING = b"\nDuring handling of the above exception, another exception occurred:\n"

HEADER = b"Traceback (most recent call last):"
LAST_WORDS_NS = 1_000_000_000
"""Python may take so long to end after it has shown an exception."""

# The kernel stamps its log with a clock that differs a little from the one that we can read.
CLOCK_SLACK_S = 2.0


def with_report(attempt: AttemptOutcome) -> AttemptOutcome:
    """The attempt with its report. Error files may show that another failure came before the first death."""
    may_fail = attempt.cause is not None or attempt.stopped_ns
    if may_fail and any(one.error_file is not None for one in attempt.plan.workers):
        from dsl.report.failures import collect, root_cause

        try:
            failures = tuple(collect(attempt.plan, attempt.exits, attempt.stopped_ns))
            root = root_cause(failures).order if failures else None
        except Exception as error:  # noqa: BLE001  without error files the first death is the cause
            complain(attempt.plan.command, error)
        else:
            cause = next((one for one in attempt.exits if one.order == root), attempt.cause)
            attempt = replace(attempt, failures=failures, cause=cause)
    return replace(attempt, report=report_of(attempt))


def report_of(attempt: AttemptOutcome) -> Report:
    """The facts of how an attempt ended on this node. If evidence cannot be had, without it (G3)."""
    workers, ended, cause = attempt.plan.workers, attempt.ended, attempt.cause
    server, exits = attempt.cause_server, attempt.exits
    if server is not None:
        exits = tuple([one for one in exits if one.signal != SIGKILL or one.worker not in server.workers])
    others = [one for one in exits if one.status and not one.caused_by_stop]
    others = [one for one in others if cause is not None and one.worker != cause.worker]
    moments_ns = {one.order: one.moment_ns for one in attempt.failures}
    report = Report(
        attempt=attempt.plan.meeting.attempt,
        code=attempt.code,
        host=attempt.plan.host,
        ended=len(attempt.exits),
        cause=None if cause is None else failed(workers[cause.worker], cause, moments_ns.get(cause.order)),
        others=tuple([failed(workers[one.worker], one) for one in others[:MOST_OTHERS]]),
        more=tuple([workers[one.worker].label.name for one in others[MOST_OTHERS:]]),
        after=_after(attempt, exits),
        survivors=tuple([Survivor(*one, host=attempt.plan.host) for one in ended.survivors[:MOST_SURVIVORS]]),
        stop_signal=ended.stop_signal,
        stacks=attempt.stacks,
        stopped_ns=min([one.ended_ns for one in attempt.exits], default=0),
        is_silent=attempt.plan.job.policy != NO_POLICY and _is_silent(attempt),
    )
    if server is not None:
        labels = [workers[number].label for number in server.workers]
        names = tuple([label.name for label in labels])
        lost = ServerLost(server.pid, server.signum, server.text, labels[0].noun, names)
        report = replace(report, server=lost)
    try:
        return replace(report, evidence=evidence_of(attempt))
    except Exception as error:  # noqa: BLE001  we name the failed worker in any case (G3)
        complain(attempt.plan.command, error)
        return report


def _is_silent(attempt: AttemptOutcome) -> bool:
    """Whether the workers had no output, but for an exception that Python has shown as it ended the first."""
    first, tail = attempt.ended.first_failure, attempt.ended.tail.lstrip()
    is_traceback = HEADER in tail.partition(b"\n")[0] or tail.startswith(b'File "')
    is_late = first is not None and attempt.spoke_ns > first.ended_ns - LAST_WORDS_NS
    return not attempt.spoke_ns or (is_traceback and is_late)


def failed(worker: WorkerPlan, exit_: Exit, moment_ns: int | None = None) -> Failed:
    """The facts of how a worker failed. ``moment_ns``: when it did; None: when it died."""
    label, path = worker.label, exit_.exec_path
    who = (label.noun, label.name, worker.rank, worker.local_rank, exit_.pid)
    code = own_code(exit_.status, is_stopped=exit_.caused_by_stop)
    how = (exit_.code, exit_.signal, exit_.core_dumped, exit_.caused_by_stop)
    start = (exit_.exec_stage, exit_.exec_errno, path, "missing" if path is None else target_of(path))
    return Failed(*who, code, moment_ns or exit_.ended_ns, *how, *start)


def _after(attempt: AttemptOutcome, exits: Sequence[Exit]) -> tuple[Alike, ...]:
    """The workers that ended after a stop had begun, those together that ended alike."""
    groups: dict[Alike, list[str]] = {}
    for exit_ in exits:
        if not exit_.caused_by_stop or exit_ is attempt.cause:
            continue
        label = attempt.plan.workers[exit_.worker].label
        is_started = exit_.exec_stage != "cancelled"
        code, signum = (exit_.code, exit_.signal) if is_started else (None, None)
        alike = Alike((), _by_stop(exit_, attempt.ended), code, signum, is_started, label.noun)
        groups.setdefault(alike, []).append(label.name)
    return tuple([replace(alike, names=tuple(names)) for alike, names in groups.items()])


def _by_stop(exit_: Exit, ended: Ended) -> bool:
    """Whether the stop ended a worker: by one of our signals, or before the worker was started.

    An exit code may stand for a signal, as in a shell. A worker with another exit code may have lost its
    peer, or may have handled our signal in its own way.
    """
    signum = exit_.signal if exit_.signal is not None else (exit_.code or 0) - SIGNAL_CODES
    return exit_.exec_stage == "cancelled" or signum in (SIGTERM, SIGKILL, ended.stop_signal)


def evidence_of(attempt: AttemptOutcome) -> Evidence:
    """What is known about the cause of an attempt besides its exit."""
    cause, ended = attempt.cause, attempt.ended
    if cause is None:
        return NO_EVIDENCE
    worker = attempt.plan.workers[cause.worker]
    path, known, words = worker.log_path, "", None
    first = ended.first_failure
    tail = ended.tail if first is not None and cause.worker == first.worker else b""
    tail = _without_lost_record(tail or (last_bytes(path) if path is not None else b""), worker.error_file)
    timer = attempt.cause_timer
    if timer is not None:
        scope = timer.scope if len(timer.scope) <= LONGEST_SCOPE else f"{timer.scope[: LONGEST_SCOPE - 3]}..."
        known = f"its timer {scope!r} had expired"
    elif attempt.cause_hang is not None:
        known = attempt.cause_hang.why
    elif cause.signal == SIGKILL:
        known = memory_evidence(cause, kernel_log(attempt.begin_s), ended.oom_kills)
    if tail:
        from dsl.evidence.excerpt import excerpt

        words = excerpt(tail)
    recorded = [one.recorded.message for one in attempt.failures if one.order == cause.order and one.recorded]
    where = f" ({words.where})" if words is not None and words.where else ""
    lines = () if words is None else words.lines
    is_out_of_memory = cause.signal == SIGKILL and not (timer or attempt.cause_hang) and bool(known)
    return Evidence(
        known=known,
        is_out_of_memory=is_out_of_memory,
        recorded=" ".join(recorded[0].split())[:LONGEST_MESSAGE] if recorded else "",
        said=words.exception + where if words is not None and words.exception else "",
        lines=lines,
        log_path=path,
        log_problem=space_problem(path) if path is not None else "",
        is_on_screen=_is_on_screen(len(lines), ended.shown_since),
        mends=hints(Death(attempt.plan, worker, cause.signal, is_out_of_memory, lines)),
    )


def _is_on_screen(quoted: int, shown_since: int | None) -> bool:
    """Whether the terminal still shows the lines to quote: they fit on its screen with all lines since."""
    return shown_since is not None and 0 < quoted <= _free_rows() - shown_since


def seen_on_screen(judgement: Judgement, recent: bytes) -> Judgement:
    """The judgement without the output that a head's terminal still shows. ``recent``: its last bytes."""
    first, *others = judgement.causes
    rows = _free_rows()
    window = iter(recent.decode(errors="replace").splitlines()[-rows:] if rows > 0 else ())
    quoted = first.evidence.lines
    if not quoted or not all(any(line in shown for shown in window) for line in quoted):
        return judgement
    first = replace(first, evidence=replace(first.evidence, is_on_screen=True))
    return replace(judgement, causes=(first, *others))


def _free_rows() -> int:
    """Rows of the terminal beside the verdict's own lines; less than 1 without a terminal."""
    try:
        return (os.get_terminal_size(STDERR).lines or USUAL_ROWS) - OWN_LINES
    except OSError:
        return 0


def memory_evidence(exit_: Exit, kernel_log: Sequence[str], oom_kills: int) -> str:
    """The evidence for an out-of-memory kill: the kernel's line about the pid, or a counter that moved."""
    if exit_.signal != SIGKILL:
        return ""
    peak = f"peak memory {exit_.max_rss_bytes / 2**20:.0f} MiB"
    for line in kernel_log:
        if f"process {exit_.pid} " in line or f"pid={exit_.pid}," in line:
            return f"the kernel killed it because memory ran out ({peak})"
    if oom_kills > 0:
        return f"memory of this job's cgroup ran out ({oom_kills} out-of-memory kill, {peak})"
    return ""


def kernel_log(since_s: float = 0.0) -> list[str]:
    """Lines of the kernel's log about out-of-memory kills; empty if we may not read the log.

    ``since_s`` is a value of `time.monotonic`. Older lines may be about an earlier process with the same pid.
    """
    lines: list[str] = []
    try:
        with open("/dev/kmsg", "rb", buffering=0, opener=_at_once) as log:
            for _ in range(20_000):
                try:
                    line = (log.read(8192) or b"").decode(errors="replace")
                except BrokenPipeError:
                    continue  # the oldest lines were overwritten meanwhile
                if not line:
                    break
                if any(word in line for word in OOM_WORDS) and _stamp_s(line) >= since_s - CLOCK_SLACK_S:
                    lines.append(line)
    except OSError:
        return lines
    return lines


def _at_once(path: str, flags: int) -> int:
    """Open a file that nobody may be ready to fill."""
    return os.open(path, flags | os.O_NONBLOCK)


def _stamp_s(record: str) -> float:
    """Time of a record, ``PRIORITY,SEQUENCE,MICROSECONDS,...;TEXT``."""
    fields = record.partition(";")[0].split(",")
    return int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdecimal() else float("inf")


def last_bytes(path: str, count: int = 16384) -> bytes:
    """The end of a log file; empty when it cannot be read."""
    try:
        with open(path, "rb", buffering=0, opener=_at_once) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - count))
            return file.read(count) or b""
    except OSError:
        return b""


def space_problem(path: str) -> str:
    """Why nothing more fits into the directory of this file; empty if there is space, or we cannot try.

    We try by writing to a file without a name: unlike the file system's counters, that includes quotas.
    """
    flags = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
    try:
        with open(os.open(os.path.dirname(path) or ".", flags, 0o600), "wb", buffering=0) as file:
            file.write(bytes(8192))
    except OSError as error:
        return os.strerror(error.errno) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ""


def _without_lost_record(tail: bytes, error_file: str | None) -> bytes:
    """The last output of a worker, up to where torch's ``@record`` failed to write the error file.

    The directory of that file may have been removed. The exception to record comes before that failure.
    """
    if error_file is None:
        return tail
    lost = tail.rfind(f"No such file or directory: {error_file!r}".encode())
    handling = tail.rfind(HANDLING, 0, max(lost, 0))
    return tail[:handling] if handling >= 0 else tail


SIGBUS = 7
SHM_WORDS = ("out of shared memory", "insufficient shared memory", "creating shared memory", "file </torch_")
"""What torch and NCCL say if /dev/shm is full."""
OPTIONS = {"--local-rank": "dash", "--local_rank": "underscore"}
"""How a script may be told its local rank, with the word of ``--local-rank-arg``."""


class Death(Record):
    """What is known about a worker that failed. ``lines``: those of its last output that tell most."""

    plan: NodePlan
    worker: WorkerPlan
    signum: int | None = None
    is_out_of_memory: bool = False
    lines: tuple[str, ...] = ()


def hints(death: Death) -> tuple[str, ...]:
    """What to do about it, for each cause that it has."""
    return tuple([text for row in ROWS if (text := row(death))])


def _memory(death: Death) -> str:
    if not death.is_out_of_memory:
        return ""
    from dsl.machine.kernel import room_left

    limit = room_left().memory_limit
    mend = "raise it (docker run --memory, sbatch --mem, the limits of a pod), or start fewer workers"
    return f"{limit} limits the memory of this job: {mend}" if limit else ""


def _shared_memory(death: Death) -> str:
    if death.signum != SIGBUS and not any(word in line for word in SHM_WORDS for line in death.lines):
        return ""
    from dsl.machine.kernel import shared_memory

    size, free = shared_memory()
    room = f"it has {size >> 20} MB, {size - free >> 20} MB are in use now"
    mend = "start the container with --shm-size=8g, in Kubernetes mount an emptyDir with medium: Memory there"
    return f"a full /dev/shm is the usual reason: {room}; {mend}" if size else ""


def _input(death: Death) -> str:
    """Of a debugger or a prompt without input, if another worker of its node has that of the command."""
    worker, lines, workers = death.worker, death.lines, death.plan.workers
    has_quit = any("bdb.BdbQuit" in line or "Quitting pdb will kill the process" in line for line in lines)
    is_prompt = "EOFError" in "".join(lines[-1:]) and any("input(" in line for line in lines[-4:])
    if worker.stdin or not (has_quit or is_prompt) or not any(one.stdin for one in workers):
        return ""
    mend = f"--stdin {worker.rank} gives it the standard input of {death.plan.command}"
    return f"{worker.label.noun} {worker.label.name} has nothing to read: {mend}"


def _environment(death: Death) -> str:
    """Not if a link leads to another interpreter: so it is in every virtual environment."""
    env = {**death.plan.env, **death.worker.env}
    active = [(name, env[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name)]
    python = next(iter(death.worker.argv), "")
    folders = [os.path.realpath(os.path.join(path, "bin")) for _, path in active]
    lacks = any(line.startswith("ModuleNotFoundError: No module named ") for line in death.lines)
    is_there = os.path.realpath(os.path.dirname(python)) in folders
    if is_there or not (lacks and active and "python" in os.path.basename(python)):
        return ""
    name, path = active[0]
    other = f", or set PYTHON_EXEC={path}/bin/python" if death.plan.command == "dslrun" else ""
    return f"{name} is {path}, but the workers run {python}: install dsl there{other}"


def _local_rank(death: Death) -> str:
    """Of the option that we give to the script, or that it misses."""
    line = next((line for line in reversed(death.lines) if ": error: " in line), "")
    command, (dash, underscore) = death.plan.command, OPTIONS
    for mine, other in ((dash, underscore), (underscore, dash)):
        is_told = any(word.startswith(f"{mine}=") for word in death.worker.argv)
        if is_told and f"unrecognized arguments: {mine}=" in line:
            if command == "dsl":
                return "--no_local_rank leaves out the option, for scripts that read LOCAL_RANK"
            return f"--local-rank-arg {OPTIONS[other]} passes {other}=N, and --use-env leaves out the option"
        if command == "dslrun" and "arguments are required: " in line and mine in line:
            return f"--local-rank-arg {OPTIONS[mine]} passes {mine}=N"
    return ""


ROWS = (_memory, _shared_memory, _input, _environment, _local_rank)


SHM = "/dev/shm"  # noqa: S108  the shared memory itself, where nothing is made
WITH_PID = ("torch_", "__KMP_REGISTERED_LIB_")
"""Begins of the names that torch and OpenMP choose, before the pid of the process that makes the segment."""
OTHERS = ("psm_", "nccl-", "cuda.shm.", "sem.")
"""Begins of the names that Python, NCCL, CUDA and the C library choose."""
FIRST_NAMESPACE = 0xEFFFFFFC


def clear_segments(exits: Sequence[Exit], folder: str = SHM) -> list[str]:
    """Remove what killed workers have left there without doubt, and say what was removed and what is left.

    Without doubt is what has the pid of a worker in its name, was written in its life, and is open nowhere.
    Only the first pid namespace shows all processes, and gives a pid to one of them alone.
    """
    killed = {one.pid: one for one in exits if one.signal is not None}
    since_ns = min([one.started_ns for one in killed.values()], default=0)
    is_first = os.stat("/proc/self/ns/pid").st_ino == FIRST_NAMESPACE
    found: dict[str, bool] = {}
    for entry in os.scandir(folder) if killed and os.path.isdir(folder) else ():
        try:
            about, end = entry.stat(follow_symlinks=False), entry.name
        except FileNotFoundError:  # another job has removed it meanwhile
            continue
        for begin in WITH_PID:
            end = end.removeprefix(begin)
        maker = killed.get(parse_number(end.partition("_")[0]) or 0) if end != entry.name else None
        is_segment = stat.S_ISREG(about.st_mode) and entry.name.startswith((*WITH_PID, *OTHERS))
        if is_segment and about.st_uid == os.geteuid() and about.st_mtime_ns >= since_ns:
            found[entry.path] = is_first and maker is not None and about.st_mtime_ns <= maker.ended_ns
    left = sorted(found.keys() - _used(folder)) if found else []
    removed = [path for path in left if found[path]]
    for path in removed:
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
    left = [path for path in left if not found[path]]
    lines = [f"removed shared memory that killed ranks had left: {name_few(removed)}"] if removed else []
    why = "killed ranks may have left shared memory, remove what no other job needs"
    return [*lines, f"{why}: {name_few(left)}"] if left else lines


def _used(folder: str) -> set[str]:
    """Files of the folder that a process has mapped or open, as far as we may see."""
    from contextlib import suppress  # takes longer to import than most reports to make
    from glob import iglob

    used = set()
    for path in iglob("/proc/[0-9]*/maps"):
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            used |= {folder + line.rstrip("\n").partition(folder)[2] for line in file if folder in line}
    for path in iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):
            used.add(os.readlink(path))
    return used
