"""Hostfiles, with ``HOST slots=N`` on each line. The order of the lines becomes the order of the node ranks.

The grammar is DeepSpeed's: blank lines and lines that start with ``#`` are skipped, and words after the
number are ignored (``h slots=4 max_slots=8`` is fine). Only ``python=PATH`` there is our own addition.
"""

from __future__ import annotations

from dsl.errors import HostfileError
from dsl.lists import BEYOND, MOST_DIGITS, MOST_WORKERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


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
        # Like DeepSpeed's pattern, this one accepts digits of any script.
        slots = int(digits) if len(digits) <= MOST_DIGITS else BEYOND
        if slots > MOST_WORKERS:
            raise HostfileError(
                f"{path} line {number}: slots={digits[:20]} is more than the limit of {MOST_WORKERS}"
            )
        if host in pool:
            raise HostfileError(
                f"{path} line {number}: hostfile contains multiple entries for {host!r}, "
                f"the first in line {first_seen[host]}; keep one"
            )
        pool[host] = slots
        first_seen[host] = number
    if not pool:
        raise HostfileError(
            f"{path}: hostfile is empty or not formatted correctly, expected lines of 'HOST slots=N'"
        )
    return pool


def parse_pythons(lines: Iterable[str], path: str = "hostfile") -> dict[str, str]:
    """Return host -> interpreter, for lines such as ``h slots=4 python=/bin/python``.

    The interpreter is an absolute path, or the name of a program on that host's ``PATH``. Call this only for
    lines that `parse_hostfile` accepts.

    Raises:
        HostfileError: the interpreter is empty, or is a relative path.
    """
    pythons = {}
    for number, raw in enumerate(lines, start=1):
        words = raw.partition("#")[0].split()
        for word in words[2:]:
            key, equals, python = word.partition("=")
            if key != "python" or not equals:
                continue
            if not python or (not python.startswith("/") and "/" in python):
                raise HostfileError(
                    f"{path} line {number}: {word[:80]!r} names no interpreter, expected python=/PATH"
                )
            pythons[words[0]] = python
    return pythons
