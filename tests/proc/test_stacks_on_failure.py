"""``--stacks-on-failure``: the report tells what the other ranks did when one failed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.jobs import Job, running
from tests.support.places import Nodes

WORKER = """
import os, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
def wait_for_others():
    time.sleep(1000)
def tell():
    with open(f"{folder}/new-{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/new-{rank}", f"{folder}/ready-{rank}")
tell()
if rank != "1":
    wait_for_others()
while not os.path.exists(f"{folder}/fail"):
    time.sleep(0.02)
sys.exit(3)
"""
TOLD = "the others at that moment: all {} ranks are in sleep() (train.py:5)"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(WORKER)
    return path


def fail(folder: Path, ranks: int) -> None:
    """Let rank 1 fail when the other ranks sleep."""
    files = [folder / f"ready-{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() for file in files))
    pids = [int(file.read_text()) for rank, file in enumerate(files) if rank != 1]
    until(lambda: all((one := processes.find(pid)) is not None and one.state == "S" for pid in pids))
    (folder / "fail").touch()


def job_line(dsl: Path, script: Path, *options: str) -> list[str]:
    return [str(dsl), "--num_gpus", "3", "--no_local_rank", *options, str(script), str(script.parent)]


@pytest.mark.needs_package("py-spy")
def test_the_report_says_what_the_others_did(dsl_command: Path, script: Path, tmp_path: Path) -> None:
    with running(job_line(dsl_command, script, "--stacks-on-failure"), tmp_path / "job") as job:
        fail(tmp_path, 3)
        assert job.wait() == 3
    # What other jobs have in /dev/shm may cause a warning.
    lines = [line for line in job.stderr().splitlines() if "shared memory" not in line]
    assert lines[0].startswith("dsl: rank 1 (")
    assert "dsl: stopped by dsl: ranks 0,2 (SIGTERM)" in lines
    assert f"dsl: {TOLD.format(2)}" in lines
    assert any(line.endswith(f"wait_for_others ({script}:5)") for line in lines)


def test_without_the_option_nothing_is_looked_at(dsl_command: Path, script: Path, tmp_path: Path) -> None:
    with running(job_line(dsl_command, script), tmp_path / "job") as job:
        fail(tmp_path, 3)
        assert job.wait() == 3
    assert "at that moment" not in job.stderr()


def test_a_look_that_hangs_delays_the_stop_by_three_seconds_at_most(
    dsl_command: Path, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "py-spy"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nkill -STOP $PPID\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")
    with running(job_line(dsl_command, script, "--stacks-on-failure"), tmp_path / "job") as job:
        fail(tmp_path, 3)
        begin = time.monotonic()
        assert job.wait() == 3
        assert 2 < time.monotonic() - begin < 4
    assert "gave no answer in time" in job.stderr()


def test_a_job_with_restarts_looks_and_goes_on(dsl_command: Path, script: Path, tmp_path: Path) -> None:
    line = job_line(dsl_command, script, "--stacks-on-failure", "--max-restarts", "1")
    with running(line, tmp_path / "job") as job:
        fail(tmp_path, 3)
        first = (tmp_path / "ready-2").read_text()
        until(lambda: (tmp_path / "ready-2").read_text() != first)
        assert job.wait() == 3
    assert job.stderr().count("failed first") >= 1


def test_a_signal_during_the_look_ends_the_job_at_once(
    dsl_command: Path, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "py-spy"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/looks\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")
    with running(job_line(dsl_command, script, "--stacks-on-failure"), tmp_path / "job") as job:
        fail(tmp_path, 3)
        until((tmp_path / "looks").exists)
        job.process.terminate()
        begin = time.monotonic()
        assert job.wait() == 3
        assert time.monotonic() - begin < 1


@pytest.mark.needs_package("py-spy")
def test_the_ranks_of_other_nodes_are_told(nodes: Nodes, script: Path, tmp_path: Path) -> None:
    options = "--nproc-per-node=2 --stacks-on-failure"
    jobs: list[Job] = nodes.start(options, options, program=(str(script), str(tmp_path)))
    fail(tmp_path, 4)
    assert [job.wait() for job in jobs] == [3, 3]
    assert TOLD.format(3) in jobs[0].stderr(), jobs[0].stderr()
