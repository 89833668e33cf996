"""Variables that limit which devices a process sees, read as each vendor's runtime reads them.

The last functions find values that show each worker its own device, and explain mistakes in values.

`CUDA_VISIBLE_DEVICES` follows "CUDA Environment Variables" of NVIDIA's CUDA programming guide and what
``torch.cuda.device_count`` makes of it; `ROCR_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES` AMD's "GPU isolation
techniques"; `ZE_AFFINITY_MASK` the programming guide of oneAPI Level Zero; `ASCEND_RT_VISIBLE_DEVICES` the
reference of CANN's environment variables; `HABANA_VISIBLE_MODULES` the Gaudi documentation. The variables of
vendors without a published grammar are read as lists of numbers that end where CUDA's would.

None of them takes ranges: CUDA reads ``0-3`` as 0. (``ASCEND_VISIBLE_DEVICES`` does, and
``NVIDIA_VISIBLE_DEVICES`` takes ``all``, but only container runtimes read these two, not processes.)
"""

from __future__ import annotations

from dsl._record import Record
from dsl.errors import FilterError
from dsl.words import BEYOND, parse_range, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TypeVar

    _T = TypeVar("_T")


class Grammar(Record):
    """How a runtime reads its variable. An entry that it cannot read ends the list, except with ``skips``."""

    prefixes: tuple[str, ...] = ()
    """Prefixes of the names of devices."""
    mixed: bool = False
    """A list may have both names and numbers."""
    loose: bool = True
    """A number is read as strtoul(3) does: blanks before it and other text behind it are ignored."""
    repeated: str = "hides"
    """What a repeated device does: it ``hides`` all devices, or counts ``once``."""
    empty_shows_all: bool = False
    """An empty value means the same as no value."""
    skips: bool = False
    """Entries that cannot be read are skipped."""
    parts: bool = False
    """``1.0`` is a part of device 1."""


CUDA = Grammar(prefixes=("GPU-", "MIG-"))
ROCR = Grammar(prefixes=("GPU-",), mixed=True)
NUMBERS = Grammar()
LEVEL_ZERO = Grammar(loose=True, repeated="once", empty_shows_all=True, skips=True, parts=True)
ASCEND = Grammar(loose=False, repeated="once")
HABANA = Grammar(repeated="once", empty_shows_all=True)

NAMELESS = "GPU-XX"
"""What ROCm calls a device without a serial number."""

LEVEL_ZERO_VARIABLE = "ZE_AFFINITY_MASK"
HIERARCHY_VARIABLE = "ZE_FLAT_DEVICE_HIERARCHY"

GRAMMARS = {
    "CUDA_VISIBLE_DEVICES": CUDA,
    "HIP_VISIBLE_DEVICES": ROCR,
    "ROCR_VISIBLE_DEVICES": ROCR,
    LEVEL_ZERO_VARIABLE: LEVEL_ZERO,
    "ASCEND_RT_VISIBLE_DEVICES": ASCEND,
    "HABANA_VISIBLE_MODULES": HABANA,
    "MLU_VISIBLE_DEVICES": NUMBERS,
    "SDAA_VISIBLE_DEVICES": NUMBERS,
    "SUPA_VISIBLE_DEVICES": NUMBERS,
}
"""The grammar of each variable."""


def read_entries(value: str | None, grammar: Grammar = CUDA) -> tuple[str, ...] | None:
    """The devices that a value names: numbers without leading zeros, names unchanged.

    None: the process sees all devices; ``()``: it sees none. This function knows nothing about the machine,
    so numbers may be too high and names unknown, see `resolve`.
    """
    if value is None or (grammar.empty_shows_all and value.strip() in ("", "all")):
        return None
    words = value.split(",")
    named = [prefix for prefix in grammar.prefixes if words[0].startswith(prefix)]
    return tuple(_listed([_read_entry(word, grammar, named) for word in words], grammar))


def _listed(found: Iterable[_T | None], grammar: Grammar) -> list[_T]:
    """What a list of entries stands for, each once. None: an entry that cannot be read."""
    kept: list[_T] = []
    for device in found:
        if device is None:
            if grammar.skips:
                continue
            break
        if device not in kept:
            kept.append(device)
        elif grammar.repeated == "hides":
            return []
    return kept


def _read_entry(word: str, grammar: Grammar, named: Sequence[str]) -> str | None:
    if named or (grammar.mixed and word.strip().startswith(grammar.prefixes)):
        # In a list that may be mixed, blanks before a name do not matter; CUDA's list ends at such a name.
        name = word.strip() if grammar.mixed else word
        if name.startswith(grammar.prefixes if grammar.mixed else tuple(named)):
            return name
        if not grammar.mixed:
            return None
    text = word.strip() if grammar.loose else word
    if grammar.parts:
        return _read_part(text)
    digits = _leading_digits(text.removeprefix("+") if grammar.loose else text)
    if not digits or (not grammar.loose and digits != text):
        return None
    return str(int(digits))


def _leading_digits(text: str) -> str:
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    # No machine numbers its devices with more digits, and int() refuses very long ones.
    return digits if len(digits) <= 18 else ""


def _read_part(text: str) -> str | None:
    numbers = text.split(".")
    digits = [_leading_digits(number) for number in numbers]
    return ".".join([str(int(each)) for each in digits]) if digits == numbers and all(digits) else None


def resolve(
    value: str | None, count: int, names: Sequence[str] = (), grammar: Grammar = CUDA
) -> tuple[int, ...]:
    """Positions of the visible devices among ``count``, in the order in which a process numbers them.

    ``names``: the devices' names (UUIDs), by position. An entry may be the beginning of a name, if only one
    name begins like that. A number or name that is no device ends the list.
    """
    entries = read_entries(value, grammar)
    if entries is None:
        return tuple(range(count))
    positions = _listed([_position(entry, count, names) for entry in entries], grammar)
    # Level Zero keeps the machine's order, whatever the order of the mask.
    return tuple(sorted(positions) if grammar.parts else positions)


def _position(entry: str, count: int, names: Sequence[str]) -> int | None:
    number = entry.partition(".")[0]
    if number.isdigit():
        return int(number) if int(number) < count else None
    found = [position for position, name in enumerate(names[:count]) if name.startswith(entry)]
    return found[0] if len(found) == 1 else None


def count_visible(
    value: str | None, count: int, names: Sequence[str] = (), grammar: Grammar = CUDA, *, alone: bool = False
) -> int:
    """How many of ``count`` devices a process sees.

    Without ``names``, the names in a value cannot be looked up: then all of them count, up to ``count``. A
    process sees one MIG instance and no other device, however many instances the value names. ``alone``
    counts all of them, for workers that see one instance each. There ``names`` are those of the instances.
    """
    entries = read_entries(value, grammar)
    if entries and entries[0].startswith("MIG-"):
        found = len(resolve(value, len(names), names, grammar)) if names else len(entries)
        return found if alone else min(found, 1)
    if names or not entries or entries[0][0].isdigit():
        return len(resolve(value, count, names, grammar))
    return min(len(entries), count)


def resolve_rocm(environ: Mapping[str, str], names: Sequence[str]) -> tuple[int, ...]:
    """Positions of the AMD devices with these names that a process sees, in its order.

    ROCR's variable chooses first, then HIP's among the rest. HIP reads ``HIP_VISIBLE_DEVICES``, or
    ``CUDA_VISIBLE_DEVICES`` if that is not set.
    """
    left = resolve(environ.get("ROCR_VISIBLE_DEVICES"), len(names), names, ROCR)
    value = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    seen = resolve(value, len(left), [names[each] for each in left], ROCR)
    return tuple([left[each] for each in seen])


def rocm_names(environ: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """The names of those devices that ROCR leaves to HIP; empty: not all are known."""
    left = resolve(environ.get("ROCR_VISIBLE_DEVICES"), len(names), names, ROCR)
    return [] if NAMELESS in names else [names[each] for each in left]


def level_zero_hierarchy(environ: Mapping[str, str]) -> str:
    """``COMPOSITE`` if a card is a device for Level Zero and its tiles are parts of it, else ``FLAT``.

    ``ZE_FLAT_DEVICE_HIERARCHY`` decides. The driver's default depends on the card; where nothing is set, a
    mask that names parts is taken to mean cards.
    """
    value = environ.get(HIERARCHY_VARIABLE, "")
    if value in ("FLAT", "COMBINED", "COMPOSITE"):
        return "COMPOSITE" if value == "COMPOSITE" else "FLAT"
    return "COMPOSITE" if "." in environ.get(LEVEL_ZERO_VARIABLE, "") else "FLAT"


def level_zero_entries(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The entries of ``ZE_AFFINITY_MASK``; None: all devices. If tiles are devices, parts are ignored."""
    entries = read_entries(environ.get(LEVEL_ZERO_VARIABLE), LEVEL_ZERO)
    if entries is None or level_zero_hierarchy(environ) == "COMPOSITE":
        return entries
    return tuple([entry for entry in entries if "." not in entry])


def resolve_level_zero(environ: Mapping[str, str], count: int) -> tuple[int, ...]:
    """Positions of the visible Intel devices among ``count``; a process may see only a part of a device."""
    entries = level_zero_entries(environ)
    if entries is None:
        return tuple(range(count))
    numbers = {int(entry.partition(".")[0]) for entry in entries}
    return tuple(sorted([number for number in numbers if number < count]))


def worker_choices(variable: str, environ: Mapping[str, str], total: int, count: int) -> list[str]:
    """All values of a variable that show a worker a device of its own, for ``count`` workers.

    ``total`` is the number of devices. There may be fewer or more values than workers. They have the order in
    which one process would number the devices, so each worker gets the device that it would pick by its local
    rank. If the variable names parts of devices (tiles of Level Zero), a worker gets all named parts of one
    device, or a single part if there are more workers than devices.
    """
    value = environ.get(variable)
    entries = level_zero_entries(environ) if variable == LEVEL_ZERO_VARIABLE else None
    if entries is None:
        is_all = value is None or variable == LEVEL_ZERO_VARIABLE
        seen = range(min(total, count)) if is_all else resolve(value, total, (), GRAMMARS[variable])
        return [str(position) for position in seen]
    devices = []
    for number in resolve_level_zero(environ, total):
        parts = [entry for entry in entries if entry.partition(".")[0] == str(number)]
        whole = str(number) in parts
        devices.append([str(number)] if whole else sorted(parts, key=lambda part: int(part.split(".")[1])))
    if count <= len(devices):
        return [",".join(parts) for parts in devices]
    return [part for parts in devices for part in parts]


def explain_value(variable: str, value: str) -> str | None:
    """What to write instead of a value's first entry that is no number and no part; None: no such entry.

    Entries that hide devices (negative, empty) are not meant as devices, and do not count.
    """
    grammar = GRAMMARS.get(variable, NUMBERS)
    for word in value.split(","):
        entry = word.strip() if grammar.loose else word
        digits = entry.replace(".", "") if grammar.parts else entry
        if digits and not digits.startswith("-") and not (digits.isascii() and digits.isdigit()):
            return explain_entry(variable, entry)
    return None


def count_named(variable: str, shown: Sequence[str], count: int, names: Sequence[str] = ()) -> int:
    """How many devices a list of names shows. A name may stand for a device or for a part of a device.

    ``names``: what the runtime calls its devices; empty: that is not known.

    Raises:
        FilterError: an entry is no name, or hides devices; the text says what to write instead.
    """
    grammar = GRAMMARS.get(variable, NUMBERS)
    for entry in sorted(shown, key=str.isdigit):  # a number is wrong only beside names
        if not (read_entries(entry, grammar) if grammar.parts else entry.startswith(grammar.prefixes)):
            raise FilterError(explain_entry(variable, entry))
    if grammar.parts:
        return len(resolve(",".join(shown), count, (), grammar))
    kept = read_entries(",".join(shown), grammar) or ()
    if len(kept) < len(shown):
        raise FilterError(f"{quote(shown[len(kept)])} cannot stand behind {quote(shown[0])}, leave it out")
    seen: set[int] = set()
    for entry in shown if names else ():
        position = _position(entry, len(names), names)
        if position is None:
            several = any(name.startswith(entry) for name in names)
            what = "begins several names of devices" if several else "is no device of this machine"
            mend = "correct or unset the variable"
            raise FilterError(f"{quote(entry)} {what}, so it hides itself and those behind it, {mend}")
        if position in seen:
            raise FilterError(f"{quote(entry)} names a device again, which hides them all, leave it out")
        seen.add(position)
    return len(shown)


def explain_entry(variable: str, entry: str) -> str:
    """Tell the user what to write instead of an entry that is no device."""
    ends = parse_range(entry) if "-" in entry else None
    if ends is not None and ends[0] <= ends[1] <= min(ends[0] + 64, BEYOND - 1):
        numbers = ",".join(map(str, range(ends[0], ends[1] + 1)))
        return f"{entry!r} is a range, which {variable} does not take, write {numbers}"
    prefixes = GRAMMARS.get(variable, NUMBERS).prefixes
    names = f", or {' and '.join([f'{prefix}...' for prefix in prefixes])} names" if prefixes else ""
    return f"{quote(entry)} is no device, give numbers alone{names}"
