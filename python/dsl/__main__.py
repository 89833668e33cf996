"""The command ``dsl``, also as ``python -m dsl``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command ``dsl``, as `dsl.run.command` runs ``dslrun``."""
    from dsl import _own_process

    _own_process.enter()  # before anything else is imported

    from dsl.cli import deepspeed

    return deepspeed.main()


if __name__ == "__main__" and (code := main()):
    sys.exit(code)
