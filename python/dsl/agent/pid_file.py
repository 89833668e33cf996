"""The file of ``--save_pid``."""

from __future__ import annotations

import os
from contextlib import contextmanager

from dsl.errors import PidFileError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DIGITS = 20


@contextmanager
def pid_file(path: str) -> Iterator[None]:
    """Hold the agent's pid in a file while the job runs. Raises PidFileError."""
    try:
        _write(path)
    except OSError as error:
        raise PidFileError(f"cannot write the pid file {path}: {error.strerror}") from error
    try:
        yield
    finally:
        remove(path, os.getpid())


def _write(path: str) -> None:
    try:
        file = _create(path)
    except FileExistsError as error:
        # In a container every job may have the same pid, so a file may be left from a job that died with its
        # machine.
        if not _is_leftover(path):
            reason = f"{error.strerror}, remove it if it is a leftover"
            raise PidFileError(f"cannot write the pid file {path}: {reason}") from None
        os.unlink(path)
        file = _create(path)
    try:
        os.write(file, str(os.getpid()).encode())
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)


def remove(path: str, pid: int) -> None:
    """Remove the file if it holds ``pid``: our own pid, or that of an agent that was killed."""
    if read_pid(path) != pid:
        return
    try:
        os.unlink(path)
    except OSError:
        return  # already removed


def read_pid(path: str) -> int | None:
    """The pid in a file that this user owns; None without one."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        is_ours = os.fstat(file).st_uid == os.geteuid()
        text = os.read(file, MAX_DIGITS) if is_ours else b""
    except OSError:
        return None
    finally:
        os.close(file)
    return int(text) if text.isdigit() else None


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _is_leftover(path: str) -> bool:
    """Whether the file is this user's and names a process that is gone, or this process."""
    pid = read_pid(path)
    if pid is None:
        return False
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # the process is another user's, or the number is no pid
        return False
    return False
