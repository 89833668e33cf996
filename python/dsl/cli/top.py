"""``dsl-top``: a live view of the ranks of a running job, or one table of them."""

from __future__ import annotations

import argparse
import sys
import time

from dsl.cli.command import Command
from dsl.cli.ps import terminal_width
from dsl.errors import DslError, JobFormatError, OptionError
from dsl.machine.this_process import can_move_cursor
from dsl.observe.jobs import call_jobs, find_job
from dsl.observe.table import Layout, cells, headline, in_order, make_rows, totals
from dsl.report.speak import show_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.cli.help import ToolParser
    from dsl.observe.jobs import RunningJob

COMMAND = Command("dsl-top")

REFRESH_S = 2.0
LEAST_REFRESH_S = 0.2
MOST_REFRESH_S = 300.0
ONCE_S = 0.5
"""How long one table looks at the CPU time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Show a job. The exit code is 0, or 1 for an error; ``argv`` does not include the program's name."""
    return COMMAND.run(lambda: _run(make_parser().parse_args(argv)))


def _run(options: argparse.Namespace) -> int:
    if not LEAST_REFRESH_S <= options.delay <= MOST_REFRESH_S:
        raise OptionError(f"-d takes {LEAST_REFRESH_S:g} to {MOST_REFRESH_S:g} seconds")
    is_live = not options.once and sys.stdin.isatty() and sys.stdout.isatty() and can_move_cursor()
    if is_live:
        try:
            from dsl.cli.top_screen import TopApp
        except ImportError as error:
            name = (error.name or "").partition(".")[0]
            if name not in ("textual", "rich"):
                raise
            raise DslError(
                "the live view needs textual: pip install textual, or give --once for one table"
            ) from None
    word = options.job or ""
    jobs, silent = call_jobs(word, COMMAND.say)
    if not is_live:
        return _print_once(find_job(word, jobs, silent))
    # With several jobs the user chooses on the screen.
    chosen = find_job(word, jobs, silent) if word or len(jobs) < 2 else None
    for job in jobs:
        job.close()
    return TopApp(options.delay, chosen).run() or 0


def make_parser() -> ToolParser:
    """The parser of the options."""
    from dsl.cli.help import ToolParser

    parser = ToolParser(
        COMMAND.name,
        "[OPTIONS] [JOB]",
        "Show what the ranks of a running job do, on all hosts. ? shows the keys.",
    )
    parser.add_job("pid of the job, as dsl-ps shows it")
    parser.add_argument(
        "-d", "--delay", metavar="SECONDS", type=float, default=REFRESH_S, help="time between two looks"
    )
    parser.add_argument("--once", action="store_true", help="print one table, as without a terminal")
    return parser


def _print_once(job: RunningJob) -> int:
    try:
        before, _ = job.look("status")
        time.sleep(ONCE_S)
        now, missing = job.look("status")
    except (OSError, JobFormatError) as error:
        raise DslError(f"job {job.view.pid} does not answer: {error}") from None
    rows = in_order(make_rows(before, now), "RANK")
    texts = [cells(row) for row in rows]
    layout = Layout(texts, terminal_width())
    lines = [headline(job.view, now, time.time()), totals(rows)]
    lines += [f"host {host} has not answered" for host in missing]
    show_text("\n".join([*lines, layout.title(), *map(layout.line, texts)]))
    return 0
