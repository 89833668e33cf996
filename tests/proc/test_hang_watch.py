"""``--hang-timeout``: real jobs that hang, and real jobs that only work for long.

`test_hangs.py` has the hangs of jobs with gloo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.kit.slow_server import slow_server
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import running
from tests.support.recorded import only, recorded

from dsl import runner
from dsl.errors import HangError
from dsl.functions import ChildFailedError, LaunchConfig, elastic_launch, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.places import Nodes

HEALTHY = Path(__file__).resolve().parent.parent / "workers" / "healthy.py"
TIMEOUT_S = "1"
FOUND = "the job hangs, no rank has made progress for "
TOLD = "rank 1 waits for a lock (train.py:7)"

# Rank 1 waits for a lock, rank 0 for a word in a FIFO.
WORKER = """
import os, sys, threading
folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
def hang():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
with open(f"{folder}/began-{attempt}-{rank}", "w"): pass
if rank == "1" and attempt == "0":
    hang()
while attempt == "0" and not os.path.exists(f"{folder}/over"):
    with open(f"{folder}/word") as word:
        word.read()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(WORKER)
    os.mkfifo(tmp_path / "word")
    return path


def words(script: Path, action: str) -> list[str]:
    return ["--hang-timeout", TIMEOUT_S, "--hang-action", action, str(script), str(script.parent)]


@pytest.mark.needs_package("py-spy")
def test_a_hang_is_reported_once_and_again_after_progress(dslrun: Path, script: Path, tmp_path: Path) -> None:
    events = tmp_path / "events"
    line = [str(dslrun), "--nproc-per-node=2", "--events", str(events), *words(script, "report")]
    with running(line, tmp_path / "job") as job:
        until(lambda: TOLD in job.stderr())
        (tmp_path / "word").write_text("go on")
        until(lambda: len(only("Hang", recorded(events))) == 2)
        assert job.process.poll() is None
        assert job.stderr().count(FOUND) == 2
        first, _ = only("Hang", recorded(events))
    assert (first["action"], first["attempt"], first["ranks"]) == ("report", 0, [1])
    assert first["still_s"] >= float(TIMEOUT_S)
    assert TOLD in first["lines"][0]


@pytest.mark.needs_package("py-spy")
def test_a_job_that_hangs_is_stopped_with_a_code_of_its_own(
    dslrun: Path, script: Path, tmp_path: Path
) -> None:
    line = [str(dslrun), "--nproc-per-node=2", "--max-restarts=3", *words(script, "stop")]
    with running(line, tmp_path / "job") as job:
        assert job.wait() == 124
    lines = job.stderr().splitlines()
    (told,) = [one for one in lines if one.startswith("dslrun: the job hung, without progress for ")]
    assert TOLD in told
    assert not (tmp_path / "began-1-0").exists()


@pytest.mark.needs_package("py-spy")
def test_the_rank_that_hangs_fails_and_the_job_starts_again(
    dslrun: Path, script: Path, tmp_path: Path
) -> None:
    line = [str(dslrun), "--nproc-per-node=2", "--max-restarts=1", *words(script, "restart")]
    with running(line, tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
    text = job.stderr()
    assert "ending rank 1, as if it had failed" in text
    (headline,) = [one for one in text.splitlines() if "failed first" in one]
    assert headline.startswith("dslrun: rank 1 (")
    assert ": killed by SIGKILL (signal 9): the job hung, without progress for " in headline
    assert TOLD in headline


def test_without_restarts_the_rank_that_hangs_is_the_failure(
    dsl_command: Path, script: Path, tmp_path: Path
) -> None:
    line = [str(dsl_command), "--num_gpus=2", "--no_local_rank", *words(script, "restart")]
    with running(line, tmp_path / "job", environ={"DS_ACCELERATOR": "cpu"}) as job:
        assert job.wait() == 137


@pytest.mark.needs_package("py-spy")
@pytest.mark.parametrize("action, code", [("stop", 124), ("restart", 137)])
def test_node_0_judges_for_all_nodes(
    action: str, code: int, nodes: Nodes, script: Path, tmp_path: Path
) -> None:
    options = f"--nproc-per-node=1 --hang-timeout={TIMEOUT_S} --hang-action={action}"
    jobs = nodes.start(options, options, program=(str(script), str(tmp_path)))
    assert [job.wait() for job in jobs] == [code, code]
    for job in jobs:
        assert FOUND in job.stderr()
        assert TOLD in job.stderr()
        assert "the job hung, without progress for " in job.stderr()


def hang(folder: str) -> None:
    os.read(os.pipe()[0], 1)


def test_a_program_hears_of_a_hang_of_its_function(tmp_path: Path) -> None:
    config = LaunchConfig(1, 1, 1, max_restarts=0, hang_timeout_s=1.0, hang_action="restart")
    with pytest.raises(ChildFailedError, match="the job hung, without progress"):
        elastic_launch(config, hang)(str(tmp_path))


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("entrypoint", [hang, "cat"])
def test_a_program_whose_job_is_stopped_because_it_hangs_gets_no_results(
    entrypoint: Callable[[str], None] | str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "word")
    with pytest.raises(HangError, match="the job hung, without progress") as caught:
        launch(entrypoint, str(tmp_path / "word"), hang_timeout_s=1.0, hang_action="stop")
    assert caught.value.exit_code == 124


def test_the_runner_of_a_program_exits_with_the_code_of_a_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "word")
    (tmp_path / "reads").write_text(f"#!/bin/sh\ncat {tmp_path}/word\n")
    (tmp_path / "reads").chmod(0o755)
    options = ["--num_gpus=1", "--hang_timeout", TIMEOUT_S, "--hang_action=stop"]
    with pytest.raises(SystemExit) as caught:
        runner.main([*options, "--no_python", "--no_local_rank", str(tmp_path / "reads")])
    assert caught.value.code == 124


@pytest.mark.parametrize("kind", ["evaluate", "download", "loader"])
def test_a_rank_that_works_for_long_does_not_hang(kind: str, dsl_command: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "end")
    with slow_server(3.0, 0.3) as address:
        (tmp_path / "address").write_text(address)
        program = [sys.executable, str(HEALTHY), kind, "3", str(tmp_path)]
        options = ("--hang-timeout", TIMEOUT_S, "--hang-action", "stop")
        with running(dsl_line(dsl_command, 2, program, None, *options), tmp_path) as job:
            assert job.wait(60) == 0, job.stderr()
    assert FOUND not in job.stderr()
