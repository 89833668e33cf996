"""The grammar of the options about output, and the names of log files."""

from __future__ import annotations

import posixpath

from dsl.errors import OptionError
from dsl.lists import parse_number, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def rank_log_path(log_dir: str, stamp: str, rank: int) -> str:
    """DeepSpeed's name, ``DIR/YYYYmmddHHMMSS_rankN.log``; ``stamp`` is the local time of the launch."""
    return posixpath.join(log_dir, f"{stamp}_rank{rank}.log")


def parse_streams(text: str, option: str) -> Callable[[int], int]:
    """torchrun's stream map: local rank -> 0 (none), 1 (stdout), 2 (stderr) or 3 (both).

    ``text`` is one of these numbers for all ranks, or a comma list of ``LOCAL_RANK:STREAMS``. A rank that is
    not in the list has 0.

    Raises:
        OptionError: the text is neither.
    """
    if text in ("0", "1", "2", "3"):
        streams = int(text)
        return lambda _local_rank: streams
    found: dict[int, int] = {}
    for item in text.split(","):
        rank_text, _, streams_text = item.partition(":")
        rank = parse_number(rank_text)
        if rank is None or streams_text not in ("0", "1", "2", "3"):
            raise OptionError(
                f"{option} {quote(text)}: expected 0, 1, 2 or 3 (none, stdout, stderr, both), "
                f"or a list such as 0:1,12:3, not {quote(item)}"
            )
        if rank in found:
            raise OptionError(f"{option} {text!r}: local rank {rank} is there twice")
        found[rank] = int(streams_text)
    return lambda local_rank: found.get(local_rank, 0)


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


def parse_words(text: str) -> tuple[str, ...]:
    """torchrun's comma list of words, in which two commas stand for a comma in a word."""
    words = text.replace(",,", "\0").split(",")
    return tuple([word.replace("\0", ",") for word in words if word])


def fill_template(template: str, role: str, rank: int, local_rank: int, host: str) -> str:
    """A line prefix from torchrun's template.

    The template may hold ``${role_name}``, ``${rank}``, ``${local_rank}`` and our addition ``${hostname}``.
    """
    from string import Template

    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=host)
