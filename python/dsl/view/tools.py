"""The commands about jobs: ``dsl-ps``, ``dsl-stacks``, ``dsl-top``, ``dsl-attach`` and ``dsl-wait``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from json import dumps
from typing import Any, NoReturn

from dsl.agent.session import die_of_interrupt
from dsl.cli.tool import Tool, ToolParser
from dsl.errors import DslError, JobFolderError, JobFormatError, OptionError, UsageError
from dsl.machine import can_move_cursor
from dsl.model.codec import to_plain
from dsl.model.observation import JobView, NodeStacks, Sight
from dsl.output.job_folders import KILLED, BackgroundJob, JobFolders
from dsl.report.speak import show_text, unwritten
from dsl.view.explain import explain_stacks
from dsl.view.jobs import RunningJob, SilentJob, call_jobs, find_job
from dsl.view.table import Layout, cells, cut, duration, headline, in_order, make_rows, totals
from dsl.words import ENDING, parse_number, printable, quote

SCHEMA = 1
"""Raised when a key of some JSON is removed or changes its meaning; new keys may come at any time."""
JSON_HELP = "write JSON, with keys that stay (docs/tools.md)"

NAMES = ("pid", "command", "cwd", "host", "started_ns", "attempt", "restarts", "nodes", "is_whole", "version")
"""Keys of the JSON that are fields of a job's view."""

LEAST_TEXT = 12
"""Narrowest last column."""
TITLES = ("JOB", "STATE", "TIME", "NODES", "RANKS", "RESTARTS", "PROGRAM")

MOST_SAMPLED_S = 60
MOST_ROWS = 32
"""Ranks whose shares are shown: those that wait least."""

REFRESH_S = 2.0
LEAST_REFRESH_S = 0.2
MOST_REFRESH_S = 300.0
ONCE_S = 0.5
"""How long one table looks at the CPU time."""


def _look(job: RunningJob, what: Sight, for_s: int = 0) -> tuple[list[Any], tuple[str, ...]]:
    """As `RunningJob.look`, but whatever goes wrong is a DslError."""
    try:
        return job.look(what, for_s=for_s)
    except (OSError, JobFormatError) as error:
        raise DslError(f"job {job.view.pid} does not answer: {error}") from None


def _ps(options: argparse.Namespace) -> int:
    answered, silent = call_jobs(tell=PS.say)
    jobs = [_job(job.view) for job in answered]
    known = {*[job["pid"] for job in jobs], *[job.pid for job in silent]}
    bare = {"no_answer": silent, "waiting": _waiting(known)}
    if options.json:
        others = {
            name: [{"pid": job.pid, "program": job.words, "started_ns": job.started_ns} for job in some]
            for name, some in bare.items()
        }
        show_text(dumps({"schema": SCHEMA, "jobs": jobs, **others}, indent=2))
    else:
        rows = [_bare_row(name.replace("_", " "), job) for name, some in bare.items() for job in some]
        show_text("\n".join(table([TITLES, *map(_row, jobs), *rows], terminal_width())))
    return 0


def _waiting(known: Container[int]) -> list[SilentJob]:
    """The jobs in the background, beside the known ones, that wait for other nodes or hosts."""
    with suppress(JobFolderError):  # nothing of this user can be there
        begun = [job.begun for job in JobFolders(os.environ).jobs() if not job.is_over()]
        return [SilentJob(one.pid, one.words, one.started_ns) for one in begun[::-1] if one.pid not in known]
    return []


def terminal_width() -> int | None:
    """Columns of the terminal on stdout; None: it is none."""
    return shutil.get_terminal_size().columns if os.isatty(1) else None


def _job(view: JobView) -> dict[str, Any]:
    known = {name: getattr(view, name) for name in NAMES}
    return {**known, "program": list(view.words), "ranks": view.workers}


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    nodes = str(job["nodes"]) if job["is_whole"] else "part"
    state = "running" if not job["attempt"] else f"attempt {job['attempt'] + 1}"
    counts = (nodes, str(job["ranks"]), str(job["restarts"]))
    return (str(job["pid"]), state, _age(job["started_ns"]), *counts, _program(job["program"]))


def _bare_row(state: str, job: SilentJob) -> tuple[str, ...]:
    """What is known of a job that does not say what it is: the command line stands for the program."""
    age = "" if job.started_ns is None else _age(job.started_ns)
    return (str(job.pid), state, age, "", "", "", _program(job.words))


def _age(started_ns: int) -> str:
    return duration(max(time.time() - started_ns / 1e9, 0.0))


def _program(words: Sequence[str]) -> str:
    return " ".join(quote(word) if " " in word else printable(word) for word in words)


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Lines with the cells of the rows in columns. ``width``: the last column is shortened to fit into it."""
    *widths, _ = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *others, last in rows:
        begin = "".join([f"{cell.ljust(size)}  " for cell, size in zip(others, widths, strict=True)])
        lines.append(begin + (last if width is None else _fitted(last, max(width - len(begin), LEAST_TEXT))))
    return lines


def _fitted(text: str, room: int) -> str:
    """Text without its end, and first without the middle of its long words: a path ends with its name."""
    if cut(text, room) != text:
        text = " ".join([_without_middle(word, room - 2) for word in text.split(" ")])
    return text if cut(text, room) == text else f"{cut(text, room - 1)}…"


def _without_middle(word: str, room: int) -> str:
    return word if len(word) <= room else f"{word[: room // 3]}…{word[room // 3 + 1 - room :]}"


PS = Tool(
    "dsl-ps",
    "[OPTIONS]",
    "List your running jobs on this machine.",
    lambda parser: parser.add_argument("--json", action="store_true", help=JSON_HELP),
    _ps,
)


def _stacks(options: argparse.Namespace) -> int:
    if options.flame_graph and options.for_s is None:
        raise OptionError("--flame-graph needs times: add --for SECONDS")
    if options.for_s is not None and options.native:
        raise OptionError("--native takes no time: leave out --for, or --native")
    word = options.job or ""
    job = find_job(word, *call_jobs(word, STACKS.say))
    if options.for_s is not None:
        return _sample(job, options)
    answers, missing = _look(job, "native" if options.native else "stacks")
    nodes = [node for node in answers if isinstance(node, NodeStacks)]
    lines = explain_stacks(nodes, missing)
    if not options.json:
        show_text("\n".join(lines))
        return 0
    found = [to_plain(node)["NodeStacks"] for node in nodes]
    show_text(
        dumps({"schema": SCHEMA, "explanation": lines[0], "nodes": found, "missing": missing}, indent=2)
    )
    return 0


def _sample(job: RunningJob, options: argparse.Namespace) -> int:
    """Tell how the ranks spend the next seconds."""
    from dsl.machine.files import reason, write_output
    from dsl.view import stragglers

    answers, missing = _look(job, "samples", options.for_s)
    nodes = [node for node in answers if isinstance(node, NodeStacks)]
    spent, lines = stragglers.all_spent(nodes), stragglers.explain_samples(nodes, missing)
    if options.flame_graph:
        try:
            write_output(options.flame_graph, stragglers.collapsed(nodes).encode())
        except (OSError, ValueError) as error:
            where, why = options.flame_graph, reason(error)
            raise DslError(f"--flame-graph {where!r} cannot be written: {why}, choose another file") from None
    if options.json:
        ranks = [stragglers.figures(one) for one in spent]
        show_text(
            dumps({"schema": SCHEMA, "explanation": lines[0], "ranks": ranks, "missing": missing}, indent=2)
        )
        return 0
    rows = stragglers.rows_of(spent[:MOST_ROWS])
    more = [f"{len(spent) - MOST_ROWS} more ranks wait more"] if len(spent) > MOST_ROWS else []
    show_text(
        "\n".join(
            [*lines, "", *table([stragglers.TITLES, *rows], terminal_width()), *more] if rows else lines
        )
    )
    return 0


def _add_stacks(parser: ToolParser) -> None:
    parser.add_job("pid of the job's command, as dsl-ps shows it")
    text = "show frames of C and C++, too; each rank is stopped for a moment"
    parser.add_argument("--native", action="store_true", help=text)
    text = "sample all ranks for so long (1 to 60), and tell which of them holds the others up"
    parser.add_argument("--for", dest="for_s", metavar="SECONDS", type=_seconds, help=text)
    text = "file for the stacks of --for, as py-spy record --format raw writes them"
    parser.add_argument("--flame-graph", metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def _seconds(text: str) -> int:
    number = parse_number(text)
    if number is None or not 1 <= number <= MOST_SAMPLED_S:
        raise argparse.ArgumentTypeError(f"expected 1 to {MOST_SAMPLED_S} seconds: {quote(text)}")
    return number


STACKS = Tool(
    "dsl-stacks",
    "[OPTIONS] [JOB]",
    "Tell what the ranks of a running job do, and which of them do not what the others do.",
    _add_stacks,
    _stacks,
)


def _top(options: argparse.Namespace) -> int:
    if not LEAST_REFRESH_S <= options.delay <= MOST_REFRESH_S:
        raise OptionError(f"-d takes {LEAST_REFRESH_S:g} to {MOST_REFRESH_S:g} seconds")
    is_live = not options.once and sys.stdin.isatty() and sys.stdout.isatty() and can_move_cursor()
    if is_live:
        try:
            from dsl.view.top_screen import TopApp
        except ImportError as error:
            name = (error.name or "").partition(".")[0]
            if name not in ("textual", "rich"):
                raise
            raise DslError(
                "the live view needs textual: pip install textual, or give --once for one table"
            ) from None
    word = options.job or ""
    jobs, silent = call_jobs(word, TOP.say)
    if not is_live:
        return _print_once(find_job(word, jobs, silent))
    # With several jobs the user chooses on the screen.
    chosen = find_job(word, jobs, silent) if word or len(jobs) < 2 else None
    for job in jobs:
        job.close()
    return TopApp(options.delay, chosen).run() or 0


def _add_top(parser: ToolParser) -> None:
    parser.add_job("pid of the job, as dsl-ps shows it")
    parser.add_argument(
        "-d", "--delay", metavar="SECONDS", type=float, default=REFRESH_S, help="time between two looks"
    )
    parser.add_argument("--once", action="store_true", help="print one table, as without a terminal")


def _print_once(job: RunningJob) -> int:
    before, _ = _look(job, "status")
    time.sleep(ONCE_S)
    now, missing = _look(job, "status")
    rows = in_order(make_rows(before, now), "RANK")
    texts = [cells(row) for row in rows]
    layout = Layout(texts, terminal_width())
    lines = [headline(job.view, now, time.time()), totals(rows)]
    lines += [f"host {host} has not answered" for host in missing]
    show_text("\n".join([*lines, layout.title(), *map(layout.line, texts)]))
    return 0


TOP = Tool(
    "dsl-top",
    "[OPTIONS] [JOB]",
    "Show what the ranks of a running job do, on all hosts. ? shows the keys.",
    _add_top,
    _top,
)


JOB_HELP = "pid of the job (default: the newest that runs, or else the newest)"

PAUSE_S = 0.1
"""How often we look whether a silent job has written something."""

READ_BYTES = 1 << 16


class Detached(BaseException):
    """A signal has ended the command, not the job."""


def _wait_for_all(options: argparse.Namespace) -> int:
    """Wait for the jobs. Returns the first exit code that is not 0, in their order."""
    folders = JobFolders(os.environ)
    jobs = [folders.find(word) or no_such_job(word) for word in options.jobs or [""]]
    codes = [_wait(job, WAIT) for job in jobs]
    return next((code for code in codes if code), 0)


def no_such_job(word: str) -> NoReturn:
    """Raise UsageError."""
    which = f"no job {quote(word)}" if word else "no job"
    raise UsageError(f"{which} of yours has gone to the background on this host (dsl --detach)")


def _wait(job: BackgroundJob, tool: Tool) -> int:
    """Wait for a job, and return its exit code. ``tool`` says why a job has none."""
    job.wait()
    end = job.end()
    if end is None:
        tool.say(f"job {job.pid} has left no exit code: its guard was killed")
        return KILLED
    return end.code


WAIT = Tool(
    "dsl-wait",
    "[OPTIONS] [JOB ...]",
    "Wait for jobs that dsl --detach has started, and end with their exit code.",
    lambda parser: parser.add_job(JOB_HELP, name="jobs", nargs="*"),
    _wait_for_all,
    "The exit code is the first that is not 0, in the order of the jobs; 2 if there is no such job.",
)


def _attach(options: argparse.Namespace) -> int:
    """Show the output of a job. Returns its exit code, 0 for a job that a shell waits for.

    A signal ends this process alone, with the exit code of that signal.
    """
    found = _find(options.job or "")
    if isinstance(found, RunningJob):
        return _until_signal(found.view.pid, lambda: _follow(found))
    return _until_signal(found.pid, lambda: _show_all(found, options.lines))


def _find(word: str) -> BackgroundJob | RunningJob:
    """The job that the user means: in the background, or else one that runs elsewhere. Raises DslError."""
    kept = JobFolders(os.environ).find(word)
    if kept is not None and not kept.is_over():
        return kept
    jobs, silent = call_jobs(word, ATTACH.say)
    running = [job for job in jobs if word in ("", str(job.view.pid))]
    is_silent = any(word in ("", str(job.pid)) for job in silent)
    is_here = running or (is_silent and kept is None)
    found = find_job(word, running, silent) if is_here else kept or no_such_job(word)
    for job in jobs:
        if job is not found:
            job.close()
    return found


def _until_signal(pid: int, work: Callable[[], int]) -> int:
    for signum in ENDING:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _detach)
    try:
        return work()
    except Detached as detached:
        signum = int(detached.args[0])
        ATTACH.say(f"job {pid} runs on; dsl-attach {pid} comes back to it")
        if signum == signal.SIGINT:
            die_of_interrupt()
        return 128 + signum


def _follow(job: RunningJob) -> int:
    """Write what a job shows from now on, after its last lines. Its exit code is for its own shell."""
    try:
        for data in job.follow():
            _write(data)
    except (OSError, JobFormatError) as error:
        raise DslError(f"job {job.view.pid} cannot be followed any more: {error}") from None
    ATTACH.say(f"job {job.view.pid} has ended; the shell that has started it has its exit code")
    return 0


def _show_all(job: BackgroundJob, lines: int | None) -> int:
    """Write the output of a job to its end, and return its exit code. ``lines``: begin with the last ones."""
    try:
        output = job.open_output()
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise UsageError(f"the output of job {job.pid} cannot be read: {reason}") from None
    if lines is not None:
        os.lseek(output, start_of(output, lines), os.SEEK_SET)
    is_over, is_whole = False, True
    while not is_over:
        is_over = job.is_over()  # asked first: then all that it has written is there
        while data := os.read(output, READ_BYTES):
            _write(data)
            is_whole = data.endswith(b"\n")
        if not is_over:
            time.sleep(PAUSE_S)
    words = job.words()
    _write(words if is_whole or not words else b"\n" + words)
    return _wait(job, ATTACH)


def start_of(output: int, lines: int, block_bytes: int = READ_BYTES) -> int:
    """Where the last so many lines of a file begin. ``block_bytes`` are read at a time, from the end."""
    at = os.fstat(output).st_size
    if lines == 0 or at == 0:
        return at
    at -= os.pread(output, 1, at - 1) == b"\n"  # it ends the last line, and begins none
    while at:
        begin = max(0, at - block_bytes)
        block = os.pread(output, at - begin, begin)
        end = len(block)
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            lines -= 1
            if lines == 0:
                return begin + end + 1
        at = begin
    return 0


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError as error:
        raise unwritten(error) from None


def _detach(signum: int, _frame: object) -> None:
    raise Detached(signum)


def _add_attach(parser: ToolParser) -> None:
    parser.add_job(JOB_HELP)
    parser.add_argument("-n", "--lines", metavar="N", type=_count, help="begin with the last N lines")


def _count(text: str) -> int:
    number = parse_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"expected a number of lines: {quote(text)}")
    return number


ATTACH = Tool(
    "dsl-attach",
    "[OPTIONS] [JOB]",
    "Follow the output of a job. Ctrl-C does not end the job.",
    _add_attach,
    _attach,
)
