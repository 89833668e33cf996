"""Training frameworks take the places of their ranks from the environment of our workers, also where Slurm has left its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster, Slurm
from tests.support.batch import Batch

SCRIPTS = Path(__file__).resolve().parents[1] / "frameworks" / "scripts"
TRAININGS = ("lightning_fit.py", "accelerate_loop.py", "deepspeed_zero.py")

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.torch, pytest.mark.stress),
    *(pytest.mark.needs_package(name) for name in ("lightning", "accelerate", "deepspeed")),
]


class Shape(NamedTuple):
    """A job of two workers a node."""

    nodes: int
    options: str
    """Of sbatch."""
    command: str
    """In the script, before the training."""
    environment: str
    """What Lightning makes of it."""


SHAPES = {
    "tasks are ranks": Shape(2, "--ntasks-per-node=2 --gpus-per-node=2", "dsl", "SLURMEnvironment"),
    "a task a node": Shape(2, "--ntasks-per-node=1 --gpus-per-node=2", "dsl", "LightningEnvironment"),
    "an agent a node": Shape(
        2, "--ntasks-per-node=2 --gpus-per-task=1", "dsl --one-agent-per-node", "LightningEnvironment"
    ),
    "one node": Shape(
        1, "--ntasks-per-node=1 --gpus-per-node=2", "dsl --no_local_rank --num_gpus 2", "LightningEnvironment"
    ),
    "a step": Shape(
        1, "--ntasks-per-node=2", "srun -n1 dsl --no_local_rank --num_gpus 2", "LightningEnvironment"
    ),
    "dslrun in a step": Shape(
        2,
        "--ntasks-per-node=1 --gpus-per-node=2",
        "srun sh -c 'exec dslrun --nnodes 2 --nproc-per-node 2 --node-rank $SLURM_NODEID --master-addr node0 \"$@\"' --",
        "TorchElasticEnvironment",
    ),
}


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where torch keeps what DeepSpeed compiles."""
    return str(tmp_path_factory.mktemp("extensions"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_a_framework_trains_with_all_ranks_of_its_allocation(
    name: str, hosts: Cluster, slurm: Slurm, extensions: str, tmp_path: Path, wait_until: WaitUntil
) -> None:
    del slurm  # it is there, and has no job
    shape = SHAPES[name]
    lines = [
        f"mkdir {script}.out; {shape.command} {SCRIPTS / script} --out {script}.out"
        + (f" --nodes {shape.nodes}" if script == "lightning_fit.py" else "")
        for script in TRAININGS
    ]
    (tmp_path / "job.sh").write_text("\n".join(["#!/bin/bash", "set -e", *lines, ""]), encoding="utf-8")
    options = (f"--nodes={shape.nodes}", *shape.options.split())
    env = {"TORCH_EXTENSIONS_DIR": extensions}
    job = Batch(hosts, tmp_path, tmp_path / "job.sh", options=options, env=env)
    facts = wait_until(job.ended, timeout_s=600)
    assert facts["ExitCode"] == "0:0", job.output
    size = 2 * shape.nodes
    for script in TRAININGS:
        answers = [json.loads((tmp_path / f"{script}.out/{rank}.json").read_text()) for rank in range(size)]
        assert [one["saw"]["world_size"] for one in answers] == [size] * size
        assert [one["saw"]["local_rank"] for one in answers] == [rank % 2 for rank in range(size)]
        assert all(one["shared"] == pytest.approx(answers[0]["shared"], rel=1e-6) for one in answers)
        told = {one["saw"].get("environment", shape.environment) for one in answers}
        assert told == {shape.environment}
