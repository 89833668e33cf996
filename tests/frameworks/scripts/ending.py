"""How the scripts beside this one end."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """End with 0 and without the interpreter's shutdown.

    A thread of gloo that has not yet let go of the last collective's tensors aborts a process that shuts down,
    whoever started it, in about one run of twenty (https://github.com/pytorch/pytorch/issues/190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
