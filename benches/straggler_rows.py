"""`dsl-stacks --for`: whether it names the rank that holds the others up, and what its samples cost a job."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benches.measure import Row
from benches.programs import ROOT, Programs
from tests.kit.waiting import until

TRAINING = ROOT / "tests" / "workers" / "slow_rank.py"
SLOW = {
    "loader": ("2", "in Images.__next__ (slow_rank.py:"),
    "loader-workers": ("2", "in Images.__next__ (slow_rank.py:"),
    "kernel": ("2", "in call_kernel (slow_rank.py:"),
    "batch": ("2", "in compute_batch (slow_rank.py:"),
    "neighbour": ("2", "in compute_beside_neighbours (slow_rank.py:"),
    "lock": ("2", "in update_shared (slow_rank.py:"),
    "disk": ("2", "in save_shard (slow_rank.py:"),
    "collector": ("2", "in make_cycles (slow_rank.py:"),
    "host": ("2,3", "in follow_host (slow_rank.py:"),
}
"""Why ranks are slow: which ones are, and what the verdict says that they do."""
FOR_S = 10
LIMIT_S = 300.0


def named(programs: Programs, workers: int) -> list[Row]:
    """One look at a job for each reason to be slow."""
    right, taken = [], []
    for kind, (ranks, where) in SLOW.items():
        told, seconds = _verdict(programs, kind, ranks, workers)
        ranks_told = f"ranks {ranks.replace(',', '-')} hold" if "," in ranks else f"rank {ranks} holds"
        is_right = told.startswith(f"{ranks_told} the others up: ") and where in told
        if not is_right:
            print(f"{kind}, {workers} ranks: {told}", file=sys.stderr)
        right += [kind] * is_right
        taken.append(seconds)
    missed = ", ".join(sorted({*SLOW} - {*right})) or "none"
    name, detail = f"slow ranks of {workers}", f"missed: {missed}; of {', '.join(SLOW)}"
    middle, span = statistics.median(taken), f"{min(taken):.1f} to {max(taken):.1f} s"
    return [
        Row(f"{name} named with their line", len(right), f"of {len(SLOW)}", 8, False, detail),
        Row(f"{name}: time to the verdict, --for {FOR_S}", middle, "s", 12, True, span),
    ]


def even(programs: Programs, workers: int, runs: int) -> Row:
    """Jobs in which all ranks are alike: how often one is named."""
    wrong = 0
    kinds = [kind for kind in SLOW if kind != "neighbour"]
    for number in range(runs):
        kind = kinds[number % len(kinds)]
        told, _ = _verdict(programs, kind, "none", workers)
        if not told.startswith("no rank holds the others up"):
            print(f"even {kind}: {told}", file=sys.stderr)
            wrong += 1
    return Row(f"ranks named in {runs} even runs of {workers}", wrong, "", 0, True, ", ".join(kinds))


def slowdown(programs: Programs, workers: int, turns: int) -> Row:
    """Steps of a job that computes all the time, in turns with and without samples."""
    shares = []
    with _job(programs, "batch", "none", workers) as (guard, folder):
        for _ in range(turns):
            alone = _steps(folder, FOR_S)
            with subprocess.Popen(_command(programs, guard), stdout=subprocess.DEVNULL) as look:
                time.sleep(1.0)  # py-spy has found its processes
                sampled = _steps(folder, FOR_S - 2)
                look.wait(LIMIT_S)
            shares.append(1 - sampled / alone)
    detail = f"median of {turns} pairs of {FOR_S} s, {min(shares) * 100:.1f} to {max(shares) * 100:.1f} %"
    name = f"slowdown of {workers} ranks that are sampled"
    return Row(name, statistics.median(shares) * 100, "%", 3, True, detail)


def _steps(folder: Path, seconds: float) -> float:
    """Steps a second."""
    begin, before = time.monotonic(), (folder / "steps").stat().st_size
    time.sleep(seconds)
    return ((folder / "steps").stat().st_size - before) / (time.monotonic() - begin)


def _verdict(programs: Programs, kind: str, slow: str, workers: int) -> tuple[str, float]:
    """The verdict on a job, and the seconds until it came."""
    with _job(programs, kind, slow, workers) as (guard, _):
        begin = time.monotonic()
        words = [*_command(programs, guard), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        taken = time.monotonic() - begin
    return str(json.loads(done.stdout)["explanation"]), taken


def _command(programs: Programs, guard: int) -> list[str]:
    return [str(Path(programs.dslrun).with_name("dsl-stacks")), "--for", str(FOR_S), str(guard)]


@contextlib.contextmanager
def _job(programs: Programs, kind: str, slow: str, workers: int) -> Iterator[tuple[int, Path]]:
    """A running job that has made some steps: its guard, and the folder of its files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--nproc-per-node", str(workers), "--log-level", "error"]
        command = [programs.dslrun, *options, str(TRAINING), kind, slow, name]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL) as job:
            try:
                until(lambda: job.poll() is not None or len([*folder.glob("ready-*")]) == workers, LIMIT_S)
                if job.poll() is not None:
                    raise RuntimeError(f"{kind} has ended with {job.returncode}")
                yield job.pid, folder
            finally:
                job.terminate()
                job.wait(LIMIT_S)
