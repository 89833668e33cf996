"""Numbers as users write them, one grammar and one bound for all: counts, seconds, sizes, lists (``0-3,8``).

Also the one name of the variable that counts threads, and which colons may stand in the name of a host.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""How many threads a worker's OpenMP starts, and with it torch."""

MOST_DIGITS = 9
"""Of a number; Python itself refuses to read numbers of thousands of digits."""

BEYOND = 10**MOST_DIGITS
"""Stands for every number with more digits."""

MOST_WORKERS = 65_536
"""Of one node, and the most slots of a host. Their plan takes a second and 100 MB: a slip does no harm."""

MOST_NODES = 65_536
"""Of one job."""

MOST_SECONDS = BEYOND - 1
"""Of any duration: 31 years."""

LAST_PORT = 65_535

LONGEST_SHOWN = 80
"""Characters of a user's word that a message repeats."""


def parse_number(text: str) -> int | None:
    """A number as it stands in a list: ASCII digits, at most `MOST_DIGITS`. None if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def parse_integer(text: str) -> int | None:
    """The same as a value of its own, which may have a sign, and blanks around it."""
    word = text.strip()
    number = parse_number(word[1:] if word[:1] in ("-", "+") else word)
    return -number if number is not None and word[0] == "-" else number


def parse_seconds(text: str) -> float | None:
    """A number of seconds, whatever it is: from 0 to `MOST_SECONDS` it is a duration. None if it is none."""
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def parse_size(text: str) -> int | None:
    """A number of bytes, or with K, M or G of 1024. None if it is none."""
    factor = 1
    if text[-1:].upper() in ("K", "M", "G"):
        text, factor = text[:-1], 1024 ** ("KMG".index(text[-1].upper()) + 1)
    # Bytes have more digits than what is counted.
    digits = text.lstrip("0") or text[-1:]
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= 2 * MOST_DIGITS
    return int(digits) * factor if is_number else None


def shorten(text: str, longest: int = LONGEST_SHOWN) -> str:
    """A word of the user as a message can repeat it: the middle left out if it is long."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def quote(text: str) -> str:
    """The same in quotation marks."""
    return repr(shorten(text))


def has_odd_colon(name: str) -> bool:
    """Whether ``:`` stands in a name that is no IPv6 address: a port, or a word for a launcher."""
    if ":" not in name:
        return False
    from _socket import AF_INET6, inet_pton  # `socket` takes ten times as long to import

    address, percent, zone = name.partition("%")
    try:
        inet_pton(AF_INET6, address)
    except OSError:
        return True
    return bool(percent) and (not zone or ":" in zone)


def parse_range(text: str) -> tuple[int, int] | None:
    """First and last of ``FIRST-LAST``, or one number twice; blanks around numbers do not matter.

    The last may be below the first. None if it is no range.
    """
    ends = [end.strip() for end in text.split("-")]
    if len(ends) > 2 or not all(end.isascii() and end.isdecimal() for end in ends):
        return None
    numbers = [parse_number(end) for end in ends]
    first, last = [BEYOND if number is None else number for number in (numbers[0], numbers[-1])]
    return first, last


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
