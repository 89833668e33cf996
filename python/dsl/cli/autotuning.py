"""The options of ``dsl --autotuning``: which make sense, and as words for the commands of experiments."""

from __future__ import annotations

import argparse

from dsl.cli.options_deepspeed import COMMAND_LINE
from dsl.cli.reader import Options
from dsl.errors import OptionError
from dsl.model.request import Request
from dsl.tune.run import tune

REFUSED = {
    "elastic_training": "the hosts of an experiment stay the same",
    "no_ssh": "one command has to reach all hosts",
    "detach": "a tuning asks and shows where it was started",
    "events": "each experiment is a job of its own",
    "metrics": "each experiment is a job of its own",
    "debug": "an experiment is measured, not stepped through",
    "dry_run": "what is started follows from what was measured",
    "dry_run_json": "what is started follows from what was measured",
}
"""Options that make no sense here, and why."""


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
    return tune(request, option_words(options), trains=options.autotuning == "run")


def option_words(options: Options | argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """The given options, or those that differ from their defaults: names of values, and words for them."""
    words = []
    for option in COMMAND_LINE.options:
        value = getattr(options, option.dest)
        is_given = getattr(options, option.given) if option.given else value != option.default
        if is_given:
            name = next(name for name in option.names if name.startswith("--"))
            words.append((option.dest, name if option.is_flag else f"{name}={_text(value)}"))
    return tuple(words)


def _text(value: object) -> str:
    """A value as text that its option reads back as the same value."""
    if value is None:
        return "never"  # the only word that an option reads as None
    if isinstance(value, float):  # without an exponent, which the options do not read
        return f"{value:f}".rstrip("0").rstrip(".")
    return str(value)
