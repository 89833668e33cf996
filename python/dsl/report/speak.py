"""Lines on stderr for the user. The only speaker: nobody else of ours writes there."""

from __future__ import annotations

import os
import sys

STALL_MS = 500


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


def write(text: str) -> None:
    """Text on stderr, as it is, unless nobody takes it.

    A terminal with ``stty tostop`` stops whoever writes to it from the background, but no thread that blocks
    SIGTTOU (tcsetattr(3) and termios(3)).
    """
    # What `signal` is made of, without its enums, which take long to import. It has no stub.
    import _signal as signal  # type: ignore[import-not-found]
    import select

    rest = text.encode(errors="backslashreplace")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        poller = select.poll()
        poller.register(2, select.POLLOUT)
        while rest and poller.poll(STALL_MS):
            rest = rest[os.write(2, rest[: select.PIPE_BUF]) :]
    except OSError:
        return  # nobody reads it
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
