"""What a start costs: one worker against Python alone, several against mpirun, 64 against the floor."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial

from benches.measure import Row, in_turns, medians, spread, wall_s
from benches.programs import Programs

TRUE = "/bin/true"
FLOOR_64 = (64, 2, (("dsl", 1.4), ("dslrun", 1.4)))
FLOORS = ((1000, 2, (("dsl", 0.95),)), (4000, 16, (("dsl", 0.6),)))
"""Workers, cores, and the bar of each command against one thread that starts as many."""


def _commands(programs: Programs, workers: int) -> dict[str, list[str]]:
    """Both of our commands with workers that end at once."""
    torchrun = [programs.dslrun, "--no-python", f"--nproc-per-node={workers}", TRUE]
    return {"dsl": programs.launch(workers, TRUE), "dslrun": torchrun}


def against_python(programs: Programs, repeats: int) -> list[Row]:
    """One worker that ends at once, the whole command, against a Python that does nothing."""
    ours = _commands(programs, 1)
    values = _take({**ours, "python": [sys.executable, "-c", "pass"]}, repeats)
    bars = (("dsl", 1.8), ("dslrun", 2.0))
    return [_ratio(f"1 x true, {name} / python -c pass", values, name, "python", bar) for name, bar in bars]


def against_mpirun(programs: Programs, repeats: int) -> list[Row]:
    """Workers that end at once, the whole command, against Open MPI's, if it is there."""
    if shutil.which("mpirun") is None:
        print("start: mpirun is not on PATH, so its rows are left out", file=sys.stderr)
        return []
    rows = []
    for workers in (1, 8, 16):
        theirs = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(workers), TRUE]
        values = _take({"dsl": programs.launch(workers, TRUE), "mpirun": theirs}, repeats)
        rows.append(_ratio(f"{workers} x true, mpirun / dsl", values, "mpirun", "dsl", 1.3))
    return rows


def against_floor(
    programs: Programs, workers: int, cores: int, bars: tuple[tuple[str, float], ...], repeats: int
) -> list[Row]:
    """The whole command against Python's start plus a bare posix_spawn loop, on so many cores."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < cores:
        print(f"floor: {cores} cores are not there, so {workers} workers are left out", file=sys.stderr)
        return []
    here = ["taskset", "--cpu-list", ",".join(map(str, usable[:cores]))]
    ours = _commands(programs, workers)
    lines = {name: [*here, *ours[name]] for name, _ in bars}
    values = _take({**lines, "floor": [*here, *programs.bare("spawn", workers, TRUE)]}, repeats)
    what = f"{workers} x true on {cores} cores"
    return [_ratio(f"{what}, {name} / floor", values, name, "floor", bar) for name, bar in bars]


def _take(commands: dict[str, list[str]], repeats: int) -> dict[str, list[float]]:
    return in_turns({name: partial(wall_s, words) for name, words in commands.items()}, repeats)


def _ratio(name: str, values: dict[str, list[float]], upper: str, lower: str, bar: float) -> Row:
    """The ratio of two medians. Ours is the smaller the better, whichever side it stands on."""
    middle = medians(values)
    detail = f"{spread(values[upper], 1000, 'ms')} against {spread(values[lower], 1000, 'ms')}"
    return Row(name, middle[upper] / middle[lower], "x", bar, lower != "dsl", detail)
