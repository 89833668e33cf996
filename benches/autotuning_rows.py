"""Tuning: DeepSpeed's worked example, what an experiment costs beside its script, and how soon it begins."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.measure import Row, wall_s
from benches.programs import Programs

DEEPSPEED_S = 204.0
"""What the tuner of DeepSpeed 0.19.8 took for the example, with 15 launches."""

# Out of memory above 12 samples, and a throughput that grows with the micro batch.
SCRIPT = """
import base64, json, sys
config = json.loads(base64.urlsafe_b64decode(sys.argv[sys.argv.index("--deepspeed_config") + 1]))
tuning = config["autotuning"]
if "model_info_path" in tuning:
    with open(tuning["model_info_path"], "w") as file:
        json.dump({"num_params": 1000, "activation_mem_per_gpu": 0}, file)
    sys.exit()
size = config.get("train_micro_batch_size_per_gpu", 1)
if size > 12:
    raise RuntimeError("CUDA out of memory")
with open(tuning["metric_path"], "w") as file:
    json.dump({"throughput": 100.0 * size}, file)
"""
# Says when its own code runs, behind an import that takes seconds.
STAMP = """
import base64, json, sys, time
import torch
now_ns = time.time_ns()
config = json.loads(base64.urlsafe_b64decode(sys.argv[sys.argv.index("--deepspeed_config") + 1]))
with open(config["autotuning"]["metric_path"], "w") as file:
    json.dump({"throughput": 1.0, "now_ns": now_ns}, file)
"""
EXAMPLE = {
    "zero_optimization": {"stage": [0, 1]},
    "gradient_accumulation_steps": 1,
    "autotuning": {"max_train_micro_batch_size_per_gpu": 16, "repeats": 0},
}


def example(programs: Programs, repeats: int) -> Row:
    """Wall time of the example."""
    taken = [_tune(programs, EXAMPLE) for _ in range(repeats)]
    seconds = [one for one, _ in taken]
    return Row(
        "DeepSpeed's worked example of a tuning, one slot",
        statistics.median(seconds),
        "s",
        DEEPSPEED_S / 10,
        at_most=True,
        detail=f"{taken[0][1]} experiments; {DEEPSPEED_S:g} s there",
    )


def cost(programs: Programs, count: int, bar_ms: float, repeats: int) -> Row:
    """Wall time of an experiment beside that of its script alone, one after another on one slot."""
    space = {"space": {"number": list(range(count))}, "tuner_num_trials": count, "repeats": 0}
    walls = []
    for _ in range(repeats):
        seconds, ran = _tune(programs, {"autotuning": space})
        if ran != count:
            raise RuntimeError(f"{ran} of {count} experiments ran")
        walls.append(seconds / count * 1e3)
    alone = statistics.median([wall_s([sys.executable, "-c", "import base64, json"]) for _ in range(9)]) * 1e3
    whole = statistics.median(walls)
    return Row(
        f"an experiment beside its script, {count} one after another",
        whole - alone,
        "ms",
        bar_ms,
        at_most=True,
        detail=f"{whole:.1f} ms each, of which Python and its imports take {alone:.1f}",
    )


def forked(programs: Programs, count: int, bar_ms: float, bar_times: float, repeats: int) -> list[Row]:
    """What experiments gain whose workers are forked: to the first line behind torch, and in all."""
    ways = {"executed": (), "forked": ("--start-method", "forkserver")}
    lines: dict[str, list[list[float]]] = {name: [] for name in ways}
    walls: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):  # in turns
        for name, options in ways.items():
            wall, times = _first_lines(programs, count, options)
            walls[name].append(wall)
            lines[name].append(times)
    # The first one waits for the imports.
    later = {name: [one for times in lists for one in times[1:]] for name, lists in lines.items()}
    first = statistics.median([times[0] for times in lines["forked"]])
    whole = {name: statistics.median(times) for name, times in walls.items()}
    return [
        Row(
            "from the order of an experiment to its first line behind import torch, forked",
            statistics.median(later["forked"]),
            "ms",
            bar_ms,
            at_most=True,
            detail=f"{min(later['forked']):.0f} to {max(later['forked']):.0f} ms, the first one "
            f"{first:.0f}; executed {statistics.median(later['executed']):.0f}",
        ),
        Row(
            f"a tuning with {count} experiments that import torch, executed / forked",
            whole["executed"] / whole["forked"],
            "x",
            bar_times,
            at_most=False,
            detail=f"{whole['executed']:.1f} s / {whole['forked']:.1f} s",
        ),
    ]


def _first_lines(programs: Programs, count: int, options: Sequence[str]) -> tuple[float, list[float]]:
    """Wall time of a tuning, and milliseconds from each order to the first line, in their order."""
    space = {"space": {"number": list(range(count))}, "tuner_num_trials": count, "repeats": 0}
    found: list[tuple[int, float]] = []

    def look(folder: Path) -> None:
        for path in folder.glob("autotuning_results/*/result.json"):
            # Written just before the order; the clock of files may be a tick behind.
            ordered_ns = (path.parent / "exp.json").stat().st_mtime_ns
            now_ns = int(json.loads(path.read_text())["metrics"]["now_ns"])
            found.append((now_ns, (now_ns - ordered_ns) / 1e6))

    wall, _ = _tune(programs, {"autotuning": space}, STAMP, options, look)
    if len(found) != count:
        raise RuntimeError(f"{len(found)} of {count} experiments ran")
    return wall, [taken_ms for _, taken_ms in sorted(found)]


def _tune(
    programs: Programs,
    config: Mapping[str, Any],
    script: str = SCRIPT,
    options: Sequence[str] = (),
    look: Callable[[Path], None] = lambda _: None,
) -> tuple[float, int]:
    """Wall time of a tuning, and how many experiments it ran. ``look`` is given its folder."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "train.py").write_text(script)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "hosts").write_text("localhost slots=1\n")
        command = [
            *(str(programs.dsl), "-H", "hosts", "--autotuning", "tune", *options),
            *("train.py", "--deepspeed_config", "config.json"),
        ]
        begin = time.monotonic()
        result = subprocess.run(
            command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False
        )
        elapsed = time.monotonic() - begin
        if result.returncode:
            raise RuntimeError(f"the tuning ended with {result.returncode}: {result.stderr[-800:]}")
        look(folder)
        return elapsed, len(list(folder.glob("autotuning_results/*/result.json")))
