"""The command ``dsl``, also as ``python -m dsl``."""

from __future__ import annotations

import dsl._own_process  # noqa: F401  comes first
from dsl.cli.deepspeed import main

__all__ = ["main"]

if __name__ == "__main__":
    import sys

    sys.exit(main())
