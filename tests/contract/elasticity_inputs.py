"""Random questions for the elastic batch solver, and the reasons for which its answers may differ from DeepSpeed's."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from math import lcm
from typing import Any
from unittest import mock

from dsl import errors
from dsl.elasticity import compute_elastic_config
from dsl.elasticity.solver import accepted_world_sizes

MOST_WORKERS = 96
"""Numbers of workers that a job is offered."""

VECTORS: list[list[Any]] = [
    [{"version": 0.1, "max_train_batch_size": cap, "micro_batch_sizes": sizes, **more}, size, False, None]
    for cap, sizes, more, size in (
        (10000, [8, 12, 16, 17], {"min_gpus": 32, "max_gpus": 1500}, 0),
        (10000, [8, 12, 16, 17], {"min_gpus": 32, "max_gpus": 1500}, 64),
        (10000, [8, 12, 16, 17], {"min_gpus": 32, "max_gpus": 1500}, 128),
        (32, [1, 2, 3, 7], {"max_gpus": 1500}, 4),
        (32, [1, 2, 3, 7], {"max_gpus": 1500}, 7),
        (100, [8, 10, 12], {"max_gpus": 1500}, 0),
        (2000, [2, 4, 6], {}, 12),
        (4, [1, 2, 3, 4], {"max_gpus": 4}, 0),
        (16, [8, 12], {"max_gpus": 4}, 0),
        (100, [8], {"min_gpus": 50, "max_gpus": 60}, 0),
        (4, [8], {}, 0),
        (8, [], {}, 0),
        (2000, [2, 4, 6], {"version": 0.2, "num_gpus_per_node": 8}, 16),
        (2000, [2, 4, 6], {"version": 0.2, "num_gpus_per_node": 8}, 56),
        (2000, [2, 4, 6], {"version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 16}, 16),
        (2000, [2, 4, 6], {"version": "0.3"}, 0),
        (2000, [2, 4, 6], {"version": 0.15}, 0),
    )
] + [
    [
        {
            "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32,
            "max_gpus": 1500, "num_gpus_per_node": 8, "model_parallel_size": 4,
        },
        *asked,
    ]
    for asked in ([0, False, "16"], [0, True, "16"], [0, True, "64"], [16, False, None], [0, False, None], [0, True, "18"])
]  # fmt: skip
"""Questions by hand; each as section (all are enabled), world size, whether the micro batch is asked for, WORLD_SIZE."""

SLIPS: tuple[tuple[str, Any], ...] = (
    *(("micro_batch_sizes", value) for value in (5, "2", None, [], ["a", None, 0.5], [2, 0.5, 4], [2.0], [-2], [0], [True, 2])),
    *(("max_train_batch_size", value) for value in (0, -5, "100", None, 100.0, 100.5, [100], True)),
    *((key, value) for key in ("min_gpus", "max_gpus", "num_gpus_per_node", "model_parallel_size") for value in (0, -1, "2", None, 2.0, 2.5)),
    *(("min_time", value) for value in (-1, 0.5, "20", None)),
    *(("version", value) for value in ("0.1", 0.15, 0.3, "x", None, 1, [0.1])),
    *(("prefer_larger_batch", value) for value in ("false", None, 0, 1)),
    *(("micro_batch_sizes", [1000003, 1000033, 1000037, 999983]), ("unknown", 1)),
)  # fmt: skip
"""What one key of a section is, now and then."""


def questions(count: int, seed: int) -> Iterator[list[Any]]:
    """Random ones, in the shape of `VECTORS`."""
    chance = random.Random(seed)
    for _ in range(count):
        section = random_section(chance)
        if chance.random() < 0.06:
            key, value = chance.choice(SLIPS)
            section[key] = value
        yield [section, _world_size(chance, section), chance.random() < 0.4, _inherited(chance, section)]


def random_section(chance: random.Random) -> dict[str, Any]:
    """A section that is well formed, though it need not have a solution."""
    sizes = chance.choice(
        [range(1, 9), range(1, 65), (1, 2, 4, 8, 16, 32, 64), (2, 4, 6, 8, 12), range(1, 400)]
    )
    micro_batches = [chance.choice(sizes) for _ in range(chance.randint(1, 6))]
    least = max(micro_batches) if chance.random() < 0.9 else 1
    section: dict[str, Any] = {
        "max_train_batch_size": round(least * 10 ** (3 * chance.random())),
        "micro_batch_sizes": micro_batches,
    }
    if chance.random() < 0.5:
        section["min_gpus"] = chance.choice([1, 1, 2, 3, 8, 32, chance.randint(1, 100)])
    if chance.random() < 0.5:
        section["max_gpus"] = section.get("min_gpus", 1) + chance.choice(
            [0, 3, 64, 1500, chance.randint(0, 3000)]
        )
    if chance.random() < 0.4:
        section["prefer_larger_batch"] = chance.random() < 0.3
    if chance.random() < 0.45:
        return {"version": 0.1, **section}
    if chance.random() < 0.8:
        section["num_gpus_per_node"] = chance.choice([1, 2, 4, 8, 8, 16, chance.randint(1, 16)])
    if chance.random() < 0.3:
        section["model_parallel_size"] = chance.choice([1, 2, 2, 4, 8, 3])
    return section | ({"version": chance.choice([0.2, "0.2"])} if chance.random() < 0.5 else {})


def _world_size(chance: random.Random, section: dict[str, Any]) -> int:
    if chance.random() < 0.3:
        return 0
    nodes = chance.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, chance.randint(1, 200)])
    whole = section.get("num_gpus_per_node")
    return nodes * (whole if isinstance(whole, int) and whole > 0 and chance.random() < 0.5 else 1)


def _inherited(chance: random.Random, section: dict[str, Any]) -> str | None:
    if chance.random() < 0.1:
        return chance.choice([None, "", "x", "0", "-4", "4.0"])
    return str(max(1, _world_size(chance, section)))


def ask_ours(question: list[Any]) -> dict[str, Any]:
    """What this package answers, in the shape in which `record_elasticity` writes DeepSpeed's answers."""
    section, size, asks_micro, inherited = question
    config = {"elasticity": {"enabled": True, **section}}
    with mock.patch.dict("os.environ", {} if inherited is None else {"WORLD_SIZE": inherited}):
        if inherited is None:
            os.environ.pop("WORLD_SIZE", None)
        try:
            answer = compute_elastic_config(config, "0.19.7", size, asks_micro)
        except errors.ElasticityError as error:
            is_one_line = str(error).isprintable()
            return {"error": type(error).__name__ if is_one_line else "not one line"}
    # Nothing but plain numbers: json refuses all else.
    return {"result": json.loads(json.dumps(answer))}


ERRORS = {"ValueError": "ElasticityConfigError", "NotImplementedError": "ElasticityConfigError"}
"""What DeepSpeed raises beside errors of its own, on purpose."""


def is_equal(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """The same numbers, or an error of the same meaning."""
    if "error" in theirs:
        return ours == {"error": ERRORS.get(theirs["error"], theirs["error"])}
    return theirs == ours


def reason(
    question: list[Any], theirs: dict[str, Any], ours: dict[str, Any], undivided: dict[str, Any] | None
) -> str | None:
    """The defect of DeepSpeed's that explains a difference; None if none does.

    ``undivided`` is what it answers to the same question without model parallelism (see `twin`).
    """
    section, size, asks_micro, inherited = question
    slip = _slip(section)
    if slip:
        return slip if ours == {"error": "ElasticityConfigError"} else None
    sizes, cap = section["micro_batch_sizes"], section["max_train_batch_size"]
    if lcm(*sizes) >= 2**63:
        return "least common multiple beyond 64 bits"
    if float(section.get("version", 0.2)) == 0.1:
        is_empty = theirs == {"error": "TypeError"} or theirs.get("result", ["", "some"])[1] in ([], None)
        has_size = size or asks_micro
        is_refused = ours == {"error": f"Elasticity{'IncompatibleWorldSize' if has_size else 'ConfigError'}"}
        return "batch size that serves no world size" if is_empty and is_refused else None
    model = int(section.get("model_parallel_size", 1))
    workers = size * model or int(inherited or 0)
    if workers == 0 or workers % model:
        is_refused = ours == {"error": "ElasticityIncompatibleWorldSize"}
        return "WORLD_SIZE that makes no copies of the model" if is_refused else None
    if undivided is not None:
        if is_equal(undivided, ours) or reason(twin(question) or [], undivided, ours, None):
            return "devices counted as copies of the model"
        return None
    size = workers
    if min(sizes) * size > cap:
        is_refused = ours == {"error": "ElasticityIncompatibleWorldSize"}
        return "batch of no samples" if is_refused and theirs.get("result", [0])[0] == 0 else None
    if "result" not in ours or not is_sound(section, size, ours["result"]):
        return None
    if theirs == {"error": "TypeError"}:
        return "no number of whole nodes is served"
    if theirs.get("result", [1])[0] == 0:
        return "batch of no samples"
    devices = section.get("num_gpus_per_node", 1)
    return "numbers with a fraction" if size / devices * devices != size else None


def twin(question: list[Any]) -> list[Any] | None:
    """The same question for nodes whose devices are whole copies of the model; None if it is that already.

    The number of nodes stays, and so do their bounds; the devices of a node become fewer.
    """
    section, size, asks_micro, inherited = question
    if _slip(section):
        return None
    # JSON may write a whole number as 2.0.
    numbers = {"model_parallel_size": 1, "num_gpus_per_node": 1, "min_gpus": 1, "max_gpus": 10000}
    model, devices, least, most = (int(section.get(key, default)) for key, default in numbers.items())
    if model < 2 or devices < 1 or devices % model:
        return None
    copies, least, most = devices // model, least // devices, most // devices
    alone = {
        **section,
        "model_parallel_size": 1,
        "num_gpus_per_node": copies,
        "min_gpus": least * copies or 1,
        # Less than a node is no bound.
        "max_gpus": (most or 10**6) * copies,
    }
    workers = int(inherited) // model if inherited and inherited.isdecimal() else 0
    return [alone, size, asks_micro, str(workers)]


def _slip(section: dict[str, Any]) -> str | None:
    """What is not of its key's type, or beyond it; DeepSpeed stumbles over it later, or takes it for something."""
    whole = ("max_train_batch_size", "min_gpus", "max_gpus", "num_gpus_per_node", "model_parallel_size")
    for key in whole:
        value = section.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            return f"{key} that is no whole number"
    sizes = section["micro_batch_sizes"]
    if sizes == []:
        return "no micro batch"
    if isinstance(sizes, list) and True in [isinstance(one, bool) for one in sizes]:
        return "true for a micro batch"
    if not isinstance(section.get("prefer_larger_batch", True), bool | int):
        return "prefer_larger_batch that is neither true nor false"
    if not isinstance(section.get("min_time", 0), int | float):
        return "min_time that is no number"
    try:
        float(section.get("version", 0.2))
    except (TypeError, ValueError):
        return "version that is no number"
    return None


def is_sound(section: dict[str, Any], size: int, answer: list[Any]) -> bool:
    """Whether an answer of version 0.2 keeps its promises, whoever gave it."""
    batch, listed, *micro = answer
    sizes = section["micro_batch_sizes"]
    shares = [divmod(batch, one) for one in listed]
    return (
        0 < batch <= section["max_train_batch_size"]
        and size in listed
        and listed == sorted(set(listed))
        and all(rest == 0 and any(share % one == 0 for one in sizes) for share, rest in shares)
        and all(one in sizes and batch % (size * one) == 0 for one in micro)
    )


def ask_ours_sizes(section: dict[str, Any]) -> list[int] | None:
    """The numbers of workers that we let a job have; None: its section is refused as a whole."""
    try:
        return list(accepted_world_sizes({"enabled": True, **section}, MOST_WORKERS))
    except errors.ElasticityError:
        return None


def sections(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Random ones for the question with how many workers a job goes on."""
    chance = random.Random(seed)
    for _ in range(count):
        yield random_section(chance)
