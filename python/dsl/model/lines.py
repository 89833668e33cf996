"""Reads the records that another process of ours writes, one a line (`dsl.model.codec.to_line`)."""

from __future__ import annotations

from dsl.errors import JobFormatError
from dsl.model.codec import from_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LONGEST_LINE = 1 << 20
"""Most bytes of a line: a longer one counts as damaged."""


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
        return [from_line(line, self._kinds) for line in whole]
