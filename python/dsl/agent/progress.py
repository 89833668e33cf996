"""Whether a job that is started again and again gets anywhere: pure rules for whoever starts it again.

Restarts are cheap where a failure is rare. Where each attempt fails in its first seconds, the next one waits
longer each time, and ten that fail in the same way are enough to know that the next one will, too.
"""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FRUITLESS_S = 10.0
"""An attempt that has failed before this time has got nowhere."""

AT_ONCE = 2
"""So many attempts in a row that got nowhere are followed by another one without a pause."""

LONGEST_PAUSE_S = 30.0

MOST_FRUITLESS = 10
"""So many attempts in a row that got nowhere, and failed in the same way, are enough."""


@record
class Tried:
    """An attempt that has ended."""

    duration_s: float
    """From its first start to its end."""
    cause: str = ""
    """How it failed, in words that are equal for equal failures; empty: no worker failed."""


def pause_s(tried: Sequence[Tried]) -> float:
    """Seconds to wait before the next attempt; ``tried`` are those so far, the last one last."""
    extra = _fruitless(tried) - AT_ONCE
    return min(2.0 ** (extra - 1), LONGEST_PAUSE_S) if extra > 0 else 0.0


def is_futile(tried: Sequence[Tried]) -> bool:
    """Whether another attempt is not worth it. Restarts that the user has counted out are his to spend."""
    last = tried[-MOST_FRUITLESS:]
    return _fruitless(last) >= MOST_FRUITLESS and len({one.cause for one in last}) == 1


def _fruitless(tried: Sequence[Tried]) -> int:
    """How many attempts in a row, up to the last, have failed before they got anywhere."""
    count = 0
    for one in reversed(tried):
        if not one.cause or one.duration_s >= FRUITLESS_S:
            break
        count += 1
    return count
