"""Directories of log files: made before the workers start, and removed where they hold nothing."""

from __future__ import annotations

import os

from dsl.errors import LogDirError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def make_run_dirs(run_dirs: Sequence[str]) -> None:
    """Make the directories of one attempt, the outermost first; all must be new.

    Raises:
        LogDirError: one is there already, or cannot be made.
    """
    for index, path in enumerate(run_dirs):
        try:
            os.mkdir(path, 0o750)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            what = "directory of this run" if index == 0 else "log directory"
            raise LogDirError(f"unable to create the {what} {path!r}: {reason}") from None


def make_shared_dirs(run_dirs: Sequence[str]) -> None:
    """The same where several processes of ours make them: what one of them has made is there.

    Raises:
        LogDirError: one cannot be made, or its place has been taken by somebody else.
    """
    for path in run_dirs:
        try:
            try:
                os.mkdir(path, 0o750)
            except FileExistsError:
                _refuse_strangers(path)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise LogDirError(f"unable to create the log directory {path!r}: {reason}") from None


def remake_run_dirs(run_dir: str, run_dirs: Sequence[str]) -> None:
    """Make the directories of a further attempt, and that of the run, with its parents, if it is gone.

    Raises:
        LogDirError: one cannot be made, or the place of the run's has been taken by somebody else.
    """
    try:
        os.makedirs(os.path.dirname(run_dir), exist_ok=True)
        try:
            os.mkdir(run_dir, 0o750)
        except FileExistsError:
            _refuse_strangers(run_dir)
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise LogDirError(f"unable to create the directory of this run {run_dir!r}: {reason}") from None
    make_run_dirs(run_dirs)


def _refuse_strangers(run_dir: str) -> None:
    """In a directory for all users, a name that is known and free can be taken by any of them."""
    import stat

    facts = os.lstat(run_dir)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise FileExistsError(17, "it is not ours")


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


def remove_log_dir(log_dir: str) -> None:
    """Remove the directory, unless there is something in it."""
    _try(os.rmdir, log_dir)


def make_log_dir(log_dir: str) -> bool:
    """Create the directory and its parents, unless it exists; whether that was needed.

    Raises:
        LogDirError: it is a file, or cannot be created or written.
    """
    is_new = not os.path.isdir(log_dir)
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
    return is_new
