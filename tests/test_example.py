"""The example is a real training: it learns, resumes where it stopped, and its failures are told truly."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import WaitUntil
from tests.support.command import ran

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_ddp.py"

# Importing torch takes many seconds on a cold disk.
pytestmark = [
    *(pytest.mark.torch, pytest.mark.proc, pytest.mark.timeout(180), pytest.mark.guarantee("G2")),
    pytest.mark.usefixtures("one_thread"),
]


class Ended(NamedTuple):
    """What one rank said at its end."""

    step: int
    parameters: str


def command(dsl_command: Path, *arguments: str) -> list[str]:
    return [str(dsl_command), "--num_gpus", "2", str(EXAMPLE), "--device", "cpu", *arguments]


def run(dsl_command: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ran(command(dsl_command, *arguments), timeout_s=150)


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+/\d+ loss (\S+)$", text, re.MULTILINE)]


def endings(text: str) -> dict[int, Ended]:
    found = re.findall(r"^rank (\d+) ended at step (\d+) loss \S+ parameters (\w+)$", text, re.MULTILINE)
    return {int(rank): Ended(int(step), parameters) for rank, step, parameters in found}


def test_the_loss_falls_and_all_ranks_hold_the_same_parameters(dsl_command: Path) -> None:
    result = run(dsl_command, "--steps", "100")
    assert result.returncode == 0, result.stderr
    assert losses(result.stdout)[-1] < losses(result.stdout)[0] / 4
    ranks = endings(result.stdout)
    assert set(ranks) == {0, 1}
    assert ranks[0] == ranks[1]
    assert ranks[0].step == 100


def test_a_resumed_job_ends_like_one_that_never_stopped(dsl_command: Path, tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path / "model.pt")]
    first = run(dsl_command, "--steps", "20", *checkpoint)
    second = run(dsl_command, "--steps", "40", *checkpoint, "--resume")
    whole = run(dsl_command, "--steps", "40")
    assert [first.returncode, second.returncode, whole.returncode] == [0, 0, 0]
    assert "resuming at step 20" in second.stdout
    assert endings(second.stdout) == endings(whole.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_terminated_job_saves_its_work_first(
    dsl_command: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """143, although every worker ended in order."""
    checkpoint, log = tmp_path / "model.pt", tmp_path / "log"
    endless = ["--steps", "1000000000", "--log-every", "10", "--checkpoint", str(checkpoint)]
    with log.open("w") as file, subprocess.Popen(command(dsl_command, *endless), stdout=file) as job:
        try:
            wait_until(lambda: losses(log.read_text()), timeout_s=100)
            job.send_signal(signal.SIGTERM)
            assert job.wait(timeout=30) == 143
        finally:
            job.kill()
    ranks = endings(log.read_text())
    assert ranks[0] == ranks[1]
    assert checkpoint.exists()


@pytest.mark.guarantee("G2", "G3")
def test_the_rank_that_fails_gives_the_job_its_exit_code(dsl_command: Path) -> None:
    """The code is the failed rank's, and the verdict names it, not the rank that lost its peer."""
    result = run(dsl_command, "--fail-rank", "1", "--fail-at-step", "3", "--fail-code", "42")
    assert result.returncode == 42
    verdict = [line for line in result.stderr.splitlines() if "rank 1" in line and "42" in line]
    assert verdict, result.stderr
