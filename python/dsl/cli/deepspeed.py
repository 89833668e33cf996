"""``dsl``: DeepSpeed's command line."""

from __future__ import annotations

import os
import sys

from dsl.cli.command import (
    Command,
    own_fields,
    program_kind,
    read_line,
    show_request,
    signal_fields,
    with_strictness,
)
from dsl.cli.options_deepspeed import COMMAND_LINE
from dsl.cli.reader import Options
from dsl.model.options import DEFAULT_FORWARD, DEFAULT_STOP, count_or_none, request_of
from dsl.model.request import Program
from dsl.resources.filters import parse_num_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from dsl.model.request import Request

COMMAND = Command("dsl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job and return the exit code of the command.

    ``argv``: the arguments without the program's name (default: those of this process). A mistake of the user
    is one line on stderr; bad usage exits with 2, like argparse.
    """
    return COMMAND.run(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0].startswith("--completion"):
        from dsl.cli.completion import reply

        if reply(argv):
            return 0
    request, options = read(argv, os.environ)
    program = request.program
    stray = COMMAND.stray_flags(argv, program.script, program.args, COMMAND_LINE.slips)
    COMMAND.show(stray, request.log_level)
    if options.autotuning:
        from dsl.cli.autotuning import start_tuning

        return start_tuning(request, options)
    return COMMAND.start(request, show_request(options), argv=(COMMAND.name, *argv))


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Request, Options]:
    """The request of the command line, and the values of its options. Exits with 2 for bad usage.

    Raises:
        UsageError: an option has a bad value.
    """
    options = read_line(argv, COMMAND_LINE, environ)
    return with_strictness(to_request(options), environ), options


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse as DeepSpeed's runner does: the same names, the same defaults. Exits with 2 for bad usage."""
    from dsl.cli.parser import Parser

    return Parser(COMMAND_LINE).parse_script_args(argv)


def to_request(options: Options | argparse.Namespace) -> Request:
    """Make the request of the options.

    Raises:
        NumNodesError: MIN:MAX without elastic training.
        OptionError: the value for signals makes no sense.
    """
    program = Program(
        program_kind(module=options.module, no_python=options.no_python, flag="--no_python"),
        options.user_script,
        tuple(options.user_args),
        local_rank_option="" if options.no_local_rank else "--local_rank",
    )
    least, most = parse_num_nodes(str(options.num_nodes), options.elastic_training)
    own = own_fields(options)
    if isinstance(options.num_nodes, str):
        own["resources"] = {"min_nodes": least, "max_nodes": most}
    else:
        own["resources"] = {"min_nodes": count_or_none(least)}
    if options.preempt_signal:  # without it the signals keep their usual meaning
        own["signals"] = signal_fields(options.preempt_signal, DEFAULT_STOP, DEFAULT_FORWARD)
    if options.quiet:
        own["log_level"] = "error"
    return request_of("deepspeed", program, COMMAND_LINE.options, vars(options), **own)
