"""Hosts that are reached by another program than ssh, or only after a while, and variables that travel to them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.jobs import running

# A way to a "host" of this machine, which is there from the moment on when its file exists.
WAY = """#!/bin/sh
if [ ! -e "up-$1" ]; then
    echo "way: no route to $1" >&2
    exit 7
fi
echo "$1" >> reached
exec sh -c "$2"
"""
TRAIN = 'import os; print(os.environ["RANK"], *[os.environ.get(name) for name in ("A", "B_ONE", "B_TWO")])\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "way").write_text(WAY)
    (tmp_path / "way").chmod(0o700)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("n0 slots=1\nn1 slots=1\n")
    return tmp_path


def line(dsl: Path, folder: Path, *options: str) -> list[str]:
    way = f"{folder}/way {{host}}"
    return [
        str(dsl),
        "-H",
        "hosts",
        "--no_ssh_check",
        "--master_addr",
        "127.0.0.1",
        "--ssh-program",
        way,
        *options,
        "train.py",
    ]


def come(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"up-{name}").touch()


@pytest.mark.parametrize("shown", ["/way {host}", "/way"])
def test_another_program_than_ssh_reaches_the_hosts(dsl_command: Path, folder: Path, shown: str) -> None:
    come(folder, "n0", "n1")
    words = line(dsl_command, folder)
    words[words.index("--ssh-program") + 1] = f"{folder}{shown}"
    with running(words, folder / "job") as job:
        assert job.wait() == 0, job.stderr()
        ranks = sorted(text.rpartition(": ")[2].split()[0] for text in job.stdout().splitlines())
        assert ranks == ["0", "1"]
    assert sorted((folder / "reached").read_text().split()) == ["n0", "n1"]


def test_a_host_that_its_program_does_not_reach_is_named_with_what_it_said(
    dsl_command: Path, folder: Path
) -> None:
    come(folder, "n0")
    with running(line(dsl_command, folder), folder / "job") as job:
        assert job.wait() == 1
        assert "n1: way ended with 7 before its agent had answered: way: no route to n1" in job.stderr()


def test_a_job_waits_for_its_hosts(dsl_command: Path, folder: Path) -> None:
    come(folder, "n0")
    with running(line(dsl_command, folder, "--wait-hosts", "60"), folder / "job") as job:
        until(lambda: "waiting up to" in job.stderr())
        assert "s for host n1: way: no route to n1" in job.stderr()
        come(folder, "n1")
        assert job.wait() == 0, job.stderr()
        assert job.stderr().count("waiting up to") == 1
        assert len(job.stdout().splitlines()) == 2


def test_hosts_that_do_not_come_in_time_are_named(dsl_command: Path, folder: Path) -> None:
    with running(line(dsl_command, folder, "--wait-hosts", "2"), folder / "job") as job:
        assert job.wait() == 1
        said = job.stderr().splitlines()
        assert said[-1].startswith("dsl: error: hosts n0,n1 cannot be reached within 2 s: way: no route")
        assert job.stdout() == ""


def test_a_way_that_hangs_is_ended_when_the_wait_is_over_and_its_host_is_named(
    dsl_command: Path, folder: Path
) -> None:
    come(folder, "n0")
    os.mkfifo(folder / "up-n1")
    way = (folder / "way").read_text().replace("exec sh", '[ -p "up-$1" ] && read line < "up-$1"\nexec sh')
    (folder / "way").write_text(way)
    with running(line(dsl_command, folder, "--wait-hosts", "4"), folder / "job") as job:
        assert job.wait() == 1
        (said,) = job.stderr().splitlines()
        assert f"error: host n1 cannot be reached within 4 s: no answer from {folder}/way; " in said
        assert job.left() == []
    assert sorted((folder / "reached").read_text().split()) == ["n0", "n1"]


@pytest.mark.parametrize(
    "number, code, how",
    [
        (signal.SIGINT, -2, "interrupted (SIGINT)"),
        (signal.SIGTERM, 143, "terminated (SIGTERM)"),
        (signal.SIGHUP, 129, "terminated (SIGHUP)"),
        (signal.SIGUSR1, 75, "preempted (SIGUSR1)"),
    ],
)
def test_a_wait_for_hosts_ends_with_a_signal(
    dsl_command: Path, folder: Path, number: signal.Signals, code: int, how: str
) -> None:
    come(folder, "n0")
    words = line(dsl_command, folder, "--wait-hosts", "60", "--preempt-signal", "USR1")
    with running(words, folder / "job") as job:
        until(lambda: "waiting up to" in job.stderr())
        os.kill(job.process.pid, number)
        assert job.wait() == code
        assert job.stderr().splitlines()[1:] == [f"dsl: {how} while waiting for host n1"]


def test_variables_that_are_named_reach_the_workers_of_all_hosts(dsl_command: Path, folder: Path) -> None:
    come(folder, "n0", "n1")
    options = ["-x", "A=x = 'y'", "--env", "B_*", "-x", "B_TWO=2", "-x", "C_*"]
    environ = {**os.environ, "B_ONE": "one", "B_TWO": "two"}
    with running(line(dsl_command, folder, *options), folder / "job", environ=environ) as job:
        assert job.wait() == 0, job.stderr()
        texts = sorted(text.rpartition(": ")[2] for text in job.stdout().splitlines())
        assert texts == ["0 x = 'y' one 2", "1 x = 'y' one 2"]
        assert "warning: -x 'C_*' names no variable of this command" in job.stderr()
