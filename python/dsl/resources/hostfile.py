"""Hostfiles: ``HOST slots=N`` a line, in the order that becomes the node ranks.

The grammar is DeepSpeed's: blank lines and lines that start with ``#`` count for nothing, and whatever
follows the number is ignored (``h slots=4 max_slots=8`` is fine).
"""

from __future__ import annotations

from dsl.errors import HostfileError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SLOTS = 4_194_304
"""The most processes a Linux machine can hold (``PID_MAX_LIMIT``)."""


def parse_hostfile(lines: Iterable[str], path: str = "hostfile") -> dict[str, int]:
    """Return host -> number of slots, in the order of the file. ``path`` names the file in errors.

    Raises:
        HostfileError: a malformed line, a host named twice, or no host at all.
    """
    import re

    pattern = re.compile(r"(\S+)\s+slots=(\d+)")
    pool: dict[str, int] = {}
    first_seen: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        entry = pattern.match(line)
        if entry is None:
            raise HostfileError(
                f"{path} line {number}: hostfile contains a bad entry: {line[:80]!r}, expected 'HOST slots=N'"
            )
        host, digits = entry.groups()
        if len(digits) > len(str(MAX_SLOTS)) or int(digits) > MAX_SLOTS:
            raise HostfileError(
                f"{path} line {number}: slots={digits[:20]} is more than the limit of {MAX_SLOTS}"
            )
        if host in pool:
            raise HostfileError(
                f"{path} line {number}: hostfile contains multiple entries for {host!r}, "
                f"the first in line {first_seen[host]}; keep one"
            )
        pool[host] = int(digits)
        first_seen[host] = number
    if not pool:
        raise HostfileError(
            f"{path}: hostfile is empty or not formatted correctly, expected lines of 'HOST slots=N'"
        )
    return pool
