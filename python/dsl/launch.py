"""The counterpart of ``torch.distributed.launch``: ``python -m dsl.launch``, and its function ``main``.

The same as `dsl.run`, for scripts that parse ``--local-rank``: dsl puts that option before the script's own
arguments, unless ``--use-env`` is given.
"""

from __future__ import annotations

import os
import sys

from dsl.run import command, get_args_parser, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["get_args_parser", "launch", "main", "parse_args", "run"]

_WAYS = {"program": "python -m dsl.launch", "local_rank_arg": "dash"}


launch = run


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line (None: that of this process), like `dsl.run.parse_args`."""
    from dsl.cli import torchrun
    from dsl.cli.options_torch import command_line

    return torchrun.parse_args(sys.argv[1:] if args is None else args, os.environ, command_line(**_WAYS))


def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line (default: that of this process) and run it here, like `dsl.run.main`."""
    run(parse_args(args))


def start() -> int:
    """Run the command, as `dsl.run.command` runs ``dslrun``."""
    return command(**_WAYS)


if __name__ == "__main__" and (code := start()):
    sys.exit(code)
