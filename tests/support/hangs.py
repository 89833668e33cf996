"""What `dsl-stacks` has to say of the jobs of `tests/workers/hangs.py`."""

from __future__ import annotations

import re
from pathlib import Path

WORKER = Path(__file__).resolve().parent.parent / "workers" / "hangs.py"
ODD, RANKS = 2, 4
ANSWER_S = 5.0

# What is told of the odd rank before its line, and of the others.
KINDS = {
    "skip": "waits in barrier",
    "order": "waits in broadcast",
    "loader": r"waits for its data loader \(hangs.py:\d+[^)]*\); its child pt_data_worker \(pid \d+\) is in read\(\) of pipe",
    "lock": "waits for a lock",
    "deadlock": "waits for a lock",
    "python_loop": r"computes in python_loop\(\)",
    "c_loop": r"computes in c_loop\(\)",
    "stopped": r"is stopped by a signal",
    "frozen": r"is in open\(\) of \S+/checkpoint, stuck in state D",
    "stdin": "waits for input on stdin",
    "store": r"waits in init_process_group, store [\d.]+:1 ",
    "ended": "has ended",
    "thrash": "is short of memory",
    "handler": r"is in its handler of SIGUSR1, in read\(\) of pipe",
}


def line_of(mark: str) -> int:
    """Number of the line of the worker program that ends with this comment."""
    (number,) = [
        at for at, line in enumerate(WORKER.read_text().splitlines(), 1) if line.endswith(f"  # {mark}")
    ]
    return number


def check(text: str, took_s: float, kind: str, host: str = "") -> None:
    """The first line names the odd rank, what it does, its line and, where there are several, its host."""
    first = text.splitlines()[0]
    print(f"{kind}: {took_s:.2f} s: {first}")
    assert took_s < ANSWER_S
    assert re.search(rf"\brank {ODD} {KINDS[kind]}", first), text
    if kind != "ended":
        # A loop is at its head or in its body.
        lines = f"{line_of(kind)}|{line_of(kind) + (kind == 'python_loop')}"
        assert re.search(rf"hangs\.py:({lines})\b", first), text
        assert not host or f", host {host})" in first, text
    if kind == "deadlock":
        assert f'its thread "second" waits for a lock (hangs.py:{line_of("the second thread")})' in first, (
            text
        )
    if kind == "loader":
        assert f"hangs.py:{line_of('in the worker of the data loader')}" in first, text
    if kind in ("store", "ended"):
        line = line_of("others of store and ended")
        assert re.match(
            rf"3 of {RANKS} ranks wait in init_process_group, store \S+:\d+ \(hangs.py:{line}\)", first
        ), text
    else:
        assert f"3 of {RANKS} ranks wait in all_reduce (hangs.py:{line_of('others')})" in first, text
