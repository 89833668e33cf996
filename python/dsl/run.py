"""The command ``dslrun``, also as ``python -m dsl.run``: the place of ``python -m torch.distributed.run``."""

from __future__ import annotations

import gc

# As in `dsl.__main__`: next to nothing of what is made on the way to the workers is garbage.
gc.disable()

from dsl.cli.torchrun import main  # noqa: E402  the imports are where the collector would run

__all__ = ["main"]

if __name__ == "__main__":
    import sys

    sys.exit(main())
