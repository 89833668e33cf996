"""Elastic jobs, `dslrun` against torchrun: restarts of a training, failure to next attempt on two nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benches.measure import Row, in_turns, medians, spread
from benches.programs import Programs
from benches.torchrun_rows import Command, both
from tests.kit import processes
from tests.kit.elastic import EXAMPLE, steps
from tests.kit.waiting import until

from dsl.machine import pick_free_port

# The second attempt is known by what the first one leaves: nodes of torchrun count restarts differently.
FAILS_ONCE = """
if [ -e "$DIR/fail" ]; then exec "$CHILD" stamp "$DIR/start.$RANK"; fi
if [ "$RANK" = 0 ]; then exec "$CHILD" note "$DIR/ready" %p wait "$DIR/go" stamp "$DIR/fail" exit 1; fi
exec "$CHILD" note "$DIR/ready" %p pause
"""
STEPS = 12
LIMIT_S = 60.0
"""Who says nothing for so long hangs. A restart takes some seconds, nearly all of them to import torch."""
MARK = "DSL_BENCH_ELASTIC"
"""In the environment of all processes of one run: torchrun leaves some behind when it is killed."""


def restarts(programs: Programs, scripts: Path, nodes: int, ours_runs: int, theirs_runs: int) -> Row:
    """How often one restart brings a DDP training to its end that has lost a worker."""
    ours, theirs = both(programs, scripts)

    def come_up(command: Command, runs: int) -> int:
        return sum(_comes_up(command, nodes) for _ in range(runs))

    up, reference = come_up(ours, ours_runs), come_up(theirs, theirs_runs)
    detail = f"{up} of {ours_runs}, torchrun {reference} of {theirs_runs} (all defaults, c10d)"
    name = f"restart of a DDP training, {nodes} node{'s' * (nodes > 1)}"
    return Row(name, 100 * up / ours_runs, "%", 100.0, False, detail)


def next_attempt(programs: Programs, scripts: Path, workers: int, repeats: int) -> Row:
    """From the end of the worker that fails to the start of the last worker of the next attempt."""
    takers = {
        one.name: lambda one=one: _next_attempt_s(programs, one, workers) for one in both(programs, scripts)
    }
    values = in_turns(takers, repeats, slow={"torchrun": max(3, repeats // 3)})
    middle = medians(values)
    detail = f"{spread(values['dslrun'], 1000, 'ms')} against {spread(values['torchrun'], 1000, 'ms')}"
    name = f"2 nodes x {workers}, a worker fails to next attempt, dslrun / torchrun"
    return Row(name, middle["dslrun"] / middle["torchrun"], "x", 0.5, True, detail)


def _next_attempt_s(programs: Programs, command: Command, workers: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        words = command.line(workers, ["sh", "-c", FAILS_ONCE], *_together(2, "--max-restarts", "1"))
        more = {"CHILD": programs.testchild, "DIR": directory}
        ready = folder / "ready"
        with _started([words, words], folder, more) as nodes:
            until(lambda: ready.exists() and len(ready.read_bytes().splitlines()) == 2 * workers, 120)
            (folder / "go").touch()
            codes = [node.wait(LIMIT_S) for node in nodes]
        if codes != [0, 0]:
            raise RuntimeError(f"{command.name} ended with {codes}: {_said(folder)}")
        starts = [int((folder / f"start.{rank}").read_text()) for rank in range(2 * workers)]
        return (max(starts) - int((folder / "fail").read_text())) / 1e9


def _comes_up(command: Command, nodes: int) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        words = [
            command.path, "--nproc-per-node", "2", *_together(nodes, "--max-restarts", "3"),
            str(EXAMPLE), "--device", "cpu", "--steps", str(STEPS), "--fail-rank", "1", "--fail-at-step", "5",
            "--checkpoints", f"{directory}/checkpoints",
        ]  # fmt: skip
        with _started([words] * nodes, folder, {"OMP_NUM_THREADS": "1"}) as started:
            until(lambda: all(one.poll() is not None for one in started) or _hangs(folder), 20 * LIMIT_S)
            codes = [one.poll() for one in started]
        done = [step for node in range(nodes) for step in steps((folder / f"{node}.out").read_text())]
        return all(code == 0 for code in codes) and bool(done) and max(done)[:3] == (STEPS, 2 * nodes, 1)


def _together(nodes: int, *options: str) -> list[str]:
    endpoint = f"localhost:{pick_free_port()}"
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench"]
    return ["--nnodes", str(nodes), *where, *options]


@contextlib.contextmanager
def _started(
    lines: Sequence[Sequence[str]], folder: Path, more: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a command for each node; at the end nothing is left of them."""
    environ = {**os.environ, **more, MARK: str(folder)}
    with contextlib.ExitStack() as stack:
        nodes: list[subprocess.Popen[bytes]] = []
        stack.callback(_clear, nodes, folder)
        for number, words in enumerate(lines):
            out, err = (
                stack.enter_context((folder / f"{number}.{name}").open("wb")) for name in ("out", "err")
            )
            nodes.append(
                subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            )
        yield nodes


def _hangs(folder: Path) -> bool:
    """Whether nothing has been written for long."""
    newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - newest > LIMIT_S


def _clear(nodes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes.carrying(f"{MARK}={folder}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    for node in nodes:
        node.wait(LIMIT_S)


def _said(folder: Path) -> str:
    return "".join(path.read_text(errors="replace")[-600:] for path in sorted(folder.glob("*.err")))
