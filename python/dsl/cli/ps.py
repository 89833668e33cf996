"""``dsl-ps``: the running jobs of this user on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import time

from dsl.cli.command import Command
from dsl.lists import quote
from dsl.observe.jobs import call_jobs
from dsl.observe.table import cut, duration
from dsl.printable import printable
from dsl.report.speak import show_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from dsl.cli.help import ToolParser
    from dsl.model.observation import JobView
    from dsl.observe.jobs import SilentJob

COMMAND = Command("dsl-ps")
SCHEMA = 1
"""Raised when a key of the JSON is removed or changes its meaning; new keys may come at any time."""

LEAST_TEXT = 12
"""Narrowest last column."""

TITLES = ("JOB", "STATE", "TIME", "NODES", "RANKS", "RESTARTS", "PROGRAM")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the jobs. The exit code is 0; ``argv`` does not include the program's name."""
    return COMMAND.run(lambda: _run(make_parser().parse_args(argv)))


def _run(options: argparse.Namespace) -> int:
    answered, silent = call_jobs(tell=COMMAND.say)
    jobs = [_job(one.view) for one in answered]
    if options.json:
        from json import dumps

        others = [{"pid": one.pid, "program": one.words, "started_ns": one.started_ns} for one in silent]
        show_text(dumps({"schema": SCHEMA, "jobs": jobs, "no_answer": others}, indent=2))
    else:
        rows = [*map(_row, jobs), *map(_silent_row, silent)]
        show_text("\n".join(table([TITLES, *rows], terminal_width())))
    return 0


def terminal_width() -> int | None:
    """Columns of the terminal on stdout; None: it is none."""
    return shutil.get_terminal_size().columns if os.isatty(1) else None


def make_parser() -> ToolParser:
    """The parser of the options."""
    from dsl.cli.help import ToolParser

    parser = ToolParser(COMMAND.name, "[OPTIONS]", "List your running jobs on this machine.")
    parser.add_argument("--json", action="store_true", help="write JSON, with keys that stay (docs/cli.md)")
    return parser


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
    for *cells, last in rows:
        begin = "".join([f"{cell.ljust(size)}  " for cell, size in zip(cells, widths, strict=True)])
        lines.append(begin + (last if width is None else _fitted(last, max(width - len(begin), LEAST_TEXT))))
    return lines


def _fitted(text: str, room: int) -> str:
    """Text without its end, and first without the middle of its long words: a path ends with its name."""
    if cut(text, room) != text:
        text = " ".join([_without_middle(word, room - 2) for word in text.split(" ")])
    return text if cut(text, room) == text else f"{cut(text, room - 1)}…"


def _without_middle(word: str, room: int) -> str:
    return word if len(word) <= room else f"{word[: room // 3]}…{word[room // 3 + 1 - room :]}"
