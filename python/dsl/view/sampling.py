"""Samples in which stacks workers spend some seconds: a taker, as `dsl.view.stacks` is.

One py-spy for each worker reads its memory some times a second, and counts; nothing is stopped. The kernel
counts how long the main thread slept, and how long it wanted a CPU.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import time
from collections import Counter
from collections.abc import Sequence

from dsl.machine.kernel import list_names, read_fact
from dsl.model.observation import Frame, Look, RankStacks, RankStatus, Sampled, StackSample
from dsl.view import kernel_view
from dsl.view.explain import is_users
from dsl.view.stacks import (
    LONGEST_NAME,
    LONGEST_PATH,
    MOST_BYTES,
    MOST_FRAMES,
    NO_PYTHON,
    Take,
    py_spy,
    python_of,
    read_source,
    serve,
)

RATE = 10
"""Samples a second: each costs a millisecond or two of a CPU. py-spy varies the time between them, so that
they do not keep time with the steps of a training."""
START_S, WRITE_S = 0.5, 2.5
"""How long py-spy may take to start, and to write what it has found. On a busy machine it takes its samples
late; it does not wait for all of them."""
MOST_SAMPLED = 128
"""Workers of a host that are sampled at the same time."""
MOST_STACKS = 100
"""Stacks of a worker in an answer. Rarer ones are one sample without frames."""
WAITING_CALLS = ("wait", "item", "cpu", "tolist", "numpy", "synchronize")
"""Functions of torch that wait, and have no Python frame."""

GPUS = ("/dev/nvidia", "/dev/kfd")
"""How the names of devices begin that a process with a GPU has open."""

_MAIN = re.compile(r"thread \((0[xX])?([0-9A-Fa-f]+)\)(: MainThread)?;(.*) (\d+)$")
_PROCESS = re.compile(r'process (\d+):"')
_FRAME = re.compile(r"(.*?) \((.*?)(?::(\d+))?\)$")


def main() -> None:
    """Serve one look."""
    serve(_begin, MOST_SAMPLED)


def _begin(look: Look) -> Take:
    processes = kernel_view.read_processes().values()

    def take(rank: RankStatus) -> RankStacks:
        pid = python_of(rank.pid, kernel_view.descendants(rank.pid, processes))
        sampled, problem = sample(pid, look.for_s) if pid else (None, NO_PYTHON)
        return RankStacks(rank.rank, rank.local_rank, rank.pid, problem=problem, sampled=sampled)

    return take


def sample(pid: int, for_s: int) -> tuple[Sampled | None, str]:
    """How a Python process spends the next seconds; or None, and a clause that says why it is unknown."""
    file = os.memfd_create("dsl-samples")
    try:
        words = [
            *("record", "--nonblocking", "--idle", "--threads", "--subprocesses", "--full-filenames"),
            *("--format", "raw", "--rate", str(RATE), "--duration", str(for_s)),
            *("--output", f"/proc/self/fd/{file}", "--pid", str(pid)),
        ]
        begin_s, begin = time.monotonic(), _times(pid)
        _, problem = py_spy(words, for_s + START_S, file, WRITE_S)
        span_s, end = time.monotonic() - begin_s, _times(pid)
        samples = parse(os.pread(file, MOST_BYTES, 0).decode("utf-8", "replace"), pid)
    finally:
        os.close(file)
    if not samples:
        return None, problem or "it has ended, or has no main thread"
    ran, delayed = [
        min(max(after - before, 0) / span_s, 1.0) for before, after in zip(begin, end, strict=True)
    ]
    sleeps = max(1.0 - ran - delayed, 0.0) if any(end) else 0.0
    return Sampled(tuple(samples), round(sleeps, 3), round(delayed, 3), _has_gpu(pid)), ""


def _times(pid: int) -> tuple[float, float]:
    """Seconds in which the main thread has run, and has waited for a CPU; zeros: unknown."""
    fields = read_fact(f"/proc/{pid}/task/{pid}/schedstat").split()
    return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if len(fields) == 3 else (0.0, 0.0)


def _has_gpu(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    return any(_target(f"{folder}/{name}").startswith(GPUS) for name in list_names(folder))


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def parse(text: str, pid: int) -> list[StackSample]:
    """The stacks of main threads in py-spy's collapsed format. Those of other processes are of children."""
    counts: Counter[tuple[tuple[Frame, ...], bool]] = Counter()
    for line in text.split("\n"):
        found = _MAIN.search(line)
        if found is None:
            continue
        processes = _PROCESS.findall(line[: found.start()])
        # The id of a main thread is the pid. Before Python 3.11 py-spy does not know it.
        thread = 0 if found[1] else int(found[2])
        of = int(processes[-1]) if processes else thread
        if found[3] or of == thread:  # threads have no names where nothing has imported `threading`
            counts[_frames(found[4]), of != pid] += int(found[5])
    common = counts.most_common(MOST_STACKS)
    samples = [StackSample(frames, count, _call(frames), is_child) for (frames, is_child), count in common]
    for is_child in (False, True):
        rest = sum(count for (_, of_child), count in counts.items() if of_child == is_child)
        rest -= sum(one.count for one in samples if one.is_child == is_child)
        samples += [StackSample((), rest, is_child=is_child)] if rest else []
    return samples


def _frames(stack: str) -> tuple[Frame, ...]:
    found = [one for part in stack.split(";") if (one := _FRAME.match(part))]
    frames = [Frame(one[1][:LONGEST_NAME], one[2][-LONGEST_PATH:], int(one[3] or 0)) for one in found]
    return tuple(frames[::-1][:MOST_FRAMES])


def _call(frames: Sequence[Frame]) -> str:
    return _waiting_call(frames[0].file, frames[0].line) if frames and is_users(frames[0]) else ""


@functools.cache
def _waiting_call(path: str, line: int) -> str:
    return waiting_call(read_source(path), line)


def waiting_call(source: str, line: int) -> str:
    """The one of `WAITING_CALLS` that is called as a method in this line; empty: none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    calls = [
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return next((name for name in WAITING_CALLS if name in calls), "")
