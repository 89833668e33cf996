"""Lines on stderr for the user. The only speaker: nobody else of ours writes there."""

from __future__ import annotations

import os
import sys

STALL_MS = 500
PIPE_BUF = 4096
"""Bytes that are written as one: what this many fit into, poll finds writable."""

_stalled: set[int] = set()
"""Holds stderr's number once that was found stopped, until it takes something again."""


def flush_output() -> None:
    """What this program has written so far comes before what the workers write, and is written once."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue  # nobody reads it


def say(command: str, text: str) -> None:
    """One line on stderr, unless nobody takes it: a stopped terminal or pager must not hold the job."""
    write(f"{command}: {' '.join(text.splitlines())}\n")


def complain(command: str, error: Exception) -> None:
    """One line about an error of our own; users never see a traceback of ours."""
    say(command, f"internal error: {type(error).__name__}: {error}, please report it")


def _may_write(fd: int) -> bool:
    """Whether it takes something before long."""
    try:
        import select
    except ImportError:  # Python's own files are gone: better a word that may have to wait than none
        return True
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    may_write = bool(poller.poll(0 if 2 in _stalled else STALL_MS))
    (_stalled.discard if may_write else _stalled.add)(2)
    return may_write


def write(text: str) -> None:
    """Text on stderr, as it is, unless nobody takes it: that is waited for once, half a second.

    A terminal with ``stty tostop`` stops whoever writes to it from the background, but no thread that blocks
    SIGTTOU (tcsetattr(3) and termios(3)).
    """
    # What `signal` is made of, without its enums, which take long to import. It has no stub.
    import _signal as signal  # type: ignore[import-not-found]

    rest = text.encode(errors="backslashreplace")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    own: int | None = None
    try:
        own = _open()
        fd = 2 if own is None else own
        while rest and _may_write(fd):
            rest = rest[os.write(fd, rest[:PIPE_BUF]) :]
    except OSError:
        return  # nobody reads it, or somebody else was faster to fill it
    finally:
        if own is not None:
            os.close(own)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _open() -> int | None:
    """A descriptor of stderr that never waits; None where there is none but the first.

    That one is shared with whoever started us, and so is the choice that it waits: a pipe or a terminal is
    opened anew. Raises OSError if there is no stderr.
    """
    from stat import S_ISCHR, S_ISFIFO

    mode = os.fstat(2).st_mode
    if not S_ISFIFO(mode) and not S_ISCHR(mode):
        return None
    try:
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None  # it belongs to another user, or /proc is not there
