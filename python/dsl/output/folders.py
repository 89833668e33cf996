"""Directories of log files: made before the workers start, and removed if they are empty."""

from __future__ import annotations

import os
import stat
from time import time

from dsl.errors import LogDirError, LogDirIsFileError
from dsl.output import RUN_PREFIX, is_error_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    MayGo = Callable[[str], bool] | None

YOUNG_S = 60.0
"""Seconds; a younger file may not be locked yet."""

MOST_LOOKED = 4096
"""How many names in the directory for temporary files we look at."""

_held: dict[str, int] = {}  # kept open: a process that closes such a file loses its lock


def hold_run_dir(run_dir: str) -> None:
    """Lock a file that shows that the run lives. If that fails, no later run removes what this one leaves."""
    path = _mark(run_dir)
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


def let_go_run_dir(run_dir: str) -> None:
    """Remove that file, if there is one. The agent may do so for the guard, which locked it."""
    file = _held.pop(run_dir, None)
    if file is not None:
        _try(os.unlink, _mark(run_dir))
        os.close(file)


def _mark(run_dir: str) -> str:
    """The file of a run that lives. It lies beside the directory: then kept directories cost no look."""
    folder, _, name = run_dir.rpartition("/")
    return f"{folder}/.{name}"


def remove_dead_runs(folder: str, scratch: Collection[str]) -> None:
    """Remove the empty directories that this user's runs left when all of their processes were killed.

    ``scratch`` are names of files that are removed, too. Other files stay, and so do their directories.
    """
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count == MOST_LOOKED:
                    return
                if entry.name.startswith(f".{RUN_PREFIX}"):
                    run_dir = f"{folder}/{entry.name[1:]}"
                    if run_dir not in _held:
                        _remove_if_dead(run_dir, scratch)
    except OSError:
        return  # the next run will try again


def _remove_if_dead(run_dir: str, scratch: Collection[str]) -> None:
    try:
        file = os.open(_mark(run_dir), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        facts = os.fstat(file)
        is_young = time() - facts.st_mtime < YOUNG_S
        if facts.st_uid != os.geteuid() or is_young or not stat.S_ISREG(facts.st_mode):
            return
        os.lockf(file, os.F_TLOCK, 0)
        _remove_left(run_dir, scratch.__contains__, owner=facts.st_uid)
        os.unlink(_mark(run_dir))
    except OSError:
        return  # the run lives, or another one does the same
    finally:
        os.close(file)


def _remove_left(run_dir: str, may_go: MayGo, owner: int | None = None) -> None:
    """Remove a run's directory with what may go in it. It stays if it holds more, or has another owner."""
    try:
        _remove(run_dir, may_go, owner=owner)
    except OSError:
        return  # it was never made, is gone, or holds something that is worth keeping


def _remove(
    path: str, may_go: MayGo, depth: int = 2, above: int | None = None, owner: int | None = None
) -> None:
    """Remove a directory with the empty directories and the files in it that may go, by their names.

    None: no file may go. ``depth``: so many levels below it are looked at; links are not followed. ``above``:
    descriptor of the directory that it is in. Raises OSError if it stays.
    """
    if owner is None:
        try:
            os.rmdir(path, dir_fd=above)
        except OSError:
            if may_go is None and not depth:
                raise
        else:
            return
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        if owner is not None and os.fstat(top).st_uid != owner:
            return
        with os.scandir(top) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_dir in found:
            try:
                if is_dir and depth:
                    _remove(name, may_go, depth - 1, above=top)
                elif not is_dir and may_go is not None and may_go(name):
                    os.unlink(name, dir_fd=top)
            except OSError:
                continue  # it is gone, or holds something that is worth keeping
        os.rmdir(path, dir_fd=above)
    finally:
        os.close(top)


def make_run_dirs(run_dirs: Sequence[str], *, are_shared: bool = False, is_private: bool = False) -> None:
    """Make the directories of one attempt, the outermost first; all must be new.

    ``are_shared``: several of our processes use them, so a directory may exist already. ``is_private``: only
    this user may look into the outermost one.

    Raises:
        LogDirError: a directory cannot be made, or something else has its name.
    """
    for index, path in enumerate(run_dirs):
        what = "directory of this run" if index == 0 and not are_shared else "log directory"
        _make(path, what, may_exist=are_shared, is_private=is_private and index == 0)


def remake_run_dirs(run_dir: str, run_dirs: Sequence[str], *, is_private: bool = False) -> None:
    """Make the directories of a further attempt, and the run's directory with its parents if it is gone.

    ``is_private``: only this user may look into the run's directory.

    Raises:
        LogDirError: a directory cannot be made, or a file or another user's directory has the run's name.
    """
    _make(run_dir, "directory of this run", may_exist=True, is_private=is_private)
    make_run_dirs([path for path in run_dirs if path != run_dir])


def _make(path: str, what: str, *, may_exist: bool, is_private: bool) -> None:
    try:
        if may_exist:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.mkdir(path, 0o700 if is_private else 0o750)
        except FileExistsError:
            facts = os.lstat(path)
            is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
            if not (may_exist and is_ours):  # where all users may make folders, any can take a name first
                raise
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise LogDirError(f"unable to create the {what} {path!r}: {reason}") from None


def remove_run_dir(run_dir: str, *, succeeded: bool) -> None:
    """Remove the empty directories of a run; after a success also the error files of its attempts."""
    _remove_left(run_dir, is_error_file if succeeded else None)


def _try(call: Callable[[str], None], path: str) -> bool:
    """Return whether the call could be made."""
    try:
        call(path)
    except OSError:
        return False  # it is not there, or holds something that is worth keeping
    return True


def link_latest(run_dir: str, name: str) -> None:
    """Make ``name``, beside a run's directory, a link to that directory. Anything but our own link stays.

    The name is hidden, so that ``*`` finds each file once. The link is replaced in one step, so it leads to
    a run at any time.
    """
    folder, _, target = run_dir.rpartition("/")
    link, spare = f"{folder}/{name}", f"{folder}/{name}_{target}"
    try:
        if not _may_link(link):
            return
        os.symlink(target, spare)
        try:
            os.rename(spare, link)
        except OSError:
            os.unlink(spare)
    except OSError:
        return  # the file system has no links, or another run was faster


def _may_link(link: str) -> bool:
    """Whether the name is free, or links to the directory of a run beside it: such a name has a time."""
    try:
        known = os.readlink(link)
    except OSError:
        return not os.path.lexists(link)
    return "/" not in known and any(len(part) == 14 and part.isdecimal() for part in known.split("_"))


def unlink_latest(run_dir: str, name: str) -> None:
    """Remove the link again if its run's directory is gone."""
    folder, _, target = run_dir.rpartition("/")
    try:
        if os.readlink(f"{folder}/{name}") == target and not os.path.lexists(run_dir):
            os.unlink(f"{folder}/{name}")
    except OSError:
        return  # it is not there


def remove_log_dir(log_dir: str) -> None:
    """Remove the directory if it is empty."""
    _try(os.rmdir, log_dir)


def make_log_dir(log_dir: str) -> bool:
    """Create the directory and its parents, unless it exists; return whether that was needed.

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
