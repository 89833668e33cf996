"""Files that are whole or not there, and folders that one command at a time uses."""

from __future__ import annotations

import fcntl
import os
import stat
from json import dumps, loads
from shutil import rmtree

from dsl.errors import AutotuningError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARKER = ".dsl-autotuning"
"""A file by which dsl knows a folder that it has made."""

MOST_CHARACTERS = 1 << 24
"""Of a file, as many are read: no config or file of metrics has so many, and a slip does no harm."""


def write(path: str, text: str) -> None:
    """Write a file that is whole or not there. Raises OSError."""
    scratch = f"{path}.new"
    try:
        with open(scratch, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.replace(scratch, path)
    except BaseException:
        remove(scratch)
        raise


def check(name: str, path: str) -> None:
    """Refuse a folder of others."""
    try:
        if os.path.lexists(path) and not os.path.exists(f"{path}/{MARKER}") and os.listdir(path):
            raise AutotuningError(
                f"{path} holds files that no tuning has written, name another folder as autotuning.{name}"
            )
    except OSError as error:
        raise refusal(error, path) from None


def claim(name: str, path: str) -> int:
    """Make or take a folder, and lock its marker, whose descriptor this is."""
    try:
        os.makedirs(path, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(f"{path}/{MARKER}", flags, 0o644)
    except OSError as error:
        raise refusal(error, path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise AutotuningError(f"cannot write {path}: it holds a {MARKER} that is no file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise AutotuningError(
            f"another command is tuning in {path}, wait for it or name another folder as autotuning.{name}"
        ) from None
    return fd


def clear(path: str) -> None:
    """Remove what an earlier command has left at a place of ours. Raises OSError."""
    if os.path.islink(path) or not os.path.isdir(path):
        remove(path)
    else:
        rmtree(path)


def refusal(error: OSError, path: object) -> AutotuningError:
    """An error of the system as one line."""
    return AutotuningError(f"cannot write {path}: {error.strerror or error}")


def read(path: str) -> str | None:
    """The text of a file, up to `MOST_CHARACTERS`; None: it cannot be read, or is no file.

    A script may leave anything there: nobody waits for the writer of a pipe, and no device is read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, encoding="utf-8", errors="replace") as file:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            return file.read(MOST_CHARACTERS) if is_file else None
    except OSError:
        return None


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    try:
        os.unlink(path)
    except OSError:
        return


def read_object(path: str) -> dict[str, Any]:
    """What a file of JSON holds; empty if it is no object, or not there."""
    try:
        found = loads(read(path) or "null")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def as_json(value: object) -> str:
    """A value as the text of a file."""
    return dumps(value, indent=2) + "\n"
