"""Jobs through each launcher: a program that uses MPI keeps its ranks, and a failure ends the launcher at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster, Mpi

HOSTFILE = "node2 slots=2\nnode0 slots=1\nnode1 slots=3\n"
# MPICH 4.0.2 sometimes hangs when it is shut down, without dsl, too.
ASK_MPI = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
print(os.uname().nodename, world.rank, world.size, total, os.environ["RANK"], flush=True)
if MPI.Get_library_version().startswith("MPICH Version:\t4.0"):
    world.barrier()
    os._exit(0)
"""
FAIL = """
import os, time
if os.environ["RANK"] == "4":
    print(time.time(), flush=True)
    os._exit(7)
time.sleep(60)
"""
LAUNCHER_S = 2.5
"""What a launcher may take to end when all agents have: far more than it needs on a busy machine."""


def command(
    dsl_command: Path, tmp_path: Path, mpi: Mpi, program: str, *options: str
) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "hosts").write_text(HOSTFILE, encoding="utf-8")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    variables = "".join(f"{name}={value}\n" for name, value in mpi.python.items())
    (tmp_path / ".deepspeed_env").write_text(variables, encoding="utf-8")
    words = [
        str(dsl_command),
        "-H",
        "hosts",
        "--launcher",
        mpi.launcher,
        "--no_local_rank",
        *options,
        "train.py",
    ]
    return words, {"PATH": mpi.env["PATH"], "DS_ACCELERATOR": "cpu"}


def test_a_program_that_uses_mpi_keeps_its_ranks(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, mpi: Mpi
) -> None:
    words, env = command(dsl_command, tmp_path, mpi, ASK_MPI)
    result = hosts[0].run(words, env=env, cwd=tmp_path, check=True)
    places = ["node2 0", "node2 1", "node0 2", "node1 3", "node1 4", "node1 5"]
    assert sorted(result.stdout.splitlines()) == sorted(f"{place} 6 15 {place[-1]}" for place in places)


@pytest.mark.guarantee("G2", "G3", "G4")
def test_a_failure_ends_the_launcher_at_once(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, mpi: Mpi
) -> None:
    """Of a task that ends with a code Open MPI 4 would make three seconds."""
    words, env = command(dsl_command, tmp_path, mpi, FAIL)
    result = hosts[0].run(words, env=env, cwd=tmp_path)
    took_s = time.time() - float(result.stdout)
    assert result.returncode == 7
    assert "rank 4 (local rank 1, pid" in result.stderr
    assert "host node1) failed first: exit code 7" in result.stderr
    assert took_s < LAUNCHER_S
