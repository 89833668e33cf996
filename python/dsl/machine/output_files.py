"""The files that users name for output: how all of them are opened and written.

Files that grow are appended to (`open_output`); others are written as a whole (`write_output`). A device and
a pipe are written into, and nothing waits for them; a folder, a block device and a socket are refused. A link
is followed, and stays. Where all users may make files, a link and a file of another user are refused: they
may lead anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

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
        with contextlib.suppress(OSError):
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
