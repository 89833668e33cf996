"""``python -m dsl.fanout FILE``: reaches many hosts by ssh, a limited number of them at a time.

Each ssh starts an agent that stays there and connects to the head by itself. For each host that cannot be
reached, a line goes to stdout: ``dsl-unreachable PLACE STATUS LAST-WORDS``.

``python -m dsl.fanout --orders FILE`` runs a program for each host of an elastic job: `dsl.cli.starters`.
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
    """Start all agents, report to the head those that could not be started, then wait to be stopped."""
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

    while True:  # the end of this program would end the job
        signal.pause()


def _reach(place: int, command: Sequence[str], key: str) -> str:
    """Start one agent; return a line with the reason if it could not be started, else an empty text."""
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
