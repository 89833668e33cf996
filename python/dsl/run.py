"""The command ``dslrun``, also as ``python -m dsl.run``: the place of ``python -m torch.distributed.run``."""

from __future__ import annotations

from dsl import _own_process

_own_process.claim()  # before anything else is imported

from dsl.cli.torchrun import main  # noqa: E402  as said

__all__ = ["main"]

if __name__ == "__main__":
    import sys

    sys.exit(main())
