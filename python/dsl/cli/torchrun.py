"""``dslrun``: torchrun's command line."""

from __future__ import annotations

import os
import sys

from dsl.cli.command import (
    Command,
    Options,
    log_level,
    program_kind,
    read_words,
    signal_fields,
    with_strictness,
)
from dsl.cli.options_torch import COMMAND_LINE, LOCAL_RANK_OPTIONS, command_line
from dsl.errors import OptionError, UsageError
from dsl.model.job import Notice, refuse_fallbacks
from dsl.model.options import request_of
from dsl.model.request import Program
from dsl.words import parse_number, parse_signals, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Any

    from dsl.model.options import CommandLine
    from dsl.model.request import Request

COMMAND = Command("dslrun")


def main(
    argv: Sequence[str] | None = None, *, program: str = COMMAND.name, local_rank_arg: str = "none"
) -> int:
    """Run this node's part of a job and return the exit code of the command.

    ``argv``: the arguments without the program's name (default: those of this process). ``program``: our name
    in usage errors. ``local_rank_arg``: the default of that option. A mistake of the user is one line on
    stderr; bad usage exits with 2, like argparse.
    """
    words = sys.argv[1:] if argv is None else argv
    line = command_line(program, local_rank_arg)
    return COMMAND.run(lambda: _run(words, line))


def _run(argv: Sequence[str], line: CommandLine) -> int:
    if COMMAND.answers(argv):
        return 0
    try:
        request, options = read(argv, os.environ, line)
        if options.print_completion:
            from dsl.cli.completion import reply

            reply(("--completion", options.print_completion))
            return 0
        notices = [*COMMAND.stray_flags(argv, request.program, line), *signal_notices(options)]
        if "dsl.cli.parser" in sys.modules:  # the quick reader takes no line with such variables
            from dsl.cli.parser import unknown_variables

            notices += unknown_variables(os.environ, line)
        COMMAND.show(notices, request.log_level)
        return COMMAND.start(request, argv=(*line.program.split(), *argv))
    except UsageError as error:
        from dsl.cli.parser import Parser

        error.args = (Parser(line, os.environ).name_variables(argv, str(error)),)
        raise


def read(
    argv: Sequence[str], environ: Mapping[str, str], line: CommandLine = COMMAND_LINE
) -> tuple[Request, Options]:
    """The request of the command line, and the values of its options. Exits with 2 for bad usage.

    ``environ``: the environment, which may have defaults of options.

    Raises:
        UsageError: an option has a bad value.
    """
    options = read_words(argv, line, environ) or Options(vars(parse_args(argv, environ, line)))
    request = with_strictness(to_request(options), environ)
    if request.is_strict:
        refuse_fallbacks(signal_notices(options))
    return request, options


def parse_args(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, line: CommandLine = COMMAND_LINE
) -> argparse.Namespace:
    """Parse as torchrun does; ``PET_NAME`` is the default of ``--name``. Exits with 2 for bad usage."""
    from dsl.cli.parser import Parser

    return Parser(line, environ).parse_script_args(argv)


def to_request(options: Options | argparse.Namespace) -> Request:
    """Make the request of the options.

    Raises:
        OptionError: the value for nodes or signals is malformed, or options contradict each other.
    """
    own: dict[str, Any] = {"log_level": log_level(options)}
    if options.nnodes != "1:1":  # the default, which nobody types: the user has said nothing about nodes
        least, most = parse_nnodes(options.nnodes)
        own["resources"] = {"min_nodes": least, "max_nodes": most}
    preempt, stop, forward = options.preempt_signal, options.signals_to_handle, options.forward_signals
    own["signals"] = signal_fields(preempt or "", stop, forward)
    program = _program(options)
    if options.logs_specs is not None and (options.dry_run or options.dry_run_json):
        raise OptionError(
            "--dry-run cannot ask the plug-in of --logs-specs, which may make files, leave one of them out"
        )
    if options.log_dir == os.devnull:  # torchrun's way to ask for no log files
        own["output"] = {"log_dir": None, "redirects": "", "tee": ""}
    return request_of("torch", program, COMMAND_LINE.options, vars(options), **own)


def _program(options: Options | argparse.Namespace) -> Program:
    # --run-path overrides --module and --no-python. Every worker is a new interpreter here anyway.
    runs_path = options.run_path
    local_rank_arg = "none" if options.use_env else options.local_rank_arg
    no_python = options.no_python and not runs_path
    if no_python and local_rank_arg != "none":
        raise OptionError("--no-python: a program is not told its local rank by an option, give --use-env")
    return Program(
        program_kind(module=options.module and not runs_path, no_python=no_python, flag="--no-python"),
        options.training_script,
        tuple(options.training_script_args),
        local_rank_option=LOCAL_RANK_OPTIONS[local_rank_arg],
    )


def parse_nnodes(text: str) -> tuple[int, int]:
    """``N`` or ``MIN:MAX`` as two numbers. Raises OptionError."""
    least, colon, most = text.partition(":")
    first = parse_number(least.strip())
    last = parse_number(most.strip()) if colon else first
    if first is None or last is None:
        raise OptionError(f"--nnodes {quote(text)}: expected a number of nodes, or MIN:MAX")
    return first, last


def signal_notices(options: Options | argparse.Namespace) -> list[Notice]:
    """A warning for each name that is no signal: like torchrun, dslrun skips it."""
    warnings: list[str] = []
    parse_signals(options.signals_to_handle, "--signals-to-handle", warnings=warnings)
    return [Notice("warning", line) for line in warnings]
