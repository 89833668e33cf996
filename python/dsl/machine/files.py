"""How files are opened and written: those that users name for output, and those in a folder of ours.

Files that grow are appended to (`open_output`); others are written as a whole (`write_output`). A device and
a pipe are written into, and nothing waits for them; a folder, a block device and a socket are refused. A link
is followed, and stays. Where all users may make files, a link and a file of another user are refused: they
may lead anywhere.

In a `Folder` only what this user has made counts: its files decide what a command does later. They are
reached by descriptors, and no link is followed. A file that is written is whole or absent.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    from dsl.errors import DslError

_REFUSED = {
    stat.S_IFDIR: "it is a directory",
    stat.S_IFBLK: "it is a block device",
    stat.S_IFSOCK: "it is a socket",
}
_FIXED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""A file cannot be replaced, but perhaps written: it is mounted, or we may not change its folder or owner."""


def why_not(path: str, *, read_again: bool = False) -> str:
    """Why a file cannot be written; empty: it can, as far as can be seen without making it.

    ``read_again``: others read the file as a whole, again and again, so it cannot be a pipe.
    """
    try:
        about = _look(path, read_again=read_again)
        folder = os.path.dirname(os.path.realpath(path))
        if about is None and not os.path.isdir(folder):
            return os.strerror(errno.ENOENT if not os.path.lexists(folder) else errno.ENOTDIR)
        may = os.access(folder, os.W_OK | os.X_OK) if about is None else os.access(path, os.W_OK)
    except (OSError, ValueError) as error:
        return reason(error)
    return "" if may else os.strerror(errno.EACCES)


def open_output(path: str, flags: int = os.O_APPEND) -> int:
    """Open a file for writing, and never wait. A new one is for this user alone.

    Raises OSError, ValueError.
    """
    _look(path)
    is_shared = _is_shared(path)
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(path, flags | (os.O_NOFOLLOW if is_shared else 0), 0o600)
    try:
        _check(os.fstat(fd), is_shared=is_shared)  # another may have come in its place
    except OSError:
        os.close(fd)
        raise
    return fd


def put(fd: int, data: bytes) -> None:
    """Write all of ``data`` without waiting. Raises OSError."""
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, "no room for all of it")


def write_output(path: str, data: bytes, mode: int | None = None, *, read_again: bool = False) -> None:
    """Write a whole file. Raises OSError, ValueError.

    A reader sees the old text or the new one: a new file takes the place of the old one, with the same owner
    and mode. Where that is not allowed, as with a file that is mounted, the old one is overwritten.
    ``mode``: of a file that is new; None: what the umask leaves. ``read_again`` as for `why_not`.
    """
    about = _look(path, read_again=read_again)
    name = os.path.realpath(path)  # of a file that is only open, as in /proc/self/fd, it names nothing
    if about is None or (stat.S_ISREG(about.st_mode) and os.path.lexists(name)):
        scratch = f"{os.path.dirname(name)}/.dsl-{os.urandom(8).hex()}"
        try:
            replace_file(scratch, name, data, mode, like=about)
        except OSError as error:
            if about is None or error.errno not in _FIXED:
                raise
        else:
            return
    fd = open_output(path, os.O_TRUNC)
    try:
        put(fd, data)
    finally:
        os.close(fd)


def replace_file(
    scratch: str,
    name: str,
    data: bytes,
    mode: int | None = None,
    *,
    like: os.stat_result | None = None,
    folder: int | None = None,
    is_durable: bool = False,
) -> None:
    """Write a file under the name ``scratch``, and rename it. Raises OSError, and leaves the old file then.

    ``like``: the file whose owner and mode it gets; None: it is ours, with the ``mode`` of `write_output`.
    ``folder``: descriptor of the folder that the names are in. ``is_durable``: the file is whole or absent
    even if the machine fails.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(scratch, flags, 0o666, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            if like is not None:
                mode = stat.S_IMODE(like.st_mode)
                if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(fd, like.st_uid, like.st_gid)
            if mode is not None:
                os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            if is_durable:
                sync(fd)
        os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch, dir_fd=folder)
        raise


def sync(fd: int) -> None:
    """Make a file, or the names in a folder, survive a failure of the machine. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do that with a folder
            raise


def reason(error: OSError | ValueError) -> str:
    """Why a file cannot be written, in the words of the kernel if it has said it."""
    return getattr(error, "strerror", None) or str(error)


def _look(path: str, *, read_again: bool = False) -> os.stat_result | None:
    """What there is; None: nothing so far. Raises OSError, ValueError: it cannot be written."""
    is_shared = _is_shared(path)
    try:
        about = os.stat(path)
    except FileNotFoundError:
        about = None  # a link that leads nowhere makes the file that it names
    if is_shared and os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a link in a directory of all users")
    if about is not None:
        _check(about, is_shared=is_shared, read_again=read_again)
    return about


def _check(about: os.stat_result, *, is_shared: bool, read_again: bool = False) -> None:
    if is_shared and about.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    kind = stat.S_IFMT(about.st_mode)
    why = _REFUSED.get(kind, "")
    if kind == stat.S_IFIFO and read_again:
        why = "it is a pipe, which can be read only once"
    if why:
        raise OSError(errno.EINVAL, why)


def _is_shared(path: str) -> bool:
    """Whether all users may make files beside it. Raises OSError."""
    return bool(os.stat(os.path.dirname(path) or ".").st_mode & stat.S_ISVTX)


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
        from json import loads

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
        import shutil

        with self._telling(name):
            shutil.rmtree(path)

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
