"""Writes lines for the user to stderr, where no other module of dsl writes, and answers to stdout."""

from __future__ import annotations

import os
import sys

from dsl.words import shortage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from dsl.errors import OutputError

    T = TypeVar("T")

STALL_S = 0.5
PIPE_BUF = 4096
"""Bytes per write: a pipe that poll calls writable has room for this many."""

end_path = ""
"""File in which the tuner that started this job looks for its judgement; empty: nobody does."""

keep: Callable[[bytes], None] | None = None
"""Gets what finds no room on the disk of stderr; None: it is lost."""

_stalled: set[int] = set()
"""Contains stderr's number, 2, from the time when stderr takes no output until it takes some again."""


def flush_output() -> None:
    """Flush our output, so that it comes before the workers' output and is written only once."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue  # the stream is closed, or has no reader


def say(command: str, text: str) -> None:
    """Write one line to stderr, or drop it if stderr is stuck: a stopped pager must not hold up the job."""
    write(f"{command}: {' '.join(text.splitlines())}\n")


NO_ROOM = (27, 28, 122)
"""Errors of a write to a file that may not grow: EFBIG, ENOSPC, EDQUOT."""

_warned: set[tuple[str, str]] = set()
"""Warnings of `complain` so far. A view that asks every second causes no further line."""


def complain(command: str, error: Exception, what: str = "dsl leaves out a part of its work") -> str:
    """Write one line about an error that we have not expected; users never see one of our tracebacks.

    ``what``: what is left out, if something is short. Returns the reason as a clause.
    """
    why = shortage(error)
    if not why:
        why = f"internal error: {type(error).__name__}: {error}"
        say(command, f"{why}, please report it")
    elif (what, why) not in _warned:
        _warned.add((what, why))
        say(command, f"warning: {what}: {why}")
    return why


def optional(
    command: str, what: str, work: Callable[[], T], otherwise: Callable[[str], object] | None = None
) -> T | None:
    """Do what a job can do without, and return its result; None if it fails, and the job goes on.

    A thread, a descriptor, memory, room on a disk, a file of a package that is gone: whatever the work cannot
    get costs this work alone. ``what``: what is left out then, for a line to the user. ``otherwise`` gets the
    reason, and must not raise.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001  whatever it is, a healthy job does not end by it
        why = complain(command, error, what)
    if otherwise is not None:
        otherwise(why)
    return None


def _may_write(fd: int) -> bool:
    """Whether stderr takes output within `STALL_S`, or right now if it was stuck before."""
    try:
        from dsl.machine import POLLOUT, wait_for

        may_write = bool(wait_for(fd, left_s=0.0 if 2 in _stalled else STALL_S, events=POLLOUT))
    except ImportError:  # Python's own files are gone: a message that may block is better than none
        return True
    (_stalled.discard if may_write else _stalled.add)(2)
    return may_write


def write(text: str) -> None:
    """Write text to stderr as it is. Drop it if stderr takes nothing for half a second.

    While stderr stays stuck, later calls do not wait. A terminal with ``stty tostop`` stops a background
    process that writes to it, unless the writing thread blocks SIGTTOU (tcsetattr(3) and termios(3)).
    """
    # `_signal` is `signal` without its enums, which take long to import. It has no type stub.
    import _signal as signal  # type: ignore[import-not-found]

    rest = text.encode(errors="backslashreplace")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    own: int | None = None
    try:
        own = _open()
        fd = 2 if own is None else own
        while rest and _may_write(fd):
            rest = rest[os.write(fd, rest[:PIPE_BUF]) :]
    except OSError as error:  # stderr has no reader, or another process filled it first
        if keep is not None and error.errno in NO_ROOM:
            keep(rest)
    finally:
        if own is not None:
            os.close(own)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _open() -> int | None:
    """A new descriptor of stderr whose writes never block; None if only descriptor 2 can be used.

    Descriptor 2 shares its blocking mode with the process that started us, so we must not change that mode.
    Instead we open the pipe or terminal anew. Raises OSError if there is no stderr.
    """
    from stat import S_ISCHR, S_ISFIFO

    mode = os.fstat(2).st_mode
    if not S_ISFIFO(mode) and not S_ISCHR(mode):
        return None
    try:
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None  # it belongs to another user, or /proc is not there


def show_text(text: str) -> None:
    """Print text to stdout. Raises OutputError: it cannot be written."""
    if sys.stdout is None:
        raise unwritten(OSError(0, "it is closed"))
    try:
        print(text, flush=True)  # noqa: T201  the answer that the user has asked for
    except OSError as error:
        # The rest of the buffer must not fail again when the interpreter ends.
        from dsl.machine import use_null

        use_null(1)
        raise unwritten(error) from None


def unwritten(error: OSError) -> OutputError:
    """What to raise if stdout cannot be written."""
    from dsl.errors import OutputError, ReaderGoneError

    kind = ReaderGoneError if isinstance(error, BrokenPipeError) else OutputError
    return kind(f"stdout cannot be written: {(error.strerror or '').lower()}")
