"""One experiment to run, and the line by which a lane is told of it."""

from __future__ import annotations

from json import dumps

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

GRACE_S = 3.0
"""An experiment that is ended has nothing to save: its workers get so long after SIGTERM, or less."""


@record
class Order:
    """One experiment to run."""

    name: str
    """Of the experiment."""
    argv: tuple[str, ...]
    """Its own command; empty in a lane."""
    env: Mapping[str, str]
    """The whole environment of its command, or of the lane that runs it; empty there."""
    words: tuple[str, ...]
    """What is behind ``dsl`` in its own command."""
    stdout: str
    """File of its stdout, which is appended to."""
    stderr: str
    """The same of stderr."""
    limit_s: float
    """Seconds that it may take; 0: no limit."""
    grace_s: float = GRACE_S
    """Seconds that its workers get between SIGTERM and SIGKILL."""
    lane: tuple[str, ...] = ()
    """The command of a lane that runs it, and others after it; empty: its own command does."""


TOLD = ("name", "words", "stdout", "stderr", "limit_s", "grace_s")
"""What a lane has to know."""


def order_to_line(order: Order) -> bytes:
    """One line, for the lane that runs it."""
    return dumps({name: getattr(order, name) for name in TOLD}).encode() + b"\n"


def order_of(fields: Mapping[str, object]) -> Order:
    """The order of a line that is read already, as far as a lane knows it."""
    own = {**fields, "argv": (), "env": {}, "words": tuple(fields["words"])}  # type: ignore[arg-type]
    return Order(**own)  # type: ignore[arg-type]
