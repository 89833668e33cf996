"""Tuning: DeepSpeed's worked example, and what an experiment costs beside its script."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.measure import Row, wall_s

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def _tune(programs: Programs, config: Mapping[str, Any]) -> tuple[float, int]:
    """Wall time of a tuning, and how many experiments it ran."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "hosts").write_text("localhost slots=1\n")
        command = [
            *(str(programs.dsl), "-H", "hosts", "--autotuning", "tune"),
            *("train.py", "--deepspeed_config", "config.json"),
        ]
        begin = time.monotonic()
        result = subprocess.run(
            command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False
        )
        elapsed = time.monotonic() - begin
        if result.returncode:
            raise RuntimeError(f"the tuning ended with {result.returncode}: {result.stderr[-800:]}")
        return elapsed, len(list(folder.glob("autotuning_results/*/result.json")))
