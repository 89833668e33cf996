"""Files that are whole or absent, in folders of ours that one command at a time uses.

The files in a tuning's folder decide which command runs later. So only files that this user has made count,
and no link is followed.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from json import dumps, loads
from shutil import rmtree
from typing import Any, BinaryIO

from dsl.errors import AutotuningError
from dsl.machine.output_files import replace_file, sync

MARKER = ".dsl-autotuning"
"""A file by which dsl knows a folder that it has made."""

SCRATCH = ".dsl-exp-"
"""Prefix of the names of files and folders that are being made or removed."""

SUMMARIES = ("summary.txt", "summary.json", "summary.png")
"""What a tuning has found: for people, for programs, and as a picture."""

MOST_BYTES = 1 << 24
"""Most bytes of a file that we read: no real config or file of metrics is larger."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
A_FILE, A_FOLDER = "a file", "a folder"
_KINDS = {
    stat.S_IFREG: A_FILE,
    stat.S_IFDIR: A_FOLDER,
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}


class Folder:
    """An existing folder of ours. Names in it may lead one level down: ``exp.json``, ``z0/exp.json``."""

    def __init__(self, path: str) -> None:
        """Open it. Raises OSError."""
        self.path = path
        self._fd = os.open(path, _FOLDER)
        self._lock_fd = -1
        self._owner = os.geteuid()

    def close(self) -> None:
        """Let other commands use it."""
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def names(self) -> list[str]:
        """The names in it. Raises AutotuningError."""
        with self._telling(""):
            return os.listdir(self._fd)

    def what(self, name: str) -> str:
        """What kind of file has that name, such as `A_FILE` or ``a pipe``; empty: there is none."""
        try:
            with self._below(name) as (fd, last):
                found = os.lstat(last, dir_fd=fd)
        except OSError:
            return ""
        if found.st_uid != self._owner:
            return _strange(found.st_uid)
        return _KINDS.get(stat.S_IFMT(found.st_mode), "no file")

    def open(self, name: str) -> BinaryIO:
        """Open a file of ours for reading. Raises OSError for everything else.

        A script may leave anything there: we do not wait for the writer of a pipe.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._below(name) as (fd, last):
            opened = os.open(last, flags, dir_fd=fd)
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != self._owner:
            os.close(opened)
            raise FileNotFoundError(name)
        return open(opened, "rb")

    def read(self, name: str) -> str | None:
        """The text of a file, up to `MOST_BYTES`; None: it cannot be read, or is no file of ours."""
        try:
            with self.open(name) as file:
                return file.read(MOST_BYTES).decode(errors="replace")
        except OSError:
            return None

    def read_object(self, name: str) -> dict[str, Any]:
        """What a file of JSON holds; empty if it is no object, or no file of ours."""
        try:
            found = loads(self.read(name) or "null")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file that is whole or absent, even if the machine fails. Raises AutotuningError."""
        data = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
        with self._telling(name), self._below(name) as (fd, last):
            scratch = f"{last}.new"
            with suppress(FileNotFoundError):
                os.unlink(scratch, dir_fd=fd)
            replace_file(scratch, last, data, folder=fd, is_durable=True)
            sync(fd)

    def make(self, name: str) -> None:
        """Make a folder in it. Raises AutotuningError."""
        with self._telling(name):
            os.mkdir(name, dir_fd=self._fd)

    def rename(self, old: str, new: str) -> None:
        """Give something another name beside it, even if the machine fails. Raises AutotuningError."""
        with self._telling(new), self._below(old) as (fd, last):
            os.rename(last, new.rpartition("/")[2], src_dir_fd=fd, dst_dir_fd=fd)
            sync(fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises AutotuningError."""
        with self._telling(name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def clear(self, name: str) -> None:
        """Remove the file or folder that an earlier command has left. Raises AutotuningError."""
        path = f"{self.path}/{name}"
        if os.path.islink(path) or not os.path.isdir(path):
            self.remove(name)
            return
        with self._telling(name):
            rmtree(path)

    def mark(self, line: str) -> None:
        """Write a line into the marker. Raises AutotuningError."""
        data = line.encode()
        with self._telling(MARKER):
            os.pwrite(self._lock_fd, data, 0)  # first, as even a full disk has room for the old length
            os.ftruncate(self._lock_fd, len(data))
            sync(self._lock_fd)

    def check(self, key: str) -> None:
        """Refuse a folder in which other users may write. Raises AutotuningError; ``key``: its config key.

        A folder that a group may write to is accepted: with a umask of 002, every folder is like that. Files
        that others put there do not count.
        """
        found = os.fstat(self._fd)
        if found.st_uid == self._owner and not found.st_mode & stat.S_IWOTH:
            return
        with self._telling(""):
            made = self._probe()
        if found.st_uid != made.st_uid:
            raise AutotuningError(
                f"{self.path} belongs to another user (uid {found.st_uid}), name another folder as "
                f"autotuning.{key}"
            )
        if found.st_mode & ~made.st_mode & stat.S_IWOTH:
            raise AutotuningError(
                f"{self.path} may be written by every user, take that away (chmod o-w) or name another "
                f"folder as autotuning.{key}"
            )
        self._owner = made.st_uid

    def lock(self, key: str) -> None:
        """Mark it as ours and keep other commands out. Raises AutotuningError; ``key`` as for `check`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._telling(MARKER):
            self._lock_fd = os.open(MARKER, flags, 0o644, dir_fd=self._fd)
            self._check_owner(self._lock_fd)
        if not stat.S_ISREG(os.fstat(self._lock_fd).st_mode):
            raise AutotuningError(f"cannot write {self.path}: it holds a {MARKER} that is no file")
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AutotuningError(
                f"another command is tuning in {self.path}, wait for it or name another folder as "
                f"autotuning.{key}"
            ) from None

    def _probe(self) -> os.stat_result:
        """The owner and mode of a file that we make there: some file systems have one for all files."""
        name = f"{SCRATCH}{os.urandom(4).hex()}"
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=self._fd)

    def _check_owner(self, fd: int) -> None:
        owner = os.fstat(fd).st_uid
        if owner != self._owner:
            raise PermissionError(_strange(owner))

    @contextmanager
    def _below(self, name: str) -> Iterator[tuple[int, str]]:
        """The folder around a name while the block runs, and the last part of the name. Raises OSError."""
        head, _, last = name.rpartition("/")
        if not head:
            yield self._fd, last
            return
        fd = os.open(head, _FOLDER | os.O_NOFOLLOW, dir_fd=self._fd)
        try:
            self._check_owner(fd)
            yield fd, last
        finally:
            os.close(fd)

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Turn an OSError in the block into an AutotuningError."""
        try:
            yield
        except OSError as error:
            raise refusal(error, f"{self.path}/{name}".rstrip("/")) from None


def check(key: str, path: str) -> None:
    """Refuse an existing folder that is not ours. Raises AutotuningError; ``key`` as for `Folder.check`."""
    try:
        folder = Folder(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise refusal(error, path) from None
    try:
        folder.check(key)
        if not folder.what(MARKER) and folder.names():
            raise AutotuningError(
                f"{path} holds files that no tuning has written, name another folder as autotuning.{key}"
            )
    finally:
        folder.close()


def claim(key: str, path: str) -> Folder:
    """Make or take a folder, until it is closed. Raises AutotuningError; ``key`` as for `Folder.check`."""
    try:
        os.makedirs(path, exist_ok=True)
        folder = Folder(path)
    except OSError as error:
        raise refusal(error, path) from None
    try:
        folder.check(key)
        folder.lock(key)
    except BaseException:
        folder.close()
        raise
    return folder


def refusal(error: OSError, path: object) -> AutotuningError:
    """An OSError as an AutotuningError of one line."""
    return AutotuningError(f"cannot write {path}: {error.strerror or error}")


def as_json(value: object) -> str:
    """A value as the text of a file."""
    return dumps(value, indent=2) + "\n"


def _strange(owner: int) -> str:
    return f"something of another user (uid {owner})"
