"""``dsl-stacks``: what the ranks of a running job do, and which of them hold up the others."""

from __future__ import annotations

import argparse

from dsl.cli.command import Command
from dsl.errors import DslError, JobFormatError
from dsl.model.codec import to_plain
from dsl.model.observation import NodeStacks
from dsl.observe.explain import explain
from dsl.observe.jobs import the_job
from dsl.report.speak import show_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.cli.help import ToolParser

COMMAND = Command("dsl-stacks")
SCHEMA = 1
"""Raised when a key of the JSON is removed or changes its meaning; new keys may come at any time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the explanation. ``argv`` does not include the program's name.

    Returns 1 if there is no such job, or it does not answer.
    """
    return COMMAND.run(lambda: _run(make_parser().parse_args(argv)))


def _run(options: argparse.Namespace) -> int:
    job = the_job(options.job or "", COMMAND.say)
    try:
        answers, missing = job.look("native" if options.native else "stacks")
    except (OSError, JobFormatError) as error:
        raise DslError(f"job {job.view.pid} does not answer: {error}") from None
    nodes = [one for one in answers if isinstance(one, NodeStacks)]
    lines = explain(nodes, missing)
    if not options.json:
        show_text("\n".join(lines))
        return 0
    from json import dumps

    found = [to_plain(one)["NodeStacks"] for one in nodes]
    show_text(
        dumps({"schema": SCHEMA, "explanation": lines[0], "nodes": found, "missing": missing}, indent=2)
    )
    return 0


def make_parser() -> ToolParser:
    """The parser of the options."""
    from dsl.cli.help import ToolParser

    parser = ToolParser(
        COMMAND.name,
        "[OPTIONS] [JOB]",
        "Tell what the ranks of a running job do, and which of them do not what the others do.",
    )
    add = parser.add_argument
    parser.add_job("pid of the job's command, as dsl-ps shows it")
    add(
        "--native",
        action="store_true",
        help="show frames of C and C++, too; each rank is stopped for a moment",
    )
    add("--json", action="store_true", help="write JSON, with keys that stay (docs/cli.md)")
    return parser
