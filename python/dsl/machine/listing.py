"""The hosts of a job as a program prints them: once, and again and again while the job runs (`main`)."""

from __future__ import annotations

import sys
import time

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


def ask_for_hosts(words: Sequence[str]) -> str:
    """What the program prints.

    Raises:
        HostfileError: it cannot be run, fails, takes too long, or prints more than `MOST_BYTES`.
    """
    from subprocess import DEVNULL, TimeoutExpired, run

    try:
        done = run(words, stdin=DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False)
    except TimeoutExpired:
        why = f"has not ended within {DEADLINE_S:g} s"
    except OSError as error:
        why = f"cannot be run: {(error.strerror or '').lower()}"
    else:
        if not done.returncode and len(done.stdout) <= MOST_BYTES:
            return done.stdout.decode(errors="replace")
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = f"has ended with {done.returncode}{': ' if last else ''}{printable(last)[:500]}"
        why = why if done.returncode else f"prints over {MOST_BYTES} bytes"
    raise HostfileError(f"--discover: {quote(words[0])} {why}")


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
