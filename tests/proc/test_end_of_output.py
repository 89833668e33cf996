"""What is shown only in a pipe or socket waits for its reader, as `cat` would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pyte
import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import complete_lines, is_still
from tests.support.logs import Found, check
from tests.support.terminal import terminal

pytestmark = pytest.mark.guarantee("G6")

TOTAL_LINES = 40_000
LINE_BYTES = 100
SHORT_S = 3.0


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

    def __enter__(self) -> Paused:  # noqa: PYI034  typing.Self needs 3.11
        return self

    def __exit__(self, *_: object) -> None:
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


A_MINUTE = pytest.param(60.0, marks=[pytest.mark.stress, pytest.mark.timeout(180)])


@pytest.mark.parametrize("pause_s", [SHORT_S, A_MINUTE])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("workers", [2, 64])
def test_a_reader_that_pauses_at_the_end_gets_every_line(
    kind: str, workers: int, pause_s: float, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    with Paused(
        dsl_line(dsl_command, workers, _numbered(testchild, workers, tmp_path)), tmp_path, kind
    ) as job:
        job.workers_ended(workers)
        time.sleep(pause_s)  # it is the reader that pauses, nothing is waited for
        assert job.process.poll() is None, "the exit code comes after the reader has everything"
        found = check(testchild.with_name("dsl-linecheck"), job.reader)
        assert found == Found(TOTAL_LINES // workers * workers, 0, 0, 0, 0)
        assert job.process.wait(20) == 0
        assert job.said() == ""


@pytest.mark.guarantee("G3")
def test_the_verdict_does_not_wait_for_a_stalled_stdout(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Stderr is a place of its own, so the user hears of the failure while the pager stands."""
    words = _numbered(testchild, 2, tmp_path, *_second_fails(tmp_path))
    with Paused(dsl_line(dsl_command, 2, words), tmp_path) as job:
        job.workers_ended()
        until(lambda: "failed first: exit code 7" in job.said())
        assert job.process.poll() is None
        found = check(testchild.with_name("dsl-linecheck"), job.reader)
        assert found == Found(TOTAL_LINES, 0, 0, 0, 0)
        assert job.process.wait(20) == 7


def test_the_verdict_comes_behind_the_output_in_the_same_pipe(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = _numbered(testchild, 2, tmp_path, *_second_fails(tmp_path))
    with Paused(dsl_line(dsl_command, 2, words), tmp_path, joined=True) as job:
        job.workers_ended()
        time.sleep(SHORT_S)
        lines = job.reader.read().splitlines()
        assert len([line for line in lines if not line.startswith(b"dsl:")]) == TOTAL_LINES
        assert b"failed first: exit code 7" in lines[TOTAL_LINES]
        assert job.process.wait(20) == 7


def test_a_restart_does_not_wait_for_a_stalled_stdout(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The lines of the first attempt come first, and none is lost."""
    gate = '"$0.$TORCHELASTIC_RESTART_COUNT"'
    script = f'exec "$@" only 0 [ touch {gate} ] only 1 [ wait {gate} exit 3 ]'
    each = 10_000
    words = ["/bin/sh", "-c", script, tmp_path / "gate", testchild, "numbered", "1", each, LINE_BYTES]
    line = dsl_line(dsl_command.with_name("dslrun"), 2, [*words, "block"], None, "--max-restarts=1")
    with Paused(line, tmp_path) as job:
        until(lambda: "rank 1 (local rank 1, " in job.said().partition("restart 1 of 1")[2], 60)
        assert job.process.poll() is None
        lines = job.reader.read().splitlines()
        for rank in (b"0", b"1"):
            numbers = [int(line.split(b" ", 2)[1]) for line in lines if line.startswith(rank + b" ")]
            assert numbers == [*range(each)] * 2
        assert job.process.wait(20) == 3


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting_and_the_last_word_is_the_count(
    signum: signal.Signals, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Lines are missing because somebody ended the job, so the code is not 0."""
    with Paused(dsl_line(dsl_command, 2, _numbered(testchild, 2, tmp_path)), tmp_path) as job:
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


@pytest.mark.guarantee("G2")
@pytest.mark.timeout(90)  # a job that a signal has ended writes for half a minute, to whoever goes on reading
def test_a_stop_while_nobody_reads_ends_with_its_own_code(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The job is ended by a signal while much output waits; the guard lets the agent end as it means to."""
    words = [*_numbered(testchild, 2, tmp_path), "note", str(tmp_path / "ready"), "%r", "pause"]
    with Paused(dsl_line(dsl_command, 2, words, 0.5), tmp_path) as job:
        trickle = threading.Thread(target=_trickle, args=(job.reader,), daemon=True)
        try:
            until(lambda: len(complete_lines(tmp_path / "ready")) == 2)
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


def _trickle(reader: IO[bytes]) -> None:
    while os.read(reader.fileno(), 4096):
        time.sleep(0.2)


def test_what_files_keep_is_dropped_with_a_last_word_that_names_them(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    words = _numbered(testchild, 2, tmp_path, *_second_fails(tmp_path))
    with Paused(dsl_line(dsl_command, 2, words, None, "--log-dir", str(logs)), tmp_path) as job:
        assert job.process.wait(30) == 7
        last = job.said().splitlines()[-1]
        assert "lines were not shown" in last
        assert str(logs) in last
        for path in logs.rglob("stdout.log"):
            assert path.read_bytes().count(b"\n") == TOTAL_LINES // 2


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
    with Paused(
        [sys.executable, "-c", LIBRARY, str(ended), *_numbered(testchild, 1, tmp_path)], tmp_path
    ) as job:
        until(ended.exists)
        assert job.process.poll() is None
        assert check(testchild.with_name("dsl-linecheck"), job.reader) == Found(TOTAL_LINES, 0, 0, 0, 0)
        assert job.process.wait(20) == 0, job.said()


def test_an_interrupt_ends_the_waiting_of_a_program(
    testchild: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUSH", "1")
    ended = tmp_path / "ended"
    with Paused(
        [sys.executable, "-c", LIBRARY, str(ended), *_numbered(testchild, 1, tmp_path)], tmp_path
    ) as job:
        until(ended.exists)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(20) == 0, job.said()
        _, count, signum = job.said().split()
        assert signum == "None"
        assert int(count) + job.reader.read().count(b"\n") == TOTAL_LINES


# ---- lines that are not finished or mean to harm


# Each rank does what its argument says, as Python.
PROGRAM = r"""
import os, sys, time
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.005)
def say(text):
    print(text, end="", flush=True)
exec(sys.argv[1 + int(os.environ["RANK"])])
"""


class Job:
    """A command whose stdout is read as it comes."""

    def __init__(self, line: list[str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=cwd
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.text = b""

    def read(self) -> bytes:
        """All that has come."""
        assert self.process.stdout is not None
        self.text += self.process.stdout.read() or b""
        return self.text

    def showed(self, text: bytes, timeout_s: float = 20.0) -> None:
        """Wait for it."""
        until(lambda: text in self.read(), timeout_s)

    def ended(self) -> bytes:
        """All of the output, once the command has ended well."""
        assert self.process.wait(20) == 0
        return self.read()


@pytest.fixture
def start(dsl_command: Path, tmp_path: Path) -> Iterator[object]:
    jobs = []

    def start(*ranks: str, options: tuple[str, ...] = ()) -> Job:
        program = [sys.executable, "-c", PROGRAM, *ranks]
        jobs.append(Job(dsl_line(dsl_command, len(ranks), program, 1.0, *options), tmp_path))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.terminate()
        job.process.wait(20)
        assert job.process.stdout is not None
        job.process.stdout.close()


@pytest.mark.parametrize("options", [(), ("--tag-output", "always")])
def test_the_last_words_before_a_hang_are_shown(
    start: object, tmp_path: Path, options: tuple[str, ...]
) -> None:
    job = start('say("loading "); wait("gate"); say("done\\n")', 'wait("gate")', options=options)  # type: ignore[operator]
    begin = time.monotonic()
    job.showed(b"loading ")
    assert 0.5 < time.monotonic() - begin < 10
    (tmp_path / "gate").touch()
    tag = b"[rank 0] " if options else b""
    assert job.ended() == tag + b"loading done\n"


def test_nothing_wakes_up_for_a_line_that_has_been_shown(start: object, tmp_path: Path) -> None:
    job = start('say("loading "); wait("gate")', 'wait("gate")')  # type: ignore[operator]
    job.showed(b"loading ")
    agents = processes.children(job.process.pid)
    until(lambda: all(is_still(agent, "dsl-mux", 0.5) for agent in agents))
    (tmp_path / "gate").touch()
    job.ended()


# Rank 1 writes a line before and one after rank 0 does its worst, in pieces that are read one by one.
WORKER = r"""
import os, sys, time
before, after = sys.argv[1] + "/before", sys.argv[1] + "/after"
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.005)
if os.environ["RANK"] == "1":
    print("the line before", flush=True)
    open(before, "w").close()
    wait(after)
    print("the line after", flush=True)
else:
    wait(before)
    for piece in sys.argv[2:]:
        os.write(1, bytes.fromhex(piece))
        time.sleep(0.02)
    open(after, "w").close()
"""

ATTACKS: dict[str, list[bytes]] = {
    "clear the screen": [b"\x1b[2J"],
    "clear all of it and what scrolled by": [b"\x1b[H\x1b[2J\x1b[3J"],
    "go home and write": [b"\x1b[HFAKE"],
    "go to the line above": [b"\x1b[A\x1b[10DFAKE"],
    "go to a line of others by its number": [b"\x1b[1;1fFAKE\x1b[1dFAKE"],
    "rub out the line": [b"\x1b[2K"],
    "rub out its begin": [b"text\x1b[1KFAKE"],
    "delete and insert lines": [b"\x1b[1A\x1b[2M\x1b[2L"],
    "scroll": [b"\x1b[5S\x1b[5T\x1bM\x1bD\x1bE"],
    "set a scroll region": [b"\x1b[2;3r"],
    "set the title": [b"\x1b]0;FAKE\x07\x1b]2;FAKE\x1b\\"],
    "fill the clipboard": [b"\x1b]52;c;RkFLRQ==\x07"],
    "another screen": [b"\x1b[?1049h\x1b[?47h"],
    "hide the cursor, change modes": [b"\x1b[?25l\x1b[?7l\x1b[4h\x1b[?5h\x1b[20h\x1b[?2004h"],
    "save and restore the cursor": [b"\x1b7\x1b[s\x1b[u\x1b8FAKE"],
    "reset": [b"\x1bc", b"\x1b[!p"],
    "ask for an answer": [b"\x1b[6n\x1b[c\x1b[5n\x05"],
    "eight bits": [b"\x9b2J\xc2\x9b2J\xc2\x9d0;FAKE\x07\x84\x8d\xc2\x85"],
    "strings for devices": [b"\x1bPq#0~\x1b\\\x1b_Ga=d\x1b\\\x1b^x\x1b\\\x1bXx\x1b\\"],
    "in pieces": [b"\x1b", b"[", b"2", b"J", b"\x1b]0;FA", b"KE", b"\x07", b"\xc2", b"\x9b2J"],
    "over lines": [b"\x1b[2\nJ\x1b]0;FAKE\nFAKE\x07\x1b\nc"],
    "unfinished at the end of the line": [b"\x1b[3\nJ"],
    "an unfinished string": [b"\x1b]0;FAKE\n\x07"],
    "back over the tag": [b"\rFAKE", b"\x08" * 40 + b"FAKE", b"\x1b[40DFAKE", b"\x1b[GFAKE"],
    "another line by line feeds that are none": [b"\x0bFAKE\x0cFAKE"],
    "colours without an end": [b"\x1b[31;7m"],
    "other letters": [b"\x1b(0\x0e\x1b#8"],
    "set tabs": [b"\x1b[3g\x1bH"],
}
TAGGED = ("--tag-output", "always")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_changes_nothing_on_a_terminal(name: str, dsl_command: Path, tmp_path: Path) -> None:
    words = [piece.hex() for piece in (b"first\nlast ", *ATTACKS[name], b" word\n")]
    line = dsl_line(dsl_command, 2, [sys.executable, "-c", WORKER, tmp_path, *words], None, *TAGGED)
    with terminal(line, {"TERM": "xterm"}) as window:
        window.reported("ended 0")
        window._read()
        data = window.screen
    answers: list[str] = []
    screen = pyte.Screen(80, 24)
    screen.write_process_input = answers.append
    modes = set(screen.mode)
    pyte.ByteStream(screen).feed(data)
    rows = [row.rstrip() for row in screen.display if row.strip()]
    assert [row for row in rows if row.startswith("[rank 1]")] == [
        "[rank 1] the line before",
        "[rank 1] the line after",
    ]
    own = [row for row in rows if not row.startswith("[rank 1]")]
    assert all(row.startswith("[rank 0] ") for row in own)
    assert own[0] == "[rank 0] first"
    assert own[-1].endswith("word")
    assert (screen.title, screen.icon_name, screen.mode, screen.margins) == ("", "", modes, None)
    assert (screen.cursor.x, screen.cursor.y, screen.cursor.hidden) == (0, len(rows), False)
    assert (answers, screen.charset, screen.tabstops) == ([], 0, set(range(8, 80, 8)))
    last = screen.display.index(next(row for row in screen.display if "the line after" in row))
    text = screen.buffer[last][len("[rank 1] t")]
    assert (text.fg, text.bg, text.reverse) == ("default", "default", False)


def test_untagged_lines_and_files_have_the_bytes_as_they_are(dsl_command: Path, tmp_path: Path) -> None:
    attack = b"".join(piece for pieces in ATTACKS.values() for piece in pieces if b"\n" not in piece) + b"\n"
    for tag in ("never", "always"):
        folder = tmp_path / tag
        folder.mkdir()
        program = [sys.executable, "-c", "import os, sys; os.write(1, bytes.fromhex(sys.argv[1]))"]
        program += [attack.hex()]
        line = dsl_line(dsl_command, 2, program, None, "--tag-output", tag, "--log-dir", str(folder))
        result = subprocess.run(line, capture_output=True, timeout=30, check=False)
        assert (result.stdout == attack * 2) is (tag == "never")
        assert [path.read_bytes() for path in folder.rglob("stdout.log")] == [attack, attack]
