"""What a visible-devices variable may show each worker alone, and what to write in it instead of a slip."""

from __future__ import annotations

from dsl.devices.visible import (
    GRAMMARS,
    LEVEL_ZERO_VARIABLE,
    NUMBERS,
    level_zero_entries,
    read_entries,
    resolve,
    resolve_level_zero,
)
from dsl.errors import FilterError
from dsl.lists import BEYOND, parse_range, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def masks(shown: Sequence[str] | None, count: int, variable: str) -> tuple[str, ...]:
    """Value of the variable for each of ``count`` workers, so that each sees a device of its own.

    ``shown``: the devices that the workers may use, None for all of them.

    Raises:
        FilterError: there are too few.
    """
    if shown is None:
        return tuple([str(number) for number in range(count)])
    if len(shown) < count:
        raise FilterError(
            f"{count} workers need as many devices, but {variable}={','.join(shown)} names {len(shown)}"
        )
    return tuple(shown[:count])


def worker_choices(variable: str, environ: Mapping[str, str], total: int, count: int) -> list[str]:
    """What of ``total`` devices each of ``count`` workers may be shown by a variable: as many as there are.

    They come in the order in which one process would number them, so that no worker has another device than
    it would pick by its local rank. Where parts of devices are named (tiles of Level Zero), a worker gets all
    those of one device, or one alone if there are more workers than devices.
    """
    value = environ.get(variable)
    if variable != LEVEL_ZERO_VARIABLE:
        seen = range(min(total, count)) if value is None else resolve(value, total, (), GRAMMARS[variable])
        return [str(position) for position in seen]
    entries = level_zero_entries(environ)
    if entries is None:
        return [str(number) for number in range(min(total, count))]
    devices = []
    for number in resolve_level_zero(environ, total):
        parts = [entry for entry in entries if entry.partition(".")[0] == str(number)]
        whole = str(number) in parts
        devices.append([str(number)] if whole else sorted(parts, key=lambda part: int(part.split(".")[1])))
    if count <= len(devices):
        return [",".join(parts) for parts in devices]
    return [part for parts in devices for part in parts]


def explain_value(variable: str, value: str) -> str | None:
    """What to write instead of the first entry of a value that is no number or part, if there is one.

    Entries that hide devices (negative, empty) are not meant as devices.
    """
    grammar = GRAMMARS.get(variable, NUMBERS)
    for word in value.split(","):
        entry = word.strip() if grammar.loose else word
        digits = entry.replace(".", "") if grammar.parts else entry
        if digits and not digits.startswith("-") and not (digits.isascii() and digits.isdigit()):
            return explain_entry(variable, entry)
    return None


def count_named(variable: str, shown: Sequence[str], count: int) -> int:
    """How many devices a list of names shows, where each may be that of a device or of a part of one.

    Raises:
        FilterError: some are no names, with what to write instead.
    """
    grammar = GRAMMARS.get(variable, NUMBERS)
    for entry in shown:
        if not (read_entries(entry, grammar) if grammar.parts else entry.startswith(grammar.prefixes)):
            raise FilterError(explain_entry(variable, entry))
    return len(resolve(",".join(shown), count, (), grammar)) if grammar.parts else len(shown)


def explain_entry(variable: str, entry: str) -> str:
    """What to write instead of an entry that is no device, for the user."""
    ends = parse_range(entry) if "-" in entry else None
    if ends is not None and ends[0] <= ends[1] <= min(ends[0] + 64, BEYOND - 1):
        numbers = ",".join(map(str, range(ends[0], ends[1] + 1)))
        return f"{entry!r} is a range, which {variable} does not take, write {numbers}"
    prefixes = GRAMMARS.get(variable, NUMBERS).prefixes
    names = f", or {' and '.join([f'{prefix}...' for prefix in prefixes])} names" if prefixes else ""
    return f"{quote(entry)} is no device, give numbers alone{names}"
