"""``python -m dsl.fanout FILE``: reaches many hosts by ssh, so many at a time.

Each ssh starts an agent that stays behind and connects to the head by itself. What becomes of a host that
cannot be reached goes to stdout, a line each: ``dsl-unreachable PLACE STATUS LAST-WORDS``.

``python -m dsl.fanout --orders FILE`` keeps a program for each host of an elastic job: `dsl.cli.starters`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

KEY_VARIABLE = "DSL_CONTROL_KEY"
WORD = "dsl-unreachable"
START_S = 120.0
LONGEST_LINE = 300


def main(argv: Sequence[str] | None = None) -> int:
    """Start all agents, then wait to be stopped: the head hears of each that could not be started."""
    from concurrent.futures import ThreadPoolExecutor
    from json import load

    words = sys.argv[1:] if argv is None else argv
    if words[0] == "--orders":
        from dsl.cli.starters import keep

        return keep(words[1])
    (path,) = words
    with open(path, encoding="utf-8") as file:
        asked = load(file)
    commands: list[list[str]] = asked["commands"]
    key = os.environ.pop(KEY_VARIABLE, "")
    with ThreadPoolExecutor(max_workers=asked["at_once"]) as pool:
        for line in pool.map(_reach, range(len(commands)), commands, [key] * len(commands)):
            if line:
                print(line, flush=True)
    import signal

    while True:  # as long as this program runs, so does the job
        signal.pause()


def _reach(place: int, command: Sequence[str], key: str) -> str:
    """Start one agent; a line about why it could not be started, or nothing."""
    import subprocess

    try:
        ended = subprocess.run(
            command,
            input=f"{key}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{WORD} {place} 255 it does not answer"
    except OSError as error:
        return f"{WORD} {place} 127 {error.strerror}"
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    status = ended.returncode if ended.returncode > 0 else 128 - ended.returncode
    return f"{WORD} {place} {status} {lines[-1][:LONGEST_LINE] if lines else ''}"
