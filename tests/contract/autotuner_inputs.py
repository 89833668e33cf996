"""Made-up machines and models for the autotuner, and how each config does on them."""

from __future__ import annotations

import json
import random
from typing import Any

from dsl.tune.config import read_section
from dsl.tune.experiment import PROFILE_NAME, Experiment, Resources, Result
from dsl.tune.search import search

GIGABYTE = 1024**3


def landscapes() -> list[dict[str, Any]]:
    """What is asked of both: the config of the user, the machine, and the truth about the model."""
    return [worked_trace(), *[landscape(seed) for seed in (*range(13), 1178, 1202)]]


def landscape(seed: int) -> dict[str, Any]:
    """One of them."""
    dice = random.Random(seed)
    workers = dice.choice([1, 1, 2, 4, 8])
    cap = dice.choice([16, 24, 64, 1024])
    stage = dice.choice([0, [0, 1], [0, 1, 2], "all", "all", [1, 3]])
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage},
        "autotuning": {"enabled": True, "max_train_micro_batch_size_per_gpu": cap},
    }
    if dice.random() < 0.4:
        config["gradient_accumulation_steps"] = dice.choice([1, 2, 3, 4])
    if dice.random() < 0.3:
        config["train_micro_batch_size_per_gpu"] = dice.choice([1, 2, 3, 4, [1, 2, 4], [3, 5, 8, 13]])
    if dice.random() < 0.3:
        config["autotuning"]["num_tuning_micro_batch_sizes"] = dice.choice([1, 2, 5])
    if dice.random() < 0.5:
        config["fp16"] = {"enabled": True}
    if dice.random() < 0.4:
        config["autotuning"] |= {"fast": False, "tuner_early_stopping": dice.choice([3, 5, 9])}
    # Below a bound on the batch, steps of accumulation and lists of micro batches differ on purpose.
    is_plain = "gradient_accumulation_steps" not in config and "train_micro_batch_size_per_gpu" not in config
    if dice.random() < 0.3 and is_plain:
        config["autotuning"]["max_train_batch_size"] = workers * dice.choice([8, 12, 40, 200])
    return {
        "name": f"seed {seed}",
        "config": config,
        "workers": workers,
        "memory": dice.choice([8, 16, 40]) * GIGABYTE,
        "params": dice.choice([10, 100, 400, 1000]) * 1_000_000,
        "activation": dice.choice([20, 150, 500, 1500]) * 1_000_000,
        # What really fits, as a share of what the estimate says.
        "truth": dice.choice([0.4, 0.7, 0.9, 1.0, 1.2]),
        # Samples a second are x / (x + half), and fall off beyond a peak.
        "half": dice.choice([1, 4, 20, 80]),
        "peak": dice.choice([3, 9, 30, 500]),
    }


def worked_trace() -> dict[str, Any]:
    """Two stages on one worker: nothing above 12 samples fits, which nobody knows."""
    return {
        "name": "worked trace",
        "config": {
            "zero_optimization": {"stage": [0, 1]},
            "autotuning": {"enabled": True, "max_train_micro_batch_size_per_gpu": 16},
        },
        "workers": 1,
        "memory": 16 * GIGABYTE,
        "params": 1_000_000,
        "activation": 1_000_000,
        "most": 12,
        "half": 5,
        "peak": 500,
    }


def largest_that_fits(case: dict[str, Any], stage: int) -> float:
    """Samples of a worker for which memory truly suffices."""
    if "most" in case:
        return float(case["most"])
    params, workers = case["params"], case["workers"]
    is_half = "fp16" in case["config"]
    weights = gradients = params * (2 if is_half else 4)
    optimizer = params * (16 if is_half else 8)
    needed = (
        weights / (workers if stage >= 3 else 1)
        + gradients / (workers if stage >= 2 else 1)
        + optimizer / (workers if stage >= 1 else 1)
    )
    return float(case["truth"] * (case["memory"] - needed) / case["activation"])


def measure(case: dict[str, Any], config: dict[str, Any]) -> dict[str, float] | None:
    """The metrics of a config. None: it runs out of memory."""
    size, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    stage = config["zero_optimization"]["stage"]
    if size > largest_that_fits(case, stage):
        return None
    speed = size / (size + case["half"]) * (1 - 0.04 * stage) * steps / (steps + 0.1)
    speed *= min(1.0, case["peak"] / size) ** 0.5
    # What else a full space tunes makes some difference, without any sense.
    zero = config["zero_optimization"]
    rest = {key: float(value) for key, value in zero.items() if key != "stage"}
    speed *= 1 + random.Random(json.dumps(rest, sort_keys=True)).random() / 10 if rest else 1
    throughput = round(1000 * case["workers"] * speed, 6)
    return {"throughput": throughput, "latency": round(1e6 * size * steps / throughput, 6)}


def profile(case: dict[str, Any]) -> dict[str, float]:
    """What a profile tells about the model."""
    return {
        "num_params": case["params"],
        "trainable_num_params": case["params"],
        "activation_mem_per_gpu": case["activation"],
        "rank": 0,
    }


def ask_ours(case: dict[str, Any], **more: object) -> dict[str, Any]:
    """What this package runs, in order, and what it finds; ``more`` goes into the section."""
    config = {**case["config"], "autotuning": {**case["config"]["autotuning"], "repeats": 0, **more}}
    resources = Resources(nodes=1, slots_per_node=case["workers"], lanes=1, memory_bytes=case["memory"])
    steps = search(read_section(config), config, resources)
    ran: list[Experiment] = []
    results: dict[str, Result] | None = None
    while True:
        try:
            batch = next(steps) if results is None else steps.send(results)
        except StopIteration as end:
            summary = end.value
            break
        ran += batch
        results = {one.name: _result(case, one) for one in batch}
    return {
        "ran": [one.name for one in ran],
        "best": {one.name: [one.best, one.value] for one in summary.spaces if one.best},
        "batches": {one.name: one.config["train_batch_size"] for one in ran if one.name != PROFILE_NAME},
    }


def reason(case: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Why answers differ; empty: for no reason that is known. docs/autotuning.md lists them."""
    is_longer = ours["ran"][: len(theirs["ran"])] == theirs["ran"]
    if isinstance(case["config"].get("train_micro_batch_size_per_gpu"), list) and is_longer:
        return "a listed micro batch that does not run keeps no later stage from being tried"
    return ""


def is_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether both ran the same experiments and found the same. A space where nothing ran is worth 0 to DeepSpeed."""
    best = {name: found for name, found in theirs["best"].items() if found[1]}
    return ours == {**theirs, "best": best}


def _result(case: dict[str, Any], experiment: Experiment) -> Result:
    if experiment.kind == "profile":
        return Result("ok", profile(case), "", 0, 1.0)
    metrics = measure(case, dict(experiment.config))
    if metrics is None:
        return Result("oom", {}, "out of memory", 1, 1.0)
    return Result("ok", metrics, "", 0, 1.0)
