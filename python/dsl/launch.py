"""The counterpart of ``torch.distributed.launch``: ``python -m dsl.launch``, and its function ``main``.

The same as `dsl.run`, for scripts that parse ``--local-rank``: dsl puts that option before the script's own
arguments, unless ``--use-env`` is given.
"""

from __future__ import annotations

import os
import sys

from dsl.run import command, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_WAYS = {"program": "python -m dsl.launch", "local_rank_arg": "dash"}


def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line (default: that of this process) and run it here, like `dsl.run.main`."""
    from dsl.cli.options_torch import command_line
    from dsl.cli.torchrun import parse_args

    run(parse_args(sys.argv[1:] if args is None else args, os.environ, command_line(**_WAYS)))


if __name__ == "__main__":
    if code := command(**_WAYS):
        sys.exit(code)
