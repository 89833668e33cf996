"""Records as lines, by `dsl.model.codec`: how two processes of one host talk, one JSON object a line."""

from __future__ import annotations

from dsl.errors import JobFormatError
from dsl.model.codec import from_json, from_plain, to_json, to_plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LONGEST_LINE = 1 << 20
"""Most bytes of a line: a longer one counts as damaged."""


def to_line(message: object) -> bytes:
    """Write a record with its line feed, in ASCII."""
    return to_json(to_plain(message)) + b"\n"


class Lines:
    """Reads the records of some classes from bytes that come piece by piece."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        """Return the records whose lines ``data`` completes.

        Raises:
            JobFormatError: a line is damaged or too long. The text is a clause.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (self._rest, *whole))) > LONGEST_LINE:
            raise JobFormatError(f"it is longer than {LONGEST_LINE} bytes")
        return [from_plain(from_json(line), self._kinds) for line in whole]
