"""Answers that cannot be written: every command fails, and says so in one line. And names that name nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.command import dsl_line
from tests.support.jobs import running

ANSWERS = (
    *("dsl --help", "dsl -h", "dsl --version", "dslrun --version", "dsl-ps --help", "dsl-warm --version"),
    *("dsl --completion bash", "dslrun --completion=zsh", "dsl --completion SIGNAL dsl SIG -"),
    *("dsl-ps", "dsl-ps --json", "dsl-warm", "dsl-warm status --json", "dsl-warm stop", "dsl-report"),
    *("dsl-report --json", "dsl-elastic -c config.json", "dsl-elastic --version", "dsl-top --help"),
    *("dsl-attach --version", "dsl-wait --help", "dsl-stacks --version", "dsl-ssh --help"),
    *("dsl --num_gpus 1 --dry-run train.py", "dsl --num_gpus 1 --dry-run-json train.py"),
    *("dslrun --dry-run-json train.py", "dsl --num_gpus 1 --doctor train.py", "dslrun --doctor train.py"),
    pytest.param(
        "dsl --hostfile hosts --no_ssh_check --dry-run-json train.py", marks=pytest.mark.needs_program("ssh")
    ),
)
CONFIG = """{"elasticity": {"enabled": true, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2], "min_gpus": 1,
"max_gpus": 4, "min_time": 0, "version": 0.1}}"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    (tmp_path / "config.json").write_text(CONFIG)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


def run(dsl_command: Path, place: Path, line: str, end: str) -> subprocess.CompletedProcess[str]:
    """A run of a command with this end of its line for a shell."""
    name, *words = line.split()
    script = f'exec "$0" "$@" {end}'
    command = ["/bin/sh", "-c", script, str(dsl_command.with_name(name)), *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("line", ANSWERS)
@pytest.mark.parametrize(
    "end, why", [(">/dev/full", "no space left on device"), (">&-", "it is closed")], ids=["full", "closed"]
)
def test_an_answer_that_cannot_be_written_is_an_error(
    dsl_command: Path, place: Path, line: str, end: str, why: str
) -> None:
    done = run(dsl_command, place, line, end)
    last = done.stderr.splitlines()[-1]
    assert last == f"{line.partition(' ')[0]}: error: stdout cannot be written: {why}"
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("line", ANSWERS)
def test_who_wants_no_more_hears_nothing(dsl_command: Path, place: Path, line: str) -> None:
    """As every program that SIGPIPE ends, behind ``| head``."""
    name, *words = line.split()
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [str(dsl_command.with_name(name)), *words],
            cwd=place,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 128 + 13
    assert "stdout" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["dsl-top --once", "dsl-stacks", "dsl-stacks --json"])
def test_a_view_of_a_job_that_cannot_be_written_is_an_error(
    dsl_command: Path, testchild: Path, place: Path, line: str
) -> None:
    program = [str(testchild), "note", str(place / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 1, program), place) as job:
        job.ready(1)
        done = run(dsl_command, place, f"{line} {job.guard}", ">/dev/full")
        why = "stdout cannot be written: no space left on device"
        assert (done.returncode, done.stderr) == (1, f"{line.partition(' ')[0]}: error: {why}\n")


@pytest.mark.parametrize("line", ["dsl-wait", "dsl-attach", "dsl-stacks", "dsl-top", "dsl-wait 1"])
@pytest.mark.parametrize("word", ["", " ", "\t\n"])
def test_an_empty_name_names_no_job(dsl_command: Path, place: Path, line: str, word: str) -> None:
    name, *words = line.split()
    command = [str(dsl_command.with_name(name)), *words, word]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    why = f"{word!r} names no job, give the pid that dsl-ps shows"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{name}: error: {why}\n")


@pytest.mark.parametrize(
    "line, words",
    [
        (["dsl-warm", ""], "no such action: ''"),
        (["dsl-warm", "stop", ""], "no warm server has the pid ''"),
        (["dsl-report", "--timeline", " ", "--events", "e"], "--timeline ' ' names no files"),
    ],
)
def test_other_empty_names_are_errors_too(
    dsl_command: Path, place: Path, line: list[str], words: str
) -> None:
    name, *rest = line
    command = [str(dsl_command.with_name(name)), *rest]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: error: {words}")
