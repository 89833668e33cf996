"""The watch for hangs over jobs that only work for long."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benches.measure import Row
from benches.programs import ROOT
from tests.kit.slow_server import slow_server

if TYPE_CHECKING:
    from benches.programs import Programs

HEALTHY = ROOT / "tests" / "workers" / "healthy.py"
KINDS = ("evaluate", "loop", "checkpoint", "compile", "download", "loader", "sleep")
TIMEOUT_S = 4.0
ALARM = "the job hangs"
LIMIT_S = 300.0


def false_alarms(programs: Programs, runs: int, work_s: float, at_once: int) -> Row:
    """Healthy jobs of two ranks, one of which works for long without a word: how many are said to hang.

    Every second job waits in a collective operation of gloo.
    """
    begin = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda number: _alarm(programs, number, work_s), range(runs)))
    taken_s, alone_s = time.monotonic() - begin, sum(seconds for _, seconds in found)
    alarms = [kind for kind, _ in found if kind]
    detail = (
        f"{alone_s / 60:.1f} min of jobs in {taken_s:.0f} s, --hang-timeout {TIMEOUT_S:g}: {', '.join(KINDS)}"
    )
    return Row(f"false alarms of the watch in {runs} healthy runs", len(alarms), "", 0, True, detail)


def _alarm(programs: Programs, number: int, work_s: float) -> tuple[str, float]:
    """The kind of a job if it was said to hang, else nothing; and how long it took."""
    kind, is_gloo = KINDS[number % len(KINDS)], bool(number % 2)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, slow_server(work_s, 0.5) as address:
        os.mkfifo(f"{folder}/end")
        Path(folder, "address").write_text(address)
        script = [str(HEALTHY), kind, str(work_s), folder, *(["gloo"] if is_gloo else [])]
        command = [
            programs.dslrun,
            "--standalone",
            "--nproc-per-node",
            "2",
            "--hang-timeout",
            str(TIMEOUT_S),
            *script,
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{kind} has failed: {done.stderr[-2000:]}")
    if ALARM in done.stderr:
        print(done.stderr, file=sys.stderr)
        return kind, time.monotonic() - begin
    return "", time.monotonic() - begin
