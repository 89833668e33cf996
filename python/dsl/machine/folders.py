"""Folders in which only what this user has made counts: their files decide what a command does later.

They are reached by descriptors, and no link is followed. A file that is written is whole or absent.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import contextmanager, suppress
from json import loads
from shutil import rmtree

from dsl.machine.output_files import replace_file, sync

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    from dsl.errors import DslError

MOST_BYTES = 1 << 24
"""Most bytes of a file that we read."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OWN_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
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
    """An existing folder. Names in it may lead one level down: ``exp.json``, ``z0/exp.json``."""

    def __init__(self, path: str, error: type[DslError]) -> None:
        """Open it. Raises OSError. ``error`` is what methods raise for an OSError."""
        self.path = path
        self._error = error
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
        """The names in it."""
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

        Anything may lie there: we do not wait for the writer of a pipe.
        """
        with self._below(name) as (fd, last):
            opened = os.open(last, os.O_RDONLY | _OWN_FILE, dir_fd=fd)
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
        """Write a file that is whole or absent, even if the machine fails."""
        data = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
        with self._telling(name), self._below(name) as (fd, last):
            scratch = f"{last}.new"
            with suppress(FileNotFoundError):
                os.unlink(scratch, dir_fd=fd)
            replace_file(scratch, last, data, folder=fd, is_durable=True)
            sync(fd)

    def make(self, name: str) -> None:
        """Make a folder in it."""
        with self._telling(name):
            os.mkdir(name, dir_fd=self._fd)

    def rename(self, old: str, new: str) -> None:
        """Give something another name beside it, even if the machine fails."""
        with self._telling(new), self._below(old) as (fd, last):
            os.rename(last, new.rpartition("/")[2], src_dir_fd=fd, dst_dir_fd=fd)
            sync(fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._telling(name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def clear(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        path = f"{self.path}/{name}"
        if os.path.islink(path) or not os.path.isdir(path):
            self.remove(name)
            return
        with self._telling(name):
            rmtree(path)

    def strangers(self) -> tuple[int | None, bool]:
        """The owner of the folder if that is another user, and whether every user may write in it.

        A folder that a group may write to is nothing special: with a umask of 002, every folder is like that.
        Files that others put there do not count.
        """
        found = os.fstat(self._fd)
        if found.st_uid == self._owner and not found.st_mode & stat.S_IWOTH:
            return None, False
        with self._telling(""):
            made = self._probe()
        self._owner = made.st_uid
        owner = None if found.st_uid == made.st_uid else found.st_uid
        return owner, bool(found.st_mode & ~made.st_mode & stat.S_IWOTH)

    def lock(self, name: str) -> bool:
        """Hold a file in it until `close`; it is made if it is missing. False: somebody else holds it."""
        with self._telling(name):
            self._lock_fd = os.open(name, os.O_RDWR | os.O_CREAT | _OWN_FILE, 0o644, dir_fd=self._fd)
            self._check_owner(self._lock_fd)
        if not stat.S_ISREG(os.fstat(self._lock_fd).st_mode):
            raise self._error(f"cannot write {self.path}: it holds a {name} that is no file")
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def write_locked(self, name: str, data: bytes) -> None:
        """Write the file that we hold anew. A full disk keeps what is in it."""
        with self._telling(name):
            os.pwrite(self._lock_fd, data, 0)  # first, as even a full disk has room for the old length
            os.ftruncate(self._lock_fd, len(data))
            sync(self._lock_fd)

    def _probe(self) -> os.stat_result:
        """The owner and mode of a file that we make there: some file systems have one for all files."""
        name = f".dsl-{os.urandom(8).hex()}"
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
        """Turn an OSError in the block into an error of one line."""
        try:
            yield
        except OSError as error:
            raise self._error(cannot_write(f"{self.path}/{name}".rstrip("/"), error)) from None


def cannot_write(path: str, error: OSError) -> str:
    """A line about a file or folder that cannot be written."""
    return f"cannot write {path}: {error.strerror or error}"


def _strange(owner: int) -> str:
    return f"something of another user (uid {owner})"
