"""What is shown only in a pipe or socket waits for its reader, as `cat` would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.logs import Found, check

pytestmark = pytest.mark.guarantee("G6")

TOTAL_LINES = 40_000
LINE_BYTES = 100
SHORT_S = 3.0
LONG_S = 60.0


class Paused:
    """A `dsl` whose stdout nobody reads yet; stderr goes to a file."""

    def __init__(
        self, line: Sequence[str], directory: Path, kind: str = "pipe", *, joined: bool = False
    ) -> None:
        if kind == "pipe":
            read, write = os.pipe()
        else:
            ours, theirs = socket.socketpair()
            read, write = ours.detach(), theirs.detach()
        self.reader: IO[bytes] = os.fdopen(read, "rb")
        self.errors = directory / "errors"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                list(line),
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=subprocess.STDOUT if joined else errors,
                start_new_session=True,
            )
        os.close(write)

    def workers_ended(self, workers: int = 2) -> None:
        """Wait until each worker has said all, and the agent has no child any more."""
        said = self.errors.with_name("said")
        until(lambda: said.exists() and len(said.read_text().split()) == workers, 60)
        (agent,) = until(lambda: processes.children(self.process.pid))
        until(lambda: not processes.children(agent), 60)

    def said(self) -> str:
        """What is on stderr so far."""
        return self.errors.read_text(errors="replace")

    def close(self) -> None:
        """End what is left."""
        self.reader.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _numbered(testchild: Path, workers: int, directory: Path, *more: str) -> list[str]:
    lines = str(TOTAL_LINES // workers)
    said = ["note", str(directory / "said"), "%r"]
    return [str(testchild), "numbered", "1", lines, str(LINE_BYTES), "block", *said, *more]


def _second_fails(directory: Path) -> list[str]:
    """Rank 1 ends with 7 when rank 0 has written all that it has to say."""
    gate = str(directory / "gate")
    return ["only", "0", "[", "touch", gate, "]", "only", "1", "[", "wait", gate, "exit", "7", "]"]


def _pause(kind: str, workers: int, pause_s: float, dsl: Path, testchild: Path, tmp_path: Path) -> None:
    job = Paused(dsl_line(dsl, workers, _numbered(testchild, workers, tmp_path)), tmp_path, kind)
    try:
        job.workers_ended(workers)
        time.sleep(pause_s)  # it is the reader that pauses, nothing is waited for
        assert job.process.poll() is None, "the exit code comes after the reader has everything"
        found = check(testchild.with_name("dsl-linecheck"), job.reader)
        assert found == Found(TOTAL_LINES // workers * workers, 0, 0, 0, 0)
        assert job.process.wait(20) == 0
        assert job.said() == ""
    finally:
        job.close()


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("workers", [2, 64])
def test_a_reader_that_pauses_at_the_end_gets_every_line(
    kind: str, workers: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    _pause(kind, workers, SHORT_S, dsl_command, testchild, tmp_path)


@pytest.mark.stress
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("workers", [2, 64])
def test_a_reader_that_pauses_for_a_minute_at_the_end_gets_every_line(
    kind: str, workers: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    _pause(kind, workers, LONG_S, dsl_command, testchild, tmp_path)


@pytest.mark.guarantee("G3")
def test_the_verdict_does_not_wait_for_a_stalled_stdout(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Stderr is a place of its own, so the user hears of the failure while the pager stands."""
    words = _numbered(testchild, 2, tmp_path, *_second_fails(tmp_path))
    job = Paused(dsl_line(dsl_command, 2, words), tmp_path)
    try:
        job.workers_ended()
        until(lambda: "failed first: exit code 7" in job.said())
        assert job.process.poll() is None
        found = check(testchild.with_name("dsl-linecheck"), job.reader)
        assert found == Found(TOTAL_LINES, 0, 0, 0, 0)
        assert job.process.wait(20) == 7
    finally:
        job.close()


def test_the_verdict_comes_behind_the_output_in_the_same_pipe(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = _numbered(testchild, 2, tmp_path, *_second_fails(tmp_path))
    job = Paused(dsl_line(dsl_command, 2, words), tmp_path, joined=True)
    try:
        job.workers_ended()
        time.sleep(SHORT_S)
        lines = job.reader.read().splitlines()
        assert len([line for line in lines if not line.startswith(b"dsl:")]) == TOTAL_LINES
        assert b"failed first: exit code 7" in lines[TOTAL_LINES]
        assert job.process.wait(20) == 7
    finally:
        job.close()


@pytest.mark.guarantee("G6")
def test_a_restart_does_not_wait_for_a_stalled_stdout(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The lines of the first attempt come first, and none is lost."""
    gate = '"$0.$TORCHELASTIC_RESTART_COUNT"'
    script = f'exec "$@" only 0 [ touch {gate} ] only 1 [ wait {gate} exit 3 ]'
    each = 10_000
    words = [str(testchild), "numbered", "1", str(each), str(LINE_BYTES), "block"]
    options = ["--no-python", "--nproc-per-node=2", "--max-restarts=1"]
    line = [str(dsl_command.with_name("dslrun")), *options, "/bin/sh", "-c", script, str(tmp_path / "gate")]
    job = Paused([*line, *words], tmp_path)
    try:
        until(lambda: "rank 1 (local rank 1, " in job.said().partition("restart 1 of 1")[2], 60)
        assert job.process.poll() is None
        lines = job.reader.read().splitlines()
        for rank in (b"0", b"1"):
            numbers = [int(line.split(b" ", 2)[1]) for line in lines if line.startswith(rank + b" ")]
            assert numbers == [*range(each)] * 2
        assert job.process.wait(20) == 3
    finally:
        job.close()


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting_and_the_last_word_is_the_count(
    signum: signal.Signals, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Lines are missing because somebody ended the job, so the code is not 0."""
    job = Paused(dsl_line(dsl_command, 2, _numbered(testchild, 2, tmp_path)), tmp_path)
    try:
        job.workers_ended()
        time.sleep(SHORT_S)
        job.process.send_signal(signum)
        begin = time.monotonic()
        assert job.process.wait(20) == 128 + signum
        assert time.monotonic() - begin < 5
        last = job.said().splitlines()[-1]
        assert "lines were not shown" in last
        assert "--log-dir" in last, "it says what keeps them"
        shown = job.reader.read().count(b"\n")
        count = int(last.split("dsl: ")[1].split()[0])
        assert TOTAL_LINES <= count + shown <= TOTAL_LINES + 2
    finally:
        job.close()


@pytest.mark.guarantee("G2")
@pytest.mark.timeout(90)  # a job that a signal has ended writes for half a minute, to whoever goes on reading
def test_a_stop_while_nobody_reads_ends_with_its_own_code(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The job is ended by a signal while much output waits; the guard lets the agent end as it means to."""
    words = [*_numbered(testchild, 2, tmp_path), "note", str(tmp_path / "ready"), "%r", "pause"]
    job = Paused(dsl_line(dsl_command, 2, words, 0.5), tmp_path)
    trickle = threading.Thread(target=_trickle, args=(job.reader,), daemon=True)
    try:
        until(lambda: (tmp_path / "ready").exists() and len((tmp_path / "ready").read_text().split()) == 2)
        # Somebody reads, but so slowly that the rest would take minutes.
        trickle.start()
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(60) == 128 + signal.SIGTERM
        last = job.said().splitlines()[-1]
        assert "lines were not shown" in last
        assert "killed by" not in job.said()
    finally:
        job.process.kill()
        job.process.wait()
        if trickle.is_alive():
            trickle.join(20)
        job.close()


def _trickle(reader: IO[bytes]) -> None:
    while os.read(reader.fileno(), 4096):
        time.sleep(0.2)


def test_what_files_keep_is_dropped_with_a_last_word_that_names_them(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    words = _numbered(testchild, 2, tmp_path, *_second_fails(tmp_path))
    job = Paused(dsl_line(dsl_command, 2, words, None, "--log-dir", str(logs)), tmp_path)
    try:
        assert job.process.wait(30) == 7
        last = job.said().splitlines()[-1]
        assert "lines were not shown" in last
        assert str(logs) in last
        for path in logs.rglob("stdout.log"):
            assert path.read_bytes().count(b"\n") == TOTAL_LINES // 2
    finally:
        job.close()


LIBRARY = """
import os, sys
from dsl import Ended, LaunchSpec, Stdio, Supervisor, WorkerSpec
worker = WorkerSpec(sys.argv[2:], env={"RANK": "0"}, stdout=Stdio.log(console=1))
with Supervisor() as supervisor:
    supervisor.start(LaunchSpec([worker]))
    while not any(isinstance(event, Ended) for event in supervisor.wait()):
        pass
    try:
        os.close(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY))
        if os.environ.get("FLUSH"):
            supervisor.flush()
    except KeyboardInterrupt:
        print("interrupted", *supervisor.flush(), file=sys.stderr)
"""


@pytest.mark.parametrize("flush", ["", "1"])
def test_a_program_has_shown_everything_when_its_supervisor_is_closed(
    flush: str, testchild: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Ended` comes although nobody reads; `flush`, or the end of the with block, waits for the reader."""
    monkeypatch.setenv("FLUSH", flush)
    ended = tmp_path / "ended"
    job = Paused([sys.executable, "-c", LIBRARY, str(ended), *_numbered(testchild, 1, tmp_path)], tmp_path)
    try:
        until(ended.exists)
        assert job.process.poll() is None
        assert check(testchild.with_name("dsl-linecheck"), job.reader) == Found(TOTAL_LINES, 0, 0, 0, 0)
        assert job.process.wait(20) == 0, job.said()
    finally:
        job.close()


def test_an_interrupt_ends_the_waiting_of_a_program(
    testchild: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUSH", "1")
    ended = tmp_path / "ended"
    job = Paused([sys.executable, "-c", LIBRARY, str(ended), *_numbered(testchild, 1, tmp_path)], tmp_path)
    try:
        until(ended.exists)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(20) == 0, job.said()
        _, count, signum = job.said().split()
        assert signum == "None"
        assert int(count) + job.reader.read().count(b"\n") == TOTAL_LINES
    finally:
        job.close()
