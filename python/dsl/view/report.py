"""``dsl-report``: what this machine has for a training job, like DeepSpeed's ``ds_report``; and timelines."""

from __future__ import annotations

import argparse

from dsl.cli.tool import Tool, ToolParser
from dsl.errors import TimelineError, UsageError
from dsl.facts import this_machine
from dsl.model.request import DEFAULT_HOSTFILE
from dsl.report.speak import show_text
from dsl.view.machine import machine_lines
from dsl.view.survey import survey


def _report(options: argparse.Namespace) -> int:
    if (options.timeline is None) != (options.events is None):
        raise UsageError("--timeline and --events belong together: dsl-report --timeline out --events FILE")
    if options.timeline is not None:
        if not options.timeline.strip():
            raise UsageError(f"--timeline {options.timeline!r} names no files, give the start of their names")
        return _draw(options.timeline, options.events)
    found = survey(options.hostfile, this_machine())
    if options.json:
        from json import dumps

        text = dumps(found, indent=2)
    else:
        text = "\n".join(machine_lines(found))
    show_text(text)
    return 0


def _draw(name: str, events: str) -> int:
    """Write NAME.json and NAME.png, the timeline of the last job in a record. Raises TimelineError."""
    from json import dumps

    from dsl.view.timeline import picture_of, read_job, spans_of, trace_of

    try:
        with open(events, "rb") as file:
            spans = spans_of(read_job(file))
    except OSError as error:
        raise TimelineError(f"{events!r}: {error.strerror}") from None
    _write(f"{name}.json", dumps(trace_of(spans)).encode(), ", which https://ui.perfetto.dev opens")
    _write(f"{name}.png", picture_of(spans))
    return 0


def _write(path: str, data: bytes, use: str = "") -> None:
    from dsl.machine.output_files import reason, write_output

    try:
        write_output(path, data, read_again=True)
    except (OSError, ValueError) as error:
        raise TimelineError(f"{path!r} cannot be written: {reason(error)}, choose another name") from None
    REPORT.say(f"wrote {path}{use}")


def _add(parser: ToolParser) -> None:
    """Add the options, and those of ds_report about operators without effect: dsl has none."""
    add = parser.add_argument
    add("--json", action="store_true", help="write JSON, with keys that stay (docs/cli.md)")
    add("-H", "--hostfile", metavar="PATH", default=DEFAULT_HOSTFILE, help="the hostfile to count")
    add(
        "--timeline",
        metavar="NAME",
        help="draw what the last job of --events was spent on: NAME.png, NAME.json",
    )
    add("--events", metavar="FILE", help="the record of a job (dsl --events), for --timeline")
    for name in ("--hide_operator_status", "--hide_errors_and_warnings"):
        add(name, action="store_true", help=argparse.SUPPRESS)


REPORT = Tool(
    "dsl-report", "[OPTIONS]", "Tell what there is on this machine for a training job.", _add, _report
)
