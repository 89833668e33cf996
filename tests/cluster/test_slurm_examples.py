"""The batch scripts of `examples/slurm`, submitted as a user does it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster, Slurm
from tests.support.batch import Batch

ROOT = Path(__file__).resolve().parents[2]
TRAINING = str(ROOT / "examples" / "train_ddp.py")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def ends(output: str) -> set[tuple[str, str]]:
    """Step and parameters of all ranks."""
    found = re.findall(r"rank \d ended at step (\d+) loss \S+ parameters (\w+)", output)
    assert len(found) == 4, output
    return set(found)


@pytest.mark.parametrize("script", ["dslrun.sbatch", "dsl.sbatch"])
def test_a_training_runs_on_the_nodes_of_its_allocation(
    script: str, hosts: Cluster, slurm: Slurm, tmp_path: Path, wait_until: WaitUntil
) -> None:
    job = Batch(hosts, tmp_path, script, TRAINING, "--device=cpu", "--steps=20")
    facts = wait_until(job.ended, timeout_s=120)
    assert facts["ExitCode"] == "0:0", (job.output, facts)
    assert len(ends(job.output)) == 1
    assert facts["NumNodes"] == "2"


@pytest.mark.guarantee("G2", "G3")
def test_the_job_has_the_exit_code_of_the_worker_that_failed_first(
    hosts: Cluster, slurm: Slurm, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """On the other node, and Slurm's record of the job has it."""
    failing = ["--fail-rank=3", "--fail-at-step=3", "--fail-code=42"]
    job = Batch(hosts, tmp_path, "dsl.sbatch", TRAINING, "--device=cpu", *failing)
    facts = wait_until(job.ended, timeout_s=120)
    assert facts["ExitCode"] == "42:0", job.output
    assert re.search(r"dsl: rank 3 .*host node1.* failed first: exit code 42", job.output), job.output


WORKER = """
import os, signal, sys, time

def save(*_):
    time.sleep(0.5)
    open(f"saved.{os.environ['RANK']}", "x").close()
    sys.exit(75)

if "SLURM_RESTART_COUNT" in os.environ:
    sys.exit(0 if os.path.exists(f"saved.{os.environ['RANK']}") else 1)
signal.signal(signal.SIGUSR1, save)
open(f"ready.{os.environ['RANK']}", "x").close()
signal.pause()
"""


def test_a_job_whose_time_is_over_saves_its_work_and_is_queued_again(
    hosts: Cluster, slurm: Slurm, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Slurm's signal comes to the batch script alone, and from there to the workers on all nodes."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    job = Batch(hosts, tmp_path, "preempt.sbatch", str(script))
    wait_until(lambda: len([*tmp_path.glob("ready.*")]) == 4, timeout_s=60)
    job.ask("scancel", "--batch", "--signal=USR1", job.id)
    wait_until(lambda: job.facts()["Restarts"] == "1", timeout_s=60)
    assert len([*tmp_path.glob("saved.*")]) == 4, job.output
    assert "exit code 75: it can be queued again" in job.output

    # Slurm waits for two minutes before it starts such a job again.
    wait_until(lambda: job.facts()["JobState"] == "PENDING", timeout_s=60)
    job.ask("scontrol", "update", f"JobId={job.id}", "StartTime=now")
    facts = wait_until(job.ended, timeout_s=120)
    assert facts["ExitCode"] == "0:0", (job.output, facts)


SAVER = """
import os, signal, sys, time

def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1)
    open(f"saved.{os.environ['RANK']}", "x").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
open(f"ready.{os.environ['RANK']}", "x").close()
time.sleep(600)
"""


@pytest.mark.guarantee("G1")
def test_a_cancelled_job_has_its_grace_although_slurm_signals_every_process_of_it(
    hosts: Cluster, slurm: Slurm, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Dsl, its agents and the workers hear of it by Slurm and by each other; that is one request."""
    script = tmp_path / "worker.py"
    script.write_text(SAVER, encoding="utf-8")
    job = Batch(hosts, tmp_path, "dsl.sbatch", str(script))
    wait_until(lambda: len([*tmp_path.glob("ready.*")]) == 4, timeout_s=60)
    job.ask("scancel", job.id)
    facts = wait_until(job.ended, timeout_s=60)
    assert facts["JobState"] == "CANCELLED"
    wait_until(lambda: not hosts.leftovers(), timeout_s=20)
    assert len([*tmp_path.glob("saved.*")]) == 4, job.output
