"""Record what DeepSpeed 0.19.7, the last one that has elasticity, answers about it into ``golden/elasticity.json``.

Not part of a test run. From the root of the repository, with a Python that has deepspeed 0.19.7 and this package::

    python -m tests.contract.record_elasticity
    python -m tests.contract.record_elasticity --compare 10000 [--seed N]

The second line asks DeepSpeed and this package the same random questions. It counts equal answers and differences by their
reason, and ends with 1 if there is one without. Nothing in the golden is written by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.contract.elasticity_inputs import (
    MOST_WORKERS,
    VECTORS,
    ask_ours,
    ask_ours_sizes,
    is_equal,
    questions,
    reason,
    sections,
    twin,
)
from tests.contract.golden_file import write

SEED = 1
VERSIONS = (
    *("0.2", "0.3.7", "0.3.8", "0.3.8rc1", "0.3.8.dev2", "0.3.8.post1", "0.3.8+abc", "0.3.9a1", "0.3"),
    *("0.10", "0.14.1+ffb53c25", "0.19.7", "v0.19.7", "1", "0"),
)
SEEN: tuple[tuple[dict[str, Any] | None, dict[str, Any]], ...] = tuple(
    ({"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2], **theirs} if theirs is not None else None,
     {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2], **ours})
    for theirs, ours in (
        (None, {}), ({}, {}), ({"max_train_batch_size": 9}, {}), ({}, {"micro_batch_sizes": [2, 1]}), ({"version": 0.1}, {}),
        ({"version": 0.2}, {}), ({"min_gpus": 2}, {"max_gpus": 7}), ({"max_train_batch_size": 9, "version": 0.1}, {}),
        ({"enabled": False}, {}), ({"micro_batch_sizes": 5}, {}), ({}, {"min_gpus": 0}),
    )
)  # fmt: skip
"""Sections as the scheduler has seen them (None: it has said nothing), and as the job has them."""


def module() -> Any:
    """The solver of the DeepSpeed that is installed, which has no types."""
    logging.disable()
    return import_module("deepspeed.elasticity.elasticity")


def plain(value: Any) -> Any:
    """An answer without the numbers of numpy that are in it."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if value is None else int(value)


def ask(solver: Any, question: list[Any]) -> dict[str, Any]:
    """What DeepSpeed answers: numbers, or the name of its exception."""
    section, size, asks_micro, inherited = question
    os.environ.pop("WORLD_SIZE", None)
    if inherited is not None:
        os.environ["WORLD_SIZE"] = inherited
    config = {"elasticity": {"enabled": True, **section}}
    try:
        return {"result": plain(solver.compute_elastic_config(config, "0.19.7", size, asks_micro))}
    except Exception as error:  # noqa: BLE001  whatever it raises is the answer
        return {"error": type(error).__name__}


def ask_twin(solver: Any, question: list[Any]) -> dict[str, Any] | None:
    """The same for the question without model parallelism, if there is one."""
    alone = twin(question)
    return None if alone is None else ask(solver, alone)


def accepted(solver: Any, section: dict[str, Any]) -> list[int]:
    """With how many workers DeepSpeed's engine goes on, which computes and checks as here (``runtime/config.py``)."""
    model = section.get("model_parallel_size", 1)
    found = []
    for workers in range(model, MOST_WORKERS + 1, model):
        size = workers // model
        answer = ask(solver, [section, size, False, None]).get("result")
        if answer and answer[0] > 0 and answer[0] == answer[2] * size * (answer[0] // (answer[2] * size)):
            found.append(workers)
    return found


def version(solver: Any, target: str) -> str:
    """The name of the exception for a target version, or nothing."""
    config = {
        "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1], "version": 0.1}
    }
    try:
        solver.compute_elastic_config(config, target)
    except Exception as error:  # noqa: BLE001  as above
        return type(error).__name__
    return ""


def seen(solver: Any, theirs: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    """The same for a comparison with what the scheduler has seen."""
    os.environ.pop("DEEPSPEED_ELASTICITY_CONFIG", None)
    if theirs is not None:
        os.environ["DEEPSPEED_ELASTICITY_CONFIG"] = json.dumps(theirs)
    try:
        solver.ensure_immutable_elastic_config(ours)
    except Exception as error:  # noqa: BLE001  as above
        return type(error).__name__
    finally:
        os.environ.pop("DEEPSPEED_ELASTICITY_CONFIG", None)
    return ""


def command(section: dict[str, Any], size: int) -> str:
    """What ``ds_elastic`` prints, from its first frame on: before that DeepSpeed logs."""
    os.environ.pop("WORLD_SIZE", None)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"elasticity": {"enabled": True, **section}}, file)
        file.flush()
        words = [sys.executable, str(Path(sys.executable).with_name("ds_elastic")), "-c", file.name]
        words += ["-w", str(size)] if size else []
        text = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    return text[text.index("-" * 42) :]


def record(solver: Any) -> None:
    """Write the golden, a case a line."""
    asked = [*VECTORS, *questions(300, SEED)]
    cases: dict[str, list[list[Any]]] = {
        "cases": [[question, ask(solver, question), ask_twin(solver, question)] for question in asked],
        "accepted": [[section, accepted(solver, section)] for section in sections(60, SEED)],
        "versions": [[target, version(solver, target)] for target in VERSIONS],
        "seen": [[*pair, seen(solver, *pair)] for pair in SEEN],
        "commands": [[VECTORS[index][0], size, command(VECTORS[index][0], size)] for index, size in ((0, 0), (0, 64), (12, 16))],
    }  # fmt: skip
    release = import_module("deepspeed").__version__
    how = (
        f"deepspeed {release}: cases: compute_elastic_config of an enabled section, world size, whether the micro batch "
        "is asked for, WORLD_SIZE (null: not set), the answer, and that without model parallelism (null: there is none); accepted: numbers of workers up to "
        f"{MOST_WORKERS} for which the engine's call of it and the arithmetic behind it go well; versions: the exception for a target version; "
        "seen: that of ensure_immutable_elastic_config for DEEPSPEED_ELASTICITY_CONFIG (null: not set) and a section; "
        "commands: section, world size (0: none), stdout of ds_elastic"
    )
    write("elasticity", how, **cases)


def compare(solver: Any, count: int, seed: int) -> int:
    """Ask both, and count; the exit code."""
    found: Counter[str] = Counter()
    for question in [*VECTORS, *questions(count, seed)]:
        theirs, ours = ask(solver, question), ask_ours(question)
        why = (
            "equal" if is_equal(theirs, ours) else reason(question, theirs, ours, ask_twin(solver, question))
        )
        if why == "equal" and "result" in ours:
            why = "equal, with numbers"
        if why is None:
            print(f"{json.dumps(question)}\n  DeepSpeed: {theirs}\n  dsl:       {ours}")
        found[why or "UNEXPLAINED"] += 1
    for section in sections(count // 20, seed):
        theirs_sizes, sizes = accepted(solver, section), ask_ours_sizes(section)
        is_same = theirs_sizes == (sizes or [])
        if not is_same:
            print(f"{json.dumps(section)}\n  DeepSpeed: {theirs_sizes}\n  dsl:       {sizes}")
        found["equal numbers of workers" if is_same else "UNEXPLAINED"] += 1
    for why, number in found.most_common():
        print(f"{number:7} {why}")
    return int(found["UNEXPLAINED"] > 0)


def main() -> int:
    """Record, or compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compare", type=int, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    with contextlib.redirect_stdout(sys.stderr):
        solver = module()
    if options.compare is None:
        record(solver)
        return 0
    return compare(solver, options.compare, options.seed)


if __name__ == "__main__":
    sys.exit(main())
