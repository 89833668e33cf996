"""Log files: the grammar of the options, the names of the files, and the directories."""

from __future__ import annotations

import os

from dsl.errors import LogDirError, OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_DIGITS = 9  # of a rank; Python itself refuses to read numbers of thousands of digits


def parse_rank(text: str) -> int | None:
    """A rank, global or local, as a user writes it: ASCII digits. None if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def rank_log_path(log_dir: str, stamp: str, rank: int) -> str:
    """DeepSpeed's name, ``DIR/YYYYmmddHHMMSS_rankN.log``; ``stamp`` is the local time of the launch."""
    return os.path.join(log_dir, f"{stamp}_rank{rank}.log")


def parse_streams(text: str, option: str) -> Callable[[int], int]:
    """torchrun's stream map: local rank -> 0 (none), 1 (stdout), 2 (stderr) or 3 (both).

    ``text`` is one of these for all, or a comma list ``LOCAL_RANK:STREAMS``; ranks that it leaves out have 0.

    Raises:
        OptionError: it is neither.
    """
    if text in ("0", "1", "2", "3"):
        streams = int(text)
        return lambda _local_rank: streams
    found: dict[int, int] = {}
    for item in text.split(","):
        rank_text, _, streams_text = item.partition(":")
        rank = parse_rank(rank_text)
        if rank is None or streams_text not in ("0", "1", "2", "3"):
            raise OptionError(
                f"{option} {text!r}: expected 0, 1, 2 or 3 (none, stdout, stderr, both), "
                f"or a list such as 0:1,12:3, not {item!r}"
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
        rank = parse_rank(item.strip())
        if rank is None:
            raise OptionError(
                f"--local-ranks-filter {text!r}: expected local ranks such as 0,2, not {item!r}"
            )
        found.add(rank)
    return frozenset(found)


def parse_words(text: str) -> tuple[str, ...]:
    """torchrun's comma list of words, in which two commas stand for one."""
    words = text.replace(",,", "\0").split(",")
    return tuple([word.replace("\0", ",") for word in words if word])


def fill_template(template: str, role: str, rank: int, local_rank: int) -> str:
    """A line prefix from torchrun's template with ``${role_name}``, ``${rank}`` and ``${local_rank}``."""
    from string import Template

    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)


def make_run_dirs(run_dirs: Sequence[str]) -> None:
    """Make the directories of one run, the outermost first; that one must be new.

    Raises:
        LogDirError: it is there already, or cannot be made.
    """
    for index, path in enumerate(run_dirs):
        try:
            os.mkdir(path, 0o750)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            what = "directory of this run" if index == 0 else "log directory"
            raise LogDirError(f"unable to create the {what} {path!r}: {reason}") from None


def remove_run_dir(run_dir: str, last_attempt: int, count: int, *, succeeded: bool) -> None:
    """Remove what is empty of a run's directory; after a success also what failed workers said before.

    ``last_attempt``: the highest number that an attempt can have; ``count``: workers in each.
    """
    for attempt in range(last_attempt + 1):
        for local_rank in range(count):
            folder = f"{run_dir}/attempt_{attempt}/{local_rank}"
            if succeeded:
                _try(os.unlink, f"{folder}/error.json")
            _try(os.rmdir, folder)
        _try(os.rmdir, f"{run_dir}/attempt_{attempt}")
    _try(os.rmdir, run_dir)


def _try(call: Callable[[str], None], path: str) -> None:
    try:
        call(path)
    except OSError:
        return  # it is not there, or holds something that is worth keeping


def make_log_dir(log_dir: str) -> None:
    """Create the directory and its parents, unless it exists.

    Raises:
        LogDirError: it is a file, or cannot be created or written.
    """
    try:
        os.makedirs(log_dir, exist_ok=True)
    except FileExistsError:
        raise LogDirError(
            f"{log_dir!r} should not be a file, it should be a directory for the rank logs"
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise LogDirError(f"unable to create directory {log_dir!r} for each rank log: {reason}") from None
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise LogDirError(f"directory {log_dir!r} for each rank log cannot be written by this user")
