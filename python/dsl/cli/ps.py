"""``dsl-ps``: the running jobs of this user on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import time

from dsl.cli.command import Command
from dsl.lists import quote
from dsl.observe.jobs import running_jobs
from dsl.observe.table import cut, duration
from dsl.report.speak import show_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from dsl.cli.help import ToolParser
    from dsl.model.observation import JobView

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
    jobs = [_job(one.view) for one in running_jobs()]
    if options.json:
        from json import dumps

        show_text(dumps({"schema": SCHEMA, "jobs": jobs}, indent=2))
    else:
        show_text("\n".join(table([TITLES, *map(_row, jobs)], terminal_width())))
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
    age_s = max(time.time() - job["started_ns"] / 1e9, 0.0)
    nodes = str(job["nodes"]) if job["is_whole"] else "part"
    program = " ".join(quote(word) if " " in word else word for word in job["program"])
    state = "running" if not job["attempt"] else f"attempt {job['attempt'] + 1}"
    return (str(job["pid"]), state, duration(age_s), nodes, str(job["ranks"]), str(job["restarts"]), program)


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
