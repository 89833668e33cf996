"""What goes wrong in other launchers, as tests: lost codes, leaked workers, waits in series, the wrong rank blamed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import running

pytestmark = pytest.mark.engine


def _ready(directory: Path, *end: str) -> list[str]:
    return ["note", str(directory / "ready"), "%r %p", *end]


def test_m1_a_workers_code_is_the_commands_code(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """torchrun ends with 1 whatever the worker's code was."""
    words = ["only", "1", "[", "exit", "42", "]", "pause"]
    with running(dsl_line(dsl_command, 2, [str(testchild), *words]), tmp_path) as job:
        assert job.wait() == 42


def test_m2_a_killed_worker_gives_128_plus_the_signal(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """deepspeed gives 247, torchrun 1. The report names the signal."""
    with running(dsl_line(dsl_command, 2, [str(testchild), *_ready(tmp_path, "pause")]), tmp_path) as job:
        os.kill(job.ready(2)["1"], signal.SIGKILL)
        assert job.wait() == 137
        assert "SIGKILL" in job.stderr()
        assert "rank 1" in job.stderr()


def test_m3_a_killed_agent_is_a_failure_and_leaves_nobody(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """deepspeed ends with 0, its workers run on."""
    with running(dsl_line(dsl_command, 2, [str(testchild), *_ready(tmp_path, "pause")]), tmp_path) as job:
        job.ready(2)
        os.kill(job.agent(), signal.SIGKILL)
        assert job.wait() == 137
        assert job.left() == []


def test_m4_terminating_the_command_ends_the_workers(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """deepspeed dies and leaves inner launcher and workers."""
    with running(dsl_line(dsl_command, 2, [str(testchild), *_ready(tmp_path, "pause")]), tmp_path) as job:
        job.ready(2)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143
        assert job.left() == []


def test_m5_a_killed_launcher_leaves_nobody(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """torchrun's workers run on for ever. Ours, deaf and in sessions of their own, are gone after the grace."""
    deaf = ["ignore", "TERM,INT,HUP", "setsid"]
    words = ["child", "[", *deaf, "pause", "]", *deaf, *_ready(tmp_path, "pause")]
    with running(dsl_line(dsl_command, 2, [str(testchild), *words], 0.5), tmp_path) as job:
        job.ready(2)
        os.kill(job.guard, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        until(lambda: not job.left(), timeout_s=10)


@pytest.mark.guarantee("G4")
def test_m6_the_deaf_are_ended_together_at_one_deadline(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Deepspeed waits its 30 s for each deaf worker in turn, torchrun ignores the time that was asked for."""
    grace_s = 2.0
    words = [
        "ignore",
        "TERM",
        *_ready(tmp_path, "only", "0", "[", "wait", str(tmp_path / "go"), "exit", "3", "]"),
    ]
    with running(dsl_line(dsl_command, 4, [str(testchild), *words, "pause"], grace_s), tmp_path) as job:
        job.ready(4)
        begin = time.monotonic()
        (tmp_path / "go").touch()
        assert job.wait() == 3
        elapsed_s = time.monotonic() - begin
    assert grace_s <= elapsed_s < 3 * grace_s  # one after the other
