"""``--enable_each_rank_log``: one file a worker, stdout and stderr together."""

from __future__ import annotations

import os

from dsl.errors import LogDirError


def rank_log_path(log_dir: str, stamp: str, rank: int) -> str:
    """DeepSpeed's name, ``DIR/YYYYmmddHHMMSS_rankN.log``; ``stamp`` is the local time of the launch."""
    return os.path.join(log_dir, f"{stamp}_rank{rank}.log")


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
