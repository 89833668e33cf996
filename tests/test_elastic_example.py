"""The elastic example: its loss is a function of the step alone, and no step is lost."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.elastic import EXAMPLE, FROM, steps
from tests.support.command import ran

# Importing torch takes many seconds on a cold disk.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.proc,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("one_thread"),
]


def words(dsl_command: Path, name: str, workers: int, *arguments: str) -> list[str]:
    """The example under one of the commands."""
    count = "--num_gpus" if name == "dsl" else "--nproc-per-node"
    return [str(dsl_command.with_name(name)), count, str(workers), *arguments]


def example(folder: Path, *arguments: str) -> list[str]:
    return [str(EXAMPLE), "--device", "cpu", "--checkpoints", str(folder), *arguments]


def run(command: list[str]) -> str:
    result = ran(command, timeout_s=150)
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(text: str) -> dict[int, float]:
    done = steps(text)
    return {step.number: step.loss for step in done}


def test_the_loss_at_a_step_does_not_depend_on_the_number_of_workers(
    dsl_command: Path, tmp_path: Path
) -> None:
    alone, three, other = (
        losses(
            run([*words(dsl_command, name, count), *example(tmp_path / f"{name}{count}", "--steps", "60")])
        )
        for name, count in (("dslrun", 1), ("dslrun", 3), ("dsl", 2))
    )
    assert list(alone) == list(range(1, 61))
    assert alone[60] < alone[1] / 4
    assert three == pytest.approx(alone, abs=2e-6)
    assert other == pytest.approx(alone, abs=2e-6)


def test_a_worker_that_fails_costs_no_step(dsl_command: Path, tmp_path: Path) -> None:
    """Those that lose their peer save what they have done, long before the next checkpoint is due."""
    start = words(dsl_command, "dslrun", 2, "--max-restarts", "1")
    script = example(
        tmp_path, "--steps", "12", "--fail-rank", "1", "--fail-at-step", "7", "--save-every", "1000"
    )
    text = run([*start, *script])
    assert [step.number for step in steps(text)] == list(range(1, 13))
    assert [int(step) for step, *_ in FROM.findall(text)] == [0, 7]
    assert [step.restarts for step in steps(text)] == 7 * [0] + 5 * [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000007.pt", "step-000000012.pt"]


def test_a_stopped_training_goes_on_with_another_number_of_workers(
    dsl_command: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    endless = ["--steps", "1000000000", "--save-every", "1000000"]
    command = [*words(dsl_command, "dslrun", 2), *example(folder, *endless)]
    with log.open("w") as file, subprocess.Popen(command, stdout=file) as job:
        try:
            wait_until(lambda: len(losses(log.read_text())) > 10, timeout_s=100)
            job.send_signal(signal.SIGTERM)
            assert job.wait(timeout=30) == 143
        finally:
            job.kill()
    last = max(losses(log.read_text()))
    text = run([*words(dsl_command, "dslrun", 3), *example(folder, "--steps", str(last + 5))])
    (begin,) = (int(step) for step, *_ in FROM.findall(text))
    assert last <= begin <= last + 1  # the line of the last step may have been on its way
