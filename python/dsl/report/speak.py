"""Lines on stderr for the user. The only speaker: nobody else of ours writes there."""

from __future__ import annotations

import os
import sys

STALL_MS = 500
PIPE_BUF = 4096
"""Bytes that are written as one: what this many fit into, poll finds writable."""


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


def _may_write() -> bool:
    """Whether stderr takes something before long."""
    try:
        import select
    except ImportError:  # Python's own files are gone: better a word that may have to wait than none
        return True
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    return bool(poller.poll(STALL_MS))


def write(text: str) -> None:
    """Text on stderr, as it is, unless nobody takes it.

    A terminal with ``stty tostop`` stops whoever writes to it from the background, but no thread that blocks
    SIGTTOU (tcsetattr(3) and termios(3)).
    """
    # What `signal` is made of, without its enums, which take long to import. It has no stub.
    import _signal as signal  # type: ignore[import-not-found]

    rest = text.encode(errors="backslashreplace")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        while rest and _may_write():
            rest = rest[os.write(2, rest[:PIPE_BUF]) :]
    except OSError:
        return  # nobody reads it
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
