"""The command ``dslrun``, also as ``python -m dsl.run``: the place of ``python -m torch.distributed.run``."""

from __future__ import annotations

import dsl._own_process  # noqa: F401  comes first
from dsl.cli.torchrun import main

__all__ = ["main"]

if __name__ == "__main__":
    import sys

    sys.exit(main())
