"""``python -m dsl.launch``: the place of ``python -m torch.distributed.launch``.

The same as ``dslrun``, for scripts that parse ``--local-rank``: it stands before their arguments unless
``--use-env`` is given.
"""

from __future__ import annotations

from dsl.run import main

__all__ = ["main"]

if __name__ == "__main__":
    import sys

    sys.exit(main(program="python -m dsl.launch", local_rank_arg="dash"))
