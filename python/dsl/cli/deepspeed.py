"""``dsl``: DeepSpeed's command line."""

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
from dsl.cli.options_deepspeed import COMMAND_LINE
from dsl.errors import OptionError
from dsl.model.options import DEFAULT_FORWARD, DEFAULT_STOP, count_or_none, request_of
from dsl.model.request import Program
from dsl.plan.hosts import parse_num_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Any

    from dsl.model.request import Request

COMMAND = Command("dsl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job and return the exit code of the command.

    ``argv``: the arguments without the program's name (default: those of this process). A mistake of the user
    is one line on stderr; bad usage exits with 2, like argparse.
    """
    return COMMAND.run(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    if COMMAND.answers(argv):
        return 0
    request, options = read(argv, os.environ)
    COMMAND.show(COMMAND.stray_flags(argv, request.program, COMMAND_LINE), request.log_level)
    if options.autotuning:
        return start_tuning(request, options)
    return COMMAND.start(request, argv=(COMMAND.name, *argv))


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Request, Options]:
    """The request of the command line, and the values of its options. Exits with 2 for bad usage.

    Raises:
        UsageError: an option has a bad value.
    """
    options = read_words(argv, COMMAND_LINE, environ) or Options(vars(parse_args(argv)))
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
    own: dict[str, Any] = {"log_level": log_level(options)}
    if isinstance(options.num_nodes, str):
        own["resources"] = {"min_nodes": least, "max_nodes": most}
    else:
        own["resources"] = {"min_nodes": count_or_none(least)}
    if options.preempt_signal:  # without it the signals keep their usual meaning
        own["signals"] = signal_fields(options.preempt_signal, DEFAULT_STOP, DEFAULT_FORWARD)
    if options.quiet:
        own["log_level"] = "error"
    return request_of("deepspeed", program, COMMAND_LINE.options, vars(options), **own)


REFUSED = {
    "elastic_training": "the hosts of an experiment stay the same",
    "no_ssh": "one command has to reach all hosts",
    "detach": "a tuning asks and shows where it was started",
    "events": "each experiment is a job of its own",
    "metrics": "each experiment is a job of its own",
    "doctor": "it starts no experiment",
    "ring": "it starts no experiment",
    "debug": "an experiment is measured, not stepped through",
    "dry_run": "what is started follows from what was measured",
    "dry_run_json": "what is started follows from what was measured",
}
"""Options that make no sense with ``--autotuning``, and why."""


def start_tuning(request: Request, options: Options | argparse.Namespace) -> int:
    """Find the best config, and train with it if the user asked for that; see `dsl.tune.run.tune`.

    Raises:
        OptionError: an option makes no sense here.
        DslError: something is wrong with the job, its config or a folder.
    """
    for option in COMMAND_LINE.options:
        if option.dest in REFUSED and getattr(options, option.dest):
            raise OptionError(
                f"{option.names[0]} cannot be used with --autotuning: {REFUSED[option.dest]}, "
                "leave one of them out"
            )
    from dsl.tune.run import tune

    return tune(request, option_words(options), trains=options.autotuning == "run")


def option_words(options: Options | argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """The given options, or those that differ from their defaults: names of values, and words for them."""
    words = []
    for option in COMMAND_LINE.options:
        value = getattr(options, option.dest)
        is_given = getattr(options, option.given) if option.given else value != option.default
        if is_given:
            name = next(name for name in option.names if name.startswith("--"))
            values = value if option.repeats else (value,)
            words += [(option.dest, name if option.is_flag else f"{name}={_text(one)}") for one in values]
    return tuple(words)


def _text(value: object) -> str:
    """A value as text that its option reads back as the same value."""
    if value is None:
        return "never"  # the only word that an option reads as None
    if isinstance(value, float):  # without an exponent, which the options do not read
        return f"{value:f}".rstrip("0").rstrip(".")
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
