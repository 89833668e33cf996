"""The hosts of a job as a program prints them: once, and again and again while the job runs (`main`)."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from dsl.errors import HostfileError
from dsl.words import printable, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY_S = 5.0
"""Pause between the end of one run of the program and the next one."""

DEADLINE_S = 30.0
"""Most time of one run."""

MOST_BYTES = 1 << 20

LOOK_S = 0.1
"""Pause between two looks at how much it has printed."""


def ask_for_hosts(words: Sequence[str]) -> str:
    """What the program prints.

    Raises:
        HostfileError: it cannot be run, fails, takes too long, or prints more than `MOST_BYTES`.
    """
    import os
    from subprocess import DEVNULL, Popen, TimeoutExpired
    from tempfile import TemporaryFile

    what = f"--discover: {quote(words[0])}"
    # Files, because what the program has started may outlive it and hold a pipe.
    with TemporaryFile() as stdout, TemporaryFile() as stderr:

        def size() -> int:
            return max(os.fstat(one.fileno()).st_size for one in (stdout, stderr))

        try:
            child = Popen(words, stdin=DEVNULL, stdout=stdout, stderr=stderr)
        except OSError as error:
            raise HostfileError(f"{what} cannot be run: {(error.strerror or '').lower()}") from None
        until_s, code = time.monotonic() + DEADLINE_S, None
        try:
            while code is None and size() <= MOST_BYTES and time.monotonic() < until_s:
                with suppress(TimeoutExpired):
                    code = child.wait(min(LOOK_S, DEADLINE_S))
        finally:
            if code is None:
                child.kill()
                child.wait()
        if size() > MOST_BYTES:
            raise HostfileError(f"{what} prints over {MOST_BYTES} bytes")
        if code is None:
            raise HostfileError(f"{what} has not ended within {DEADLINE_S:g} s")
        # A process that the program has left shares the position in the file, so it stays.
        texts = [os.pread(one.fileno(), MOST_BYTES, 0) for one in (stdout, stderr)]
        said, complaint = (text.decode(errors="replace") for text in texts)
        if code:
            last = complaint.strip().rpartition("\n")[2]
            why = f"has ended with {code}{': ' if last else ''}{printable(last)[:500]}"
            raise HostfileError(f"{what} {why}")
        return said


def main() -> None:
    """Run the program of our arguments again and again. Write each new answer as JSON."""
    import json

    last: object = None
    while True:
        time.sleep(EVERY_S)
        try:
            said = {"hosts": ask_for_hosts(sys.argv[1:])}
        except HostfileError as error:
            said = {"problem": str(error)}
        if said != last:
            last = said
            print(json.dumps(said), flush=True)  # noqa: T201  the agent reads it
