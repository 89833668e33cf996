"""The command ``dsl``, also as ``python -m dsl``."""

from __future__ import annotations

import gc

# This process is all ours, and next to nothing of what it makes on its way to the workers is garbage: looking
# for some would be a twentieth of a launch.
gc.disable()

from dsl.cli.deepspeed import main  # noqa: E402  the imports are where the collector would run

__all__ = ["main"]

if __name__ == "__main__":
    import sys

    sys.exit(main())
