"""What `scripts/test` makes of a machine that has no GPU: one with some, for all processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support import gpus
from tests.support.command import ran
from tests.unit.devices.record_nvml import Replay, lay

from dsl.devices.nvidia import survey

ASK = "from dsl.devices.nvidia import survey; print(survey())"


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if lacks := gpus.missing():
        pytest.skip(lacks)


def on_gpus(count: int, *command: str, env: Mapping[str, str] | None = None) -> str:
    line = [sys.executable, "-m", "tests.support.gpus", str(count), *command]
    environ = {**os.environ, **(env or {})}
    result = ran(line, env=environ)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("count", [1, 8])
def test_a_process_with_no_environment_is_told_what_was_recorded(count: int, tmp_path: Path) -> None:
    made = gpus.machine(count)
    lay(made["files"], tmp_path)
    expected = survey(str(tmp_path), lambda: Replay(made["nvml"]))
    assert (len(expected.devices), expected.source, expected.problems) == (count, "nvml", ())
    assert len({(one.address, one.uuid) for one in expected.devices}) == count
    assert on_gpus(count, "env", "-i", sys.executable, "-c", ASK) == f"{expected}\n"


@pytest.mark.parametrize("accelerator, workers", [("cuda", 8), ("", 8), ("cpu", 2)])
def test_a_job_has_a_worker_for_each_unless_it_says_otherwise(
    accelerator: str, workers: int, dsl_command: Path
) -> None:
    """Which the fixture of all tests does."""
    env = {"DS_ACCELERATOR": accelerator, "LOCAL_SIZE": "2"}
    line = [str(dsl_command), "--dry-run", "--no_python", "true"]
    assert f"{workers} of {workers} workers" in on_gpus(8, *line, env=env)


def test_a_test_that_says_nothing_about_devices_has_none(dsl_command: Path) -> None:
    line = [str(dsl_command), "--num_gpus", "3", "--dry-run", "--no_python", "true"]
    assert "3 of 3 workers" in on_gpus(1, *line)


@pytest.mark.parametrize("entry", ["number", "name"])
def test_num_gpus_takes_the_first_of_the_devices_that_the_user_shows(entry: str, dsl_command: Path) -> None:
    shown = ["6", "3", "7"]
    if entry == "name":
        answers = gpus.machine(8)["nvml"]
        shown = [answers[f"uuid {number}"] for number in shown]
    line = [str(dsl_command), "--num_gpus", "2", "--no_python", "--no_local_rank", "printenv"]
    env = {"DS_ACCELERATOR": "", "CUDA_VISIBLE_DEVICES": ",".join(shown)}
    found = on_gpus(8, *line, "CUDA_VISIBLE_DEVICES", env=env).splitlines()
    assert [one.rpartition(" ")[2] for one in found] == [",".join(shown[:2])] * 2


def test_a_command_ends_as_without(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.support.gpus", "1", "sh", "-c", "exit 7"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run(line, check=False, timeout=30, env=env).returncode == 7
    assert list(tmp_path.iterdir()) == []
