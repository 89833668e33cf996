"""The counterpart of ``torch.distributed.run``: its functions, and ``dslrun`` as ``python -m dsl.run``.

The functions do what torch's do (torch 2.13). They run in the caller's process, and the caller goes on
afterwards. Further public names of torch's module are here, too, as the installed torch has them.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

    from dsl.functions import LaunchConfig

__all__ = ["command", "config_from_args", "get_args_parser", "main", "parse_args", "run"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # as each import asks for `__path__`
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dsl.functions.errors import name_of_torch

    return name_of_torch(name, "torch.distributed.run", globals())


def get_args_parser() -> argparse.ArgumentParser:
    """The parser of ``dslrun``; ``PET_NAME`` in the environment is the default of ``--name``."""
    from dsl.cli.options_torch import COMMAND_LINE
    from dsl.cli.parser import Parser

    return Parser(COMMAND_LINE, os.environ)


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of ``dslrun`` (None: that of this process). Exits with 2 for bad usage."""
    from dsl.cli import torchrun

    return torchrun.parse_args(sys.argv[1:] if args is None else args)


def run(args: argparse.Namespace) -> None:
    """Run this node's part of a job in this process, and return when all workers have ended with 0.

    ``args`` is a namespace from `parse_args`, from torch's own parser, or made by hand. A missing value gets
    its default, and a number may be text. Signals are handled as by `dsl.functions.launcher.launch_agent`:
    those of ``--signals-to-handle`` that the program neither handles nor ignores end the job;
    ``--forward-signals`` has no effect.

    Raises:
        ChildFailedError: a worker failed, and all restarts are spent (`dsl.functions.ChildFailedError`).
        HangError: the job hung, and ``--hang-action`` is ``stop`` (`dsl.errors.HangError`).
        SignalException: a signal ended the job; a `SystemExit` with 128 + its number.
        UsageError: the values ask for something that cannot be done.
        EngineError: the workers cannot be started on this machine.
    """
    from dsl.cli import in_process

    in_process.run(args)


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """The config, the program and its arguments with which `dsl.functions.elastic_launch` does `run`."""
    from dsl.cli import in_process

    return in_process.config_from_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line (default: that of this process) and `run` it, in this process."""
    run(parse_args(args))


def command(*, program: str = "dslrun", local_rank_arg: str = "none") -> int:
    """Run the command ``dslrun``, which takes over this process and ends it with the job.

    ``program``: our name in usage errors. ``local_rank_arg``: the default of that option. Returns the exit
    code if nothing was started, or if a debugger, a profiler or another program needs this process, too.
    """
    from dsl import _own_process

    _own_process.enter()  # before anything else is imported

    from dsl.cli import torchrun

    return torchrun.main(program=program, local_rank_arg=local_rank_arg)


if __name__ == "__main__" and (code := command()):  # after a success, who has called this module may go on
    sys.exit(code)
