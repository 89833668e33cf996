"""The engine through the library: cost of a spawn in a fat process and among many, time to see a death."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from benches.measure import Row, in_turns, medians, spread
from benches.programs import Programs

PROBE = Path(__file__).with_name("engine_probe.py")


def _probe(*arguments: object) -> list[float]:
    command = [sys.executable, str(PROBE), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-800:]}")
    return [float(line) for line in result.stdout.split()]


def fat_parent(repeats: int) -> Row:
    """Spawning from a process with 1 GiB resident against a small one."""
    takers = {"small": lambda: _probe("spawn", 0, 300)[0], "fat": lambda: _probe("spawn", 1024, 300)[0]}
    values = in_turns(takers, repeats)
    middle = medians(values)
    detail = f"{spread(values['fat'], 1e6, 'us')} against {spread(values['small'], 1e6, 'us')} a worker"
    return Row("spawn at 1 GiB / small", middle["fat"] / middle["small"], "x", 1.5, True, detail)


def cpu_growth(programs: Programs, repeats: int) -> Row:
    """Our processor time a spawn at 4000 workers with two pipes each, against 100."""
    words = (programs.testchild, "pause")
    takers = {"100": lambda: _probe("cpu", 100, *words)[0], "4000": lambda: _probe("cpu", 4000, *words)[0]}
    values = in_turns(takers, repeats)
    middle = medians(values)
    detail = f"{spread(values['4000'], 1e6, 'us')} against {spread(values['100'], 1e6, 'us')}"
    return Row("CPU a spawn, 4000 / 100 with pipes", middle["4000"] / middle["100"], "x", 1.5, True, detail)


def detection(programs: Programs, kills: int) -> Row:
    """From the kill of one of 4000 workers until the engine has noticed its death."""
    delays_ms = [1000 * delay for delay in _probe("detect", 4000, kills, programs.testchild, "pause")]
    high = statistics.quantiles(delays_ms, n=20)[-1]
    detail = f"{len(delays_ms)} kills, p95 {high:.3g} ms"
    return Row("death of one of 4000 noticed, p50", statistics.median(delays_ms), "ms", 1.0, True, detail)
