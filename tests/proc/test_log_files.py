"""What a log file may be, and what becomes of the files of others beside it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import running
from tests.support.logs import LogGroup

pytestmark = pytest.mark.guarantee("G6")

FIFO_FILE = """
import sys
from dsl import Ended, Exited, LaunchSpec, Stdio, Supervisor, WorkerSpec
worker = WorkerSpec(["/bin/true"], stdout=Stdio.file(sys.argv[1], append=sys.argv[2] == "append"))
supervisor = Supervisor()
supervisor.start(LaunchSpec([worker]))
ended = False
while not ended:
    for event in supervisor.wait():
        if isinstance(event, Exited):
            print(event.exit)
        ended |= isinstance(event, Ended)
supervisor.close()
"""


def test_a_fifo_in_the_place_of_a_log_fails_the_start(testchild: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.out")
    group = LogGroup(tmp_path, [str(testchild), "pause"], 2, files=True, grace_s=1.0)
    try:
        group.output(20)
        assert group.result()["exits"]["1"] == 126
    finally:
        group.process.kill()
        group.process.wait()


@pytest.mark.parametrize("mode", ["append", "anew"])
@pytest.mark.parametrize("reader", ["a reader", "no reader"])
def test_a_fifo_in_the_place_of_a_file_of_a_worker_fails_its_start(
    mode: str, reader: str, tmp_path: Path
) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if reader == "a reader" else None
    program = [sys.executable, "-c", FIFO_FILE, str(path), mode]
    result = subprocess.run(program, capture_output=True, text=True, timeout=20, check=False)
    if descriptor is not None:
        os.close(descriptor)
    assert f"errno={errno.ENXIO}" in result.stdout, result.stdout + result.stderr


def test_the_null_device_may_stand_in_the_place_of_a_log(testchild: Path, tmp_path: Path) -> None:
    (tmp_path / "0.out").symlink_to("/dev/null")
    group = LogGroup(
        tmp_path, [str(testchild), "flood", "2", "100", "4000"], 1, files=True, log_max_bytes=1 << 20
    )
    out, _ = group.output()
    assert len(out) > 2 << 20
    assert group.result()["notices"] == []


def test_a_fifo_in_the_place_of_a_file_for_words_is_said(testchild: Path, tmp_path: Path) -> None:
    path = tmp_path / "filtered"
    os.mkfifo(path)
    group = LogGroup(tmp_path, [str(testchild), "say", "ERROR"], 2, line_files=[[1, str(path), ["ERROR"]]])
    try:
        out, _ = group.output(20)
        assert out.count(b"ERROR") == 2
        assert group.result()["notices"] == [["file_failed", None, str(path), errno.ENXIO, 0]]
    finally:
        group.process.kill()
        group.process.wait()


def test_a_fifo_at_a_hang_up_holds_nobody(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """The path of a log is a FIFO that nobody reads when the files are opened anew: the old file is kept."""
    logs = tmp_path / "logs"
    words = [str(testchild), "catch", "USR1", "say", "old", "note", str(tmp_path / "job" / "ready"), "%r %p"]
    words += ["await", "USR1", "1", "say", "new"]
    line = dsl_line(dsl_command, 2, words, 1.0, "--log-dir", str(logs))
    with running(line, tmp_path / "job") as job:
        job.ready(2)
        (path,) = until(lambda: list(logs.rglob("1/stdout.log")))
        until(lambda: path.read_text() == "old\n")
        path.rename(path.with_suffix(".1"))
        os.mkfifo(path)
        os.kill(job.guard, signal.SIGHUP)
        until(lambda: "opened anew" in job.stderr())
        os.kill(job.guard, signal.SIGUSR1)
        assert job.wait() == 0
        (said,) = [text for text in job.stderr().splitlines() if str(path) in text]
    assert "not a regular file" in said
    assert path.with_suffix(".1").read_text() == "old\nnew\n"


def test_rotated_files_beside_a_capped_log_are_left_alone(testchild: Path, tmp_path: Path) -> None:
    """The names that logrotate gives belong to others."""
    rotated = {tmp_path / f"0.out.{number}": f"rotated {number}\n" for number in (0, 1, 2)}
    for path, text in rotated.items():
        path.write_text(text)
    words = [str(testchild), "numbered", "1", "100000", "60", "block"]
    LogGroup(tmp_path, words, 1, files=True, console=None, log_max_bytes=1 << 20).output()
    assert {path: path.read_text() for path in rotated if path.exists()} == rotated
    left = {path.name for path in tmp_path.iterdir()} - {path.name for path in rotated}
    assert left == {"0.err", "0.out", "result.json"}


FAILS_FIRST = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
if (folder / f"ready{rank}").exists():
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: (folder / "told").touch())
(folder / f"ready{rank}").touch()
while not (folder / ("ready1" if rank == "0" else "go")).exists():
    time.sleep(0.01)
sys.exit(3)
"""


def test_a_rotation_while_a_failed_attempt_ends_does_not_end_the_job(
    dsl_command: Path, tmp_path: Path
) -> None:
    logs = ["--log-dir", str(tmp_path / "logs"), "--tee", "3"]
    words = [sys.executable, "-c", FAILS_FIRST, str(tmp_path)]
    with running(
        dsl_line(dsl_command, 2, words, 60.0, "--max-restarts", "1", *logs), tmp_path / "job"
    ) as job:
        until((tmp_path / "told").exists)
        os.kill(job.guard, signal.SIGHUP)
        until(lambda: "opened anew" in job.stderr())
        (tmp_path / "go").touch()
        assert job.wait() == 0
