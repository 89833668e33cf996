"""Processes that workers leave running: they have the grace if all workers ended well, and are named."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.jobs import Job, complete_lines, running
from tests.support.warm import Place

from dsl.evidence.reports import FIRST_NAMESPACE

pytestmark = [pytest.mark.engine, pytest.mark.guarantee("G1")]

METHODS = ("spawn", "forkserver", "warm")

# The last argument is how rank 1 ends. What it leaves ignores SIGTERM and ends by itself once it may.
PROGRAM = """
import os, subprocess, sys

UPLOAD = "import os, signal, time\\n" \\
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" \\
    "with open('left', 'a') as file: file.write(f'1 {os.getpid()}\\\\n')\\n" \\
    "while not os.path.exists('may_end'): time.sleep(0.01)\\n" \\
    "open('uploaded', 'w').close()\\n"

def train(way):
    if os.environ["RANK"] == "1":
        subprocess.Popen([sys.executable, "-c", UPLOAD, "an upload"], start_new_session=way != "in_group")
        while not os.path.exists("left"): pass
        if way == "killed": os.kill(os.getpid(), 9)
        if way == "failed": os._exit(3)

if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[-1])
    else:
        from dsl.functions import launch
        launch(train, "well", nproc_per_node=2, start_method="spawn")
"""


@contextlib.contextmanager
def _job(command: list[str], folder: Path, way: str = "well") -> Iterator[Job]:
    (folder / "program.py").write_text(PROGRAM)
    line = ["sh", "-c", 'cd "$0"; exec "$@"', str(folder), *command, str(folder / "program.py"), way]
    with Place() as place, running(line, folder, environ=place.variables()) as job:
        yield job


def _dsl(dsl_command: Path, *options: str) -> list[str]:
    return [str(dsl_command), "--no_local_rank", "--num_gpus", "2", *options]


def _left(folder: Path) -> int:
    """pid of what was left."""
    until(lambda: complete_lines(folder / "left"))
    return int(complete_lines(folder / "left")[0].split()[1])


def _says(job: Job, text: str) -> None:
    until(lambda: text in job.stderr())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["well", "in_group"])
def test_what_ends_in_the_time_of_the_grace_ends_by_itself(
    way: str, method: str, dsl_command: Path, tmp_path: Path
) -> None:
    with _job(_dsl(dsl_command, "--grace", "600", "--start-method", method), tmp_path, way) as job:
        _says(job, f"process {_left(tmp_path)} of rank 1 ({sys.executable} -c import os")
        assert "waiting at most 598 s for what they left running" in job.stderr()
        (tmp_path / "may_end").touch()
        assert job.wait() == 0, job.stderr()
    assert (tmp_path / "uploaded").exists()
    assert "ended what" not in job.stderr()


@pytest.mark.parametrize("method", METHODS)
def test_what_does_not_end_in_that_time_is_ended_and_named(
    method: str, dsl_command: Path, tmp_path: Path
) -> None:
    with _job(_dsl(dsl_command, "--grace", "0.5", "--start-method", method), tmp_path) as job:
        assert job.wait() == 0, job.stderr()
        assert processes.find(_left(tmp_path)) is None
    assert f"ended what the workers had left running: process {_left(tmp_path)} of rank 1" in job.stderr()


def test_a_signal_ends_the_wait_and_a_second_one_is_not_needed(dsl_command: Path, tmp_path: Path) -> None:
    with _job([*_dsl(dsl_command, "--grace", "600"), "--log_level", "info"], tmp_path) as job:
        _says(job, "waiting at most")
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143, job.stderr()
        assert job.left() == []
    assert "SIGTERM received: what is left is ended" in job.stderr()
    assert f"ended what the workers had left running: process {_left(tmp_path)} of rank 1" in job.stderr()


@pytest.mark.parametrize("way, code", [("failed", 3), ("killed", 137)])
def test_what_a_failed_rank_leaves_has_no_such_time(
    way: str, code: int, dsl_command: Path, tmp_path: Path
) -> None:
    with _job(_dsl(dsl_command, "--grace", "600"), tmp_path, way) as job:
        assert job.wait() == code, job.stderr()
        assert job.left() == []
    assert "left running" not in job.stderr()


SEGMENT = """
import os
path = f"/dev/shm/torch_{os.getpid()}_0_0"
os.close(os.open(path, os.O_CREAT | os.O_EXCL))
if os.environ["RANK"] == "1":
    open("made", "w").write(path)
    os.kill(os.getpid(), 9)
os.unlink(path)
"""


def test_shared_memory_of_a_killed_rank_is_removed_or_named(dsl_command: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SEGMENT)
    line = ["sh", "-c", 'cd "$0"; exec "$@"', str(tmp_path), *_dsl(dsl_command), str(tmp_path / "program.py")]
    with running(line, tmp_path) as job:
        assert job.wait() == 137, job.stderr()
    made = (tmp_path / "made").read_text()
    is_first = os.stat("/proc/self/ns/pid").st_ino == FIRST_NAMESPACE
    what = "removed shared memory that" if is_first else "killed ranks may have left shared memory,"
    assert any(what in text and made in text for text in job.stderr().splitlines()), job.stderr()
    assert os.path.exists(made) is not is_first
    Path(made).unlink(missing_ok=True)


def test_functions_wait_for_what_they_have_started(tmp_path: Path) -> None:
    with _job([sys.executable], tmp_path) as job:
        _says(job, f"process {_left(tmp_path)} of rank 1")
        (tmp_path / "may_end").touch()
        assert job.wait() == 0, job.stderr()
    assert (tmp_path / "uploaded").exists()


def test_helpers_that_end_with_their_worker_are_not_worth_a_word(dsl_command: Path, tmp_path: Path) -> None:
    """Such as the tracker of shared memory, which ends a moment later."""
    program = tmp_path / "tracked.py"
    text = (
        "from multiprocessing.shared_memory import SharedMemory\nSharedMemory(create=True, size=1).unlink()\n"
    )
    program.write_text(text)
    with running([*_dsl(dsl_command, "--grace", "600"), str(program)], tmp_path) as job:
        assert job.wait() == 0, job.stderr()
    assert job.stderr() == ""
