"""Spares a process that is all ours what it needs not. The commands claim it first, the library never."""

from __future__ import annotations

import gc

_claimed = False


def claim() -> None:
    """Collect no garbage: next to none is made on the way to the workers, and looking costs a twentieth."""
    global _claimed  # noqa: PLW0603  there is one process
    _claimed = gc.isenabled()
    gc.disable()


def restore() -> None:
    """Undo `claim`, if this process was claimed: code that is not ours is about to run in it."""
    global _claimed  # noqa: PLW0603  as above
    if _claimed:
        _claimed = False
        gc.enable()
