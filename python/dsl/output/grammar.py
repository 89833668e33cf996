"""How users write ranks and commands, and what is shown, kept and put before lines: loaded if they do."""

from __future__ import annotations

from dsl.errors import OptionError
from dsl.words import BEYOND, parse_number, parse_range, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Runs: TypeAlias = tuple[tuple[int, int], ...]
    """Numbers as runs, each with its first and its last number."""
    Streams: TypeAlias = Callable[[int, int], int]
    """Local rank, global rank -> 0 (none), 1 (stdout), 2 (stderr) or 3 (both)."""

TIME = "HH:MM:SS.mmm"
"""Stands in a prefix for the local time at which a line is read; the engine puts it there."""
GLOBAL = "rank"
"""Stands before a global rank in a stream map, where a number alone is a local rank."""


def parse_streams(text: str, option: str) -> Streams:
    """torchrun's stream map, to which ours adds global ranks.

    ``text`` is the streams of all ranks, or a comma list of ``LOCAL_RANK:STREAMS``, ``rankRANK:STREAMS`` and
    ``rankFIRST-LAST:STREAMS``. A global rank counts before a local one. A rank that is not in the list has 0.

    Raises:
        OptionError: the text is neither.
    """
    if text in ("0", "1", "2", "3"):
        streams = int(text)
        return lambda _local_rank, _rank: streams
    found: dict[str, list[tuple[int, int, int]]] = {GLOBAL: [], "": []}
    for item in text.split(","):
        word, _, streams_text = item.partition(":")
        kind = GLOBAL if word.startswith(GLOBAL) else ""
        number = parse_number(word)
        ends = parse_range(word[len(kind) :]) if kind else None if number is None else (number, number)
        if ends is None or not ends[0] <= ends[1] < BEYOND or streams_text not in ("0", "1", "2", "3"):
            raise OptionError(
                f"{option} {quote(text)}: expected 0, 1, 2 or 3 (none, stdout, stderr, both), "
                f"or a list such as 0:1,rank12:3, not {quote(item)}"
            )
        for first, last, _ in found[kind]:
            if first <= ends[1] and ends[0] <= last:
                noun = kind or "local rank"
                raise OptionError(f"{option} {text!r}: {noun} {max(first, ends[0])} is there twice")
        found[kind].append((*ends, int(streams_text)))

    def streams_of(local_rank: int, rank: int) -> int:
        for kind, number in ((GLOBAL, rank), ("", local_rank)):
            for first, last, streams in found[kind]:
                if first <= number <= last:
                    return streams
        return 0

    return streams_of


def parse_ranks(text: str, option: str, others: str = "") -> Runs:
    """Read global ranks, such as ``0,8-15``. ``others``: what else the option takes, for the message.

    Raises:
        OptionError: the text is no list of ranks.
    """
    found = []
    for part in text.split(","):
        ends = parse_range(part)
        if ends is None or not ends[0] <= ends[1] < BEYOND:
            raise OptionError(
                f"{option} {quote(text)}: bad range {quote(part)}, expected a rank or FIRST-LAST{others}"
            )
        found.append(ends)
    return tuple(found)


def is_in(number: int, runs: Runs) -> bool:
    """Whether a number is in one of the runs."""
    return any(first <= number <= last for first, last in runs)


def shell_words(text: str, option: str) -> tuple[str, ...]:
    """Split the value of an option into words as a shell does.

    Raises:
        OptionError: a quotation mark is not closed, or nothing follows a backslash.
    """
    from shlex import split

    try:
        return tuple(split(text))
    except ValueError as error:
        why = str(error)
        raise OptionError(
            f"{option} {quote(text)} are no words of a shell: {why[:1].lower()}{why[1:]}"
        ) from None


def parse_local_ranks(text: str) -> frozenset[int]:
    """A comma list of local ranks. As with torchrun, ranks that do not exist do no harm.

    Raises:
        OptionError: an item is no number.
    """
    found = set()
    for item in text.split(","):
        rank = parse_number(item.strip())
        if rank is None:
            raise OptionError(
                f"--local-ranks-filter {quote(text)}: expected local ranks such as 0,2, not {quote(item)}"
            )
        found.add(rank)
    return frozenset(found)


def fill_template(template: str, role: str, rank: int, local_rank: int, host: str) -> str:
    """A line prefix from torchrun's template.

    The template may hold ``${role_name}``, ``${rank}``, ``${local_rank}`` and our additions ``${time}`` and
    ``${host}``, of which ``${hostname}`` is an earlier name.
    """
    from string import Template

    facts = {"role_name": role, "rank": rank, "local_rank": local_rank, "host": host, "hostname": host}
    return Template(template).safe_substitute(facts, time=TIME)
