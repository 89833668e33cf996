"""What the command's own streams are."""

from __future__ import annotations

import os

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Kind = Literal["terminal", "null", "other"]


@record
class Console:
    """Our own streams, which are what the user watches."""

    stdout: Kind = "other"
    """A ``terminal``, ``null`` (/dev/null, or closed: nobody reads it), or ``other``."""
    stderr: Kind = "other"
    """The same."""
    stdin_is_terminal: bool = False
    """Whether somebody may type."""


def this_console() -> Console:
    """The streams of this process."""
    return Console(stream_kind(1), stream_kind(2), os.isatty(0))


def stream_kind(fd: int) -> Kind:
    """What a descriptor leads to. One that is closed has nobody to read it, as /dev/null has."""
    try:
        if os.isatty(fd):
            return "terminal"
        return "null" if os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev else "other"
    except OSError:
        return "null"
