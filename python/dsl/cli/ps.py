"""``dsl-ps``: the running jobs of this user on this machine."""

from __future__ import annotations

import argparse
import time

from dsl.cli.command import Command
from dsl.lists import quote
from dsl.observe.jobs import running_jobs
from dsl.observe.table import duration
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

TITLES = ("JOB", "STATE", "TIME", "NODES", "RANKS", "RESTARTS", "PROGRAM")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the jobs. The exit code is always 0; ``argv`` does not include the program's name."""
    options = make_parser().parse_args(argv)
    return COMMAND.run(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    jobs = [_job(one.view) for one in running_jobs()]
    if options.json:
        from json import dumps

        show_text(dumps({"schema": SCHEMA, "jobs": jobs}, indent=2))
    else:
        show_text("\n".join(table([TITLES, *map(_row, jobs)])))
    return 0


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


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the cells of the rows in columns. The last column is as wide as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]
