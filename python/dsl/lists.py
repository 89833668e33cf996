"""Lists of CPUs, cores and ranks as text: ``0-3,8``; and the one name of the variable that counts threads."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""How many threads a worker's OpenMP starts, and with it torch."""

MOST_DIGITS = 9
"""Of a number in a list; Python itself refuses to read numbers of thousands of digits."""

BEYOND = 10**MOST_DIGITS
"""Stands for every number with more digits."""


def parse_number(text: str) -> int | None:
    """A number as a user writes it: ASCII digits, at most `MOST_DIGITS`. None if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def parse_range(text: str) -> tuple[int, int] | None:
    """First and last of ``FIRST-LAST``, or one number twice; blanks around numbers do not matter.

    The last may be below the first. None if it is no range.
    """
    ends = [end.strip() for end in text.split("-")]
    if len(ends) > 2 or not all(end.isascii() and end.isdecimal() for end in ends):
        return None
    numbers = [int(end) if len(end) <= MOST_DIGITS else BEYOND for end in ends]
    return numbers[0], numbers[-1]


def find_runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours, in the order of the numbers."""
    first = last = None
    for number in numbers:
        if first is None or last is None:
            first = number
        elif number != last + 1:
            yield first, last
            first = number
        last = number
    if first is not None and last is not None:
        yield first, last


def format_ranges(numbers: Iterable[int]) -> str:
    """[0, 2, 3, 4] -> ``"0,2-4"``. The numbers stay in their order."""
    return ",".join([f"{a}" if a == b else f"{a}-{b}" for a, b in find_runs(numbers)])
