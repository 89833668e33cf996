"""Lists of failures, as ``--restart-on`` and ``--give-up-on`` take them. Only such an option loads this."""

from __future__ import annotations

from dsl.model.outcome import SIGNAL_CODES
from dsl.words import LAST_SIGNAL, SIGNALS, parse_range

LAST_CODE = 255
SIGNALLED = (SIGNAL_CODES + 1, SIGNAL_CODES + LAST_SIGNAL)
"""The first and the last exit code that stands for a signal."""


def parse_codes(text: str) -> tuple[int, ...] | None:
    """``1,3-5,signal,SIGKILL`` as exit codes, where 128 + n stands for signal n. None: it is no such list.

    ``signal`` stands for all signals, ``any`` for all failures.
    """
    spans = {name: (SIGNAL_CODES + number,) * 2 for number, name in SIGNALS.items()}
    spans |= {name[3:]: span for name, span in spans.items()}
    spans |= {"SIGNAL": SIGNALLED, "ANY": (1, LAST_CODE)}
    found = set[int]()
    for item in text.split(","):
        first, last = spans.get(item.strip().upper()) or parse_range(item) or (0, 0)
        if not 1 <= first <= last <= LAST_CODE:
            return None
        found.update(range(first, last + 1))
    return tuple(sorted(found))
