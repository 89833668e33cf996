"""``dsl-ps``, ``dsl-stacks`` and ``dsl-top``: the running jobs of this user, and what their ranks do."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from json import dumps

from dsl.cli.tool import Tool, ToolParser
from dsl.errors import DslError, JobFormatError, OptionError
from dsl.lists import quote
from dsl.machine.this_process import can_move_cursor
from dsl.model.codec import to_plain
from dsl.model.observation import NodeStacks
from dsl.printable import printable
from dsl.report.speak import show_text
from dsl.view.explain import explain
from dsl.view.jobs import call_jobs, find_job, the_job
from dsl.view.table import Layout, cells, cut, duration, headline, in_order, make_rows, totals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from dsl.model.observation import JobView, Sight
    from dsl.view.jobs import RunningJob, SilentJob

SCHEMA = 1
"""Raised when a key of some JSON is removed or changes its meaning; new keys may come at any time."""
JSON_HELP = "write JSON, with keys that stay (docs/cli.md)"

LEAST_TEXT = 12
"""Narrowest last column."""
TITLES = ("JOB", "STATE", "TIME", "NODES", "RANKS", "RESTARTS", "PROGRAM")

REFRESH_S = 2.0
LEAST_REFRESH_S = 0.2
MOST_REFRESH_S = 300.0
ONCE_S = 0.5
"""How long one table looks at the CPU time."""


def _look(job: RunningJob, what: Sight) -> tuple[list[Any], tuple[str, ...]]:
    """As `RunningJob.look`, but whatever goes wrong is a DslError."""
    try:
        return job.look(what)
    except (OSError, JobFormatError) as error:
        raise DslError(f"job {job.view.pid} does not answer: {error}") from None


# ---------------------------------------------------------------------- dsl-ps


def _ps(options: argparse.Namespace) -> int:
    answered, silent = call_jobs(tell=PS.say)
    jobs = [_job(one.view) for one in answered]
    if options.json:
        others = [{"pid": one.pid, "program": one.words, "started_ns": one.started_ns} for one in silent]
        show_text(dumps({"schema": SCHEMA, "jobs": jobs, "no_answer": others}, indent=2))
    else:
        rows = [*map(_row, jobs), *map(_silent_row, silent)]
        show_text("\n".join(table([TITLES, *rows], terminal_width())))
    return 0


def terminal_width() -> int | None:
    """Columns of the terminal on stdout; None: it is none."""
    return shutil.get_terminal_size().columns if os.isatty(1) else None


def _job(view: JobView) -> dict[str, Any]:
    return {
        "pid": view.pid,
        "command": view.command,
        "program": list(view.words),
        "cwd": view.cwd,
        "host": view.host,
        "started_ns": view.started_ns,
        "attempt": view.attempt,
        "restarts": view.restarts,
        "nodes": view.nodes,
        "ranks": view.workers,
        "is_whole": view.is_whole,
        "version": view.version,
    }


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    nodes = str(job["nodes"]) if job["is_whole"] else "part"
    state = "running" if not job["attempt"] else f"attempt {job['attempt'] + 1}"
    counts = (nodes, str(job["ranks"]), str(job["restarts"]))
    return (str(job["pid"]), state, _age(job["started_ns"]), *counts, _program(job["program"]))


def _silent_row(job: SilentJob) -> tuple[str, ...]:
    """What is known of a job that is stopped: the command line of its command stands for the program."""
    age = "" if job.started_ns is None else _age(job.started_ns)
    return (str(job.pid), "no answer", age, "", "", "", _program(job.words))


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


# ---------------------------------------------------------------------- dsl-stacks


def _stacks(options: argparse.Namespace) -> int:
    job = the_job(options.job or "", STACKS.say)
    answers, missing = _look(job, "native" if options.native else "stacks")
    nodes = [one for one in answers if isinstance(one, NodeStacks)]
    lines = explain(nodes, missing)
    if not options.json:
        show_text("\n".join(lines))
        return 0
    found = [to_plain(one)["NodeStacks"] for one in nodes]
    show_text(
        dumps({"schema": SCHEMA, "explanation": lines[0], "nodes": found, "missing": missing}, indent=2)
    )
    return 0


def _add_stacks(parser: ToolParser) -> None:
    parser.add_job("pid of the job's command, as dsl-ps shows it")
    text = "show frames of C and C++, too; each rank is stopped for a moment"
    parser.add_argument("--native", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


STACKS = Tool(
    "dsl-stacks",
    "[OPTIONS] [JOB]",
    "Tell what the ranks of a running job do, and which of them do not what the others do.",
    _add_stacks,
    _stacks,
)


# ---------------------------------------------------------------------- dsl-top


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
