"""The command ``dsl``, also as ``python -m dsl``."""

from __future__ import annotations

from dsl import _own_process

_own_process.claim()  # before anything else is imported

from dsl.cli.deepspeed import main  # noqa: E402  after `claim`

__all__ = ["main"]

if __name__ == "__main__":
    import sys

    sys.exit(main())
