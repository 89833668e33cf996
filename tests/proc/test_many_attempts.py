"""A job that is started again thousands of times: its memory, its pace, and that a signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.kit.waiting import until

WORKERS = Path(__file__).resolve().parent.parent / "workers"
OPTIONS = {
    "dsl": ("--num_gpus", "{count}", "--max-restarts", "{restarts}", "--no_local_rank", "--no_python"),
    "dslrun": ("--nproc-per-node", "{count}", "--max-restarts", "{restarts}", "--tee", "3", "--no-python"),
}
MIB = 1 << 20


@pytest.mark.parametrize(
    "command, count, attempts",
    [
        pytest.param("dsl", 2, 400, marks=pytest.mark.timeout(120)),
        pytest.param("dslrun", 2, 400, marks=pytest.mark.timeout(120)),
        pytest.param("dsl", 16, 10_000, marks=[pytest.mark.stress, pytest.mark.timeout(7200)]),
        pytest.param("dslrun", 4, 2_000, marks=[pytest.mark.stress, pytest.mark.timeout(7200)]),
    ],
)
def test_the_memory_of_a_job_does_not_grow_with_its_attempts(
    command: str, count: int, attempts: int, temporary: Path, tmp_path: Path
) -> None:
    """What 200 attempts take is all that there is: freed memory, caches and what is kept of them."""
    words = [word.format(count=count, restarts=attempts - 1) for word in OPTIONS[command]]
    found = tmp_path / "resident"
    ended = subprocess.run(
        [sys.executable, str(WORKERS / "many_attempts.py"), str(found), command, *words, "/bin/false"],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr[-2000:]
    lines = found.read_text(encoding="utf-8").splitlines()
    resident = {int(line.split()[0]): int(line.split()[1]) for line in lines}
    grown = resident[attempts] - resident[200]
    print(f"{command}: {attempts} attempts of {count} workers, grown by {grown / MIB:.2f} MiB")
    # A page here and there in a short run.
    assert grown <= (2 * MIB if attempts > 1000 else MIB / 4)


@pytest.mark.guarantee("G2")
def test_a_crash_loop_slows_down_and_a_signal_ends_it_at_once(dsl_command: Path, tmp_path: Path) -> None:
    """The command says why an attempt failed before it pauses."""
    said = tmp_path / "said"
    command = [
        str(dsl_command),
        "--num_gpus",
        "1",
        "--max-restarts",
        "100000",
        "--no_local_rank",
        "--no_python",
    ]
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            [*command, "/bin/sh", "-c", "exit 3"],
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        ) as job,
    ):
        until(lambda: "restart 9 of 100000, in 0.8 s" in said.read_text(), 20)
        begin_s = time.monotonic()
        until(lambda: "restart 11 of 100000, in 3.2 s" in said.read_text(), 20)
        assert time.monotonic() - begin_s > 2.3
        assert said.read_text().count("failed: exit code 3") == 11
        job.send_signal(signal.SIGINT)
        begin_s = time.monotonic()
        job.wait(20)
        assert time.monotonic() - begin_s < 3
    assert job.returncode == 130
    assert "SIGINT received: the workers are not started again" in said.read_text()
