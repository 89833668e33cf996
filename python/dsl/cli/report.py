"""``dsl-report``: what this machine has for a training job, like DeepSpeed's ``ds_report``."""

from __future__ import annotations

import argparse

from dsl import __version__
from dsl.cli.command import Command
from dsl.facts import this_machine
from dsl.model.request import DEFAULT_HOSTFILE
from dsl.report.machine import machine_lines
from dsl.report.speak import show_text
from dsl.report.survey import survey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND = Command("dsl-report")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. The exit code is always 0; ``argv`` does not include the program's name."""
    options = make_parser().parse_args(argv)
    return COMMAND.run(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    found = survey(options.hostfile, this_machine())
    if options.json:
        from json import dumps

        text = dumps(found, indent=2)
    else:
        text = "\n".join(machine_lines(found))
    show_text(text)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the options. It accepts and ignores ds_report's options about operators: dsl has none."""
    from dsl.cli.parser import HelpFormatter

    parser = argparse.ArgumentParser(
        prog=COMMAND.name,
        usage="%(prog)s [OPTIONS]",
        description="Tell what there is on this machine for a training job.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="write JSON, with keys that stay (docs/cli.md)")
    add("-H", "--hostfile", metavar="PATH", default=DEFAULT_HOSTFILE, help="the hostfile to count")
    add("--version", action="version", version=f"%(prog)s {__version__}", help="show the version and exit")
    for name in ("--hide_operator_status", "--hide_errors_and_warnings"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    return parser
