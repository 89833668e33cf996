"""One experiment to run, and the line that hands it to a lane."""

from __future__ import annotations

from json import dumps

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

GRACE_S = 3.0
"""Most seconds that workers get after SIGTERM: an experiment that we end has nothing to save."""


@record
class Order:
    """One experiment to run."""

    name: str
    """Name of the experiment."""
    argv: tuple[str, ...]
    """Its own command; empty in a lane."""
    env: Mapping[str, str]
    """The whole environment of its command, or of the lane that runs it; empty in a lane."""
    words: tuple[str, ...]
    """The words behind ``dsl`` in its own command."""
    stdout: str
    """File of its stdout, which is appended to."""
    stderr: str
    """File of its stderr, which is appended to."""
    limit_s: float
    """Seconds that it may take; 0: no limit."""
    grace_s: float = GRACE_S
    """Seconds that its workers get between SIGTERM and SIGKILL."""
    end: str = ""
    """File in which its job leaves the facts of a failure."""
    lane: tuple[str, ...] = ()
    """The command of a lane that runs it, and later others; empty: its own command runs it."""


TOLD = ("name", "words", "stdout", "stderr", "end", "limit_s", "grace_s")
"""Fields that a lane needs."""


def order_to_line(order: Order) -> bytes:
    """An order as one line, for the lane that runs it."""
    return dumps({name: getattr(order, name) for name in TOLD}).encode() + b"\n"


def order_of(fields: Mapping[str, object]) -> Order:
    """The order with these fields of a line; fields that a lane does not get are empty."""
    own = {**fields, "argv": (), "env": {}, "words": tuple(fields["words"])}  # type: ignore[arg-type]
    return Order(**own)  # type: ignore[arg-type]
