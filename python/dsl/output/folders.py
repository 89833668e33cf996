"""Directories of log files: made before the workers start, and removed where they hold nothing."""

from __future__ import annotations

import os
from time import time

from dsl.errors import LogDirError, LogDirIsFileError
from dsl.output.routes import RUN_PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


HELD = "held"
"""File in such a directory, locked while the process lives that made it. It goes when the job ends."""

YOUNG_S = 60.0
"""One that is younger may not be locked yet."""

MOST_LOOKED = 4096
"""So many names in the directory for temporary files are looked at."""

_held: dict[str, int] = {}  # a process that closes such a file loses its lock


def hold_run_dir(run_dir: str) -> None:
    """Show all other processes that a run lives. Where that cannot be, nobody removes what it leaves."""
    path = f"{run_dir}/{HELD}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return
    try:
        os.lockf(file, os.F_TLOCK, 0)
    except OSError:
        _try(os.unlink, path)
        os.close(file)
    else:
        _held[run_dir] = file


def let_go_run_dir(run_dir: str) -> bool:
    """End that; whether this run was shown to live. The agent may do it for the guard, which has the lock."""
    file = _held.pop(run_dir, None)
    if file is None:
        return False
    _try(os.unlink, f"{run_dir}/{HELD}")
    os.close(file)
    return True


def remove_dead_runs(folder: str, scratch: Collection[str]) -> None:
    """Remove the directories of this user's runs that were killed whole, and what is empty in them.

    ``scratch`` are names of files that go, too. Others stay, and the directories that they are in.
    """
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count == MOST_LOOKED:
                    return
                if entry.name.startswith(RUN_PREFIX) and entry.path not in _held:
                    _remove_if_dead(entry.path, scratch)
    except OSError:
        return  # it will be tried again by the next run


def _remove_if_dead(run_dir: str, scratch: Collection[str]) -> None:
    import stat

    try:
        top = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        file = os.open(HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=top)
        try:
            facts = os.fstat(file)
            owners = {os.fstat(top).st_uid, facts.st_uid}
            is_young = time() - facts.st_mtime < YOUNG_S
            if owners != {os.geteuid()} or is_young or not stat.S_ISREG(facts.st_mode):
                return
            os.lockf(file, os.F_TLOCK, 0)
            _empty(top, scratch)
            os.unlink(HELD, dir_fd=top)
            os.rmdir(run_dir)
        finally:
            os.close(file)
    except OSError:
        return  # it lives, has ended by itself, or holds something that is worth keeping
    finally:
        os.close(top)


def _empty(top: int, scratch: Collection[str], depth: int = 2) -> None:
    """Remove what is empty in a directory, and files of these names, so many levels deep. Follows no link."""
    for name in os.listdir(top):
        try:
            if name in scratch:
                os.unlink(name, dir_fd=top)
            elif depth:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    _empty(inner, scratch, depth - 1)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
        except OSError:
            continue


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


def link_latest(run_dir: str, name: str) -> None:
    """Let ``name``, beside a run's directory, lead to it. What is there and is no link of ours stays.

    It is replaced in one step, so whoever follows it at any time finds a run.
    """
    folder, _, target = run_dir.rpartition("/")
    link, spare = f"{folder}/{name}", f"{folder}/.{name}_{target}"
    try:
        if not _may_link(link):
            return
        os.symlink(target, spare)
        try:
            os.rename(spare, link)
        except OSError:
            os.unlink(spare)
    except OSError:
        return  # the file system knows no links, or somebody else was faster


def _may_link(link: str) -> bool:
    """Whether nothing is there, or a link to the directory of a run beside it: its name has a time."""
    try:
        known = os.readlink(link)
    except OSError:
        return not os.path.lexists(link)
    return "/" not in known and any(len(part) == 14 and part.isdecimal() for part in known.split("_"))


def unlink_latest(run_dir: str, name: str) -> None:
    """Take the link away again if its run's directory is gone."""
    folder, _, target = run_dir.rpartition("/")
    try:
        if os.readlink(f"{folder}/{name}") == target and not os.path.lexists(run_dir):
            os.unlink(f"{folder}/{name}")
    except OSError:
        return  # it is not there


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
        raise LogDirIsFileError(
            f"{log_dir!r} should not be a file, it should be a directory for the rank logs"
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        kind = LogDirIsFileError if isinstance(error, NotADirectoryError) else LogDirError
        raise kind(f"unable to create directory {log_dir!r} for each rank log: {reason}") from None
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise LogDirError(f"directory {log_dir!r} for each rank log cannot be written by this user")
    return is_new
