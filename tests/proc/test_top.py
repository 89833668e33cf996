"""`dsl-top`: its screen with a job that stands still, and what its keys do to a real one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.jobs import Helpers, Job, running
from tests.support.places import Nodes
from tests.support.terminal import Terminal, terminal

from dsl.machine import find_sockets
from dsl.model.codec import Lines, to_line
from dsl.model.observation import (
    Frame,
    JobView,
    Look,
    Looked,
    NodeStacks,
    NodeStatus,
    RankStacks,
    RankStatus,
    Signalled,
    SignalRank,
    ThreadStack,
)
from dsl.view.jobs import running_jobs
from dsl.view.stacks import read_state

SCREENS = Path(__file__).parent / "screens"
HOSTILE = "\x1b[2J\x1b]0;owned\x07step 12 \x1b[31mloss\x1b[0m nan\x00"
GIB = 1 << 30
SOON = 1 << 62
"""A start that lies ahead, so that the age of the fake job stays 0."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the sockets, which no other test uses."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return tmp_path / "dsl"


@pytest.fixture
def top(dsl_command: Path) -> str:
    return str(dsl_command.with_name("dsl-top"))


class FakeJob:
    """A job of 16 ranks on two hosts that always says the same, and counts from a first look on."""

    def __init__(self, folder: Path, pid: int = 4242) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.signals: list[SignalRank] = []
        self.view = JobView("1", "dsl", ("train.py", "--config", "a.yaml"), pid, "/", "n0", SOON, 0, 2, 2, 16)
        self._listener = socket.socket(socket.AF_UNIX)
        self._path = folder / f"{pid}-0.sock"
        self._listener.bind(str(self._path))
        self._listener.listen(16)
        self._callers: list[socket.socket] = []
        threading.Thread(target=self._welcome, daemon=True).start()

    def _welcome(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            self._callers.append(caller)
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        lines, looks = Lines(Look, SignalRank), 0
        try:
            caller.sendall(to_line(self.view))
            while data := caller.recv(1 << 16):
                for question in lines.feed(data):
                    looks += 1
                    for answer in self._answers(question, looks):
                        caller.sendall(to_line(answer))
        except OSError:
            return

    def _answers(self, question: Any, looks: int) -> list[object]:
        number = question.number
        if isinstance(question, SignalRank):
            self.signals.append(question)
            return [Signalled(number), Looked(number)]
        if question.what == "stacks":
            frames = (
                Frame("all_reduce", "/lib/torch/distributed.py", 88),
                Frame("main", "/home/u/train.py", 12),
            )
            ranks = (RankStacks(0, 0, 100, (ThreadStack("MainThread", frames, is_main=True),)),)
            return [NodeStacks(number, 0, "n0", ranks), Looked(number)]
        return [*[self._status(number, node, looks) for node in range(2)], Looked(number)]

    def _status(self, number: int, node: int, looks: int) -> NodeStatus:
        def status(rank: int) -> RankStatus:
            if rank == 13:
                return RankStatus(rank, 5, 0)
            busy = 0 if rank == 5 else 19 + rank % 2
            said = HOSTILE if rank == 2 else f"step {rank + 1200} loss 1.{rank}" if rank != 7 else ""
            state, percent = ("D", 0) if rank == 5 else ("R", 90 + rank % 8)
            return RankStatus(
                rank,
                rank % 8,
                100 + rank,
                state,
                busy * looks,
                (2 + rank // 8) * GIB,
                40,
                said,
                percent,
                60 * GIB,
            )

        ranks = tuple(status(rank) for rank in range(8 * node, 8 * node + 8))
        return NodeStatus(number, node, f"n{node}", 2, ranks, 2, 7_500_000 + 20 * looks)

    def end(self) -> None:
        """What a job does that ends."""
        self._listener.close()
        self._path.unlink()
        for caller in self._callers:
            caller.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def fake(folder: Path) -> FakeJob:
    return FakeJob(folder)


class Screen:
    """What a terminal of some size shows."""

    def __init__(self, keyboard: Terminal, columns: int, rows: int) -> None:
        self._terminal = keyboard
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._fed = 0

    def text(self) -> str:
        shown = self._terminal.shown()
        self._stream.feed(shown[self._fed :])
        self._fed = len(shown)
        return "\n".join(line.rstrip() for line in self._screen.display)

    def shows(self, *words: str) -> str:
        until(lambda: all(word in self.text() for word in words), 20)
        return self.text()

    def press(self, key: bytes) -> None:
        self._terminal.press(key)

    def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        self._terminal.set_size(columns, rows)


def on_screen(top: str, columns: int, rows: int, *words: str) -> Any:
    return terminal([top, "-d", "0.2", *words], size=(columns, rows))


def settled(screen: Screen) -> str:
    """The screen once the CPU shares of a second look are there."""
    return screen.shows("95", "? help")


@pytest.mark.needs_package("textual")
@pytest.mark.parametrize("columns, rows", [(80, 24), (120, 40), (40, 12)])
def test_the_screen(fake: FakeJob, top: str, columns: int, rows: int) -> None:
    """To record it anew: remove the file, run the test, look at the new file."""
    with on_screen(top, columns, rows) as keyboard:
        found = settled(Screen(keyboard, columns, rows)) + "\n"
        assert b"owned" not in keyboard.shown(), "no sequence of a worker reaches the terminal"
    path = SCREENS / f"top_{columns}x{rows}.txt"
    if not path.exists():
        SCREENS.mkdir(exist_ok=True)
        path.write_text(found)
        pytest.fail(f"{path.name} was recorded")
    assert found == path.read_text()


@pytest.mark.needs_package("textual")
def test_keys_sort_fold_and_filter(fake: FakeJob, top: str) -> None:
    with on_screen(top, 120, 40) as keyboard:
        screen = Screen(keyboard, 120, 40)
        settled(screen)
        screen.press(b"f")
        screen.shows("0-4,6-7", "8-12,14-15")
        screen.press(b"h")
        screen.shows("0-7", "8-15", "mixed")
        screen.press(b"h")
        screen.press(b"r")
        until(lambda: screen.text().splitlines()[3].split()[0] == "15")
        screen.press(b"/")
        screen.shows("part of a rank")
        screen.press(b"device")
        until(lambda: [line.split()[0] for line in screen.text().splitlines()[3:5] if line] == ["5"])
        screen.press(b"\x1b")
        screen.shows("step 1200")


@pytest.mark.needs_package("textual")
def test_a_signal_is_asked_for_twice(fake: FakeJob, top: str) -> None:
    with on_screen(top, 80, 24) as keyboard:
        screen = Screen(keyboard, 80, 24)
        settled(screen)
        screen.press(b"\x1b[B")
        screen.press(b"k")
        screen.shows("signal to rank 1 (pid 101, host n0)")
        screen.press(b"\r")
        screen.shows("send SIGUSR1 to rank 1 (pid 101, host n0)?", "no, send nothing")
        screen.press(b"\r")
        screen.shows("RANK".lower(), "? help")
        assert fake.signals == []
        screen.press(b"k")
        screen.shows("signal to rank 1 (pid 101, host n0)")
        screen.press(b"\r")
        screen.shows("no, send nothing")
        screen.press(b"\x1b[B\r")
        screen.shows("SIGUSR1 was sent to rank 1")
        (asked,) = fake.signals
        assert (asked.node_rank, asked.local_rank, asked.pid, asked.signum) == (0, 1, 101, signal.SIGUSR1)


@pytest.mark.needs_package("py-spy")
@pytest.mark.needs_package("textual")
def test_stacks_of_a_rank(fake: FakeJob, top: str) -> None:
    with on_screen(top, 80, 24) as keyboard:
        screen = Screen(keyboard, 80, 24)
        settled(screen)
        screen.press(b"x")
        screen.shows("stacks of 0", "all_reduce (/lib/torch/distributed.py:88)")
        screen.press(b"\x1b")
        settled(screen)


@pytest.mark.needs_package("textual")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_gives_the_terminal_back(signum: int, fake: FakeJob, top: str) -> None:
    with on_screen(top, 80, 24) as keyboard:
        settled(Screen(keyboard, 80, 24))
        assert not keyboard.echo
        keyboard.shown()
        (pid,) = processes.children(keyboard.shell)
        os.kill(pid, signum)
        keyboard.reported(f"ended {128 + signum}")
        assert keyboard.echo
        shown = keyboard.shown()
        for begin, end in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
            assert shown.rfind(end) > shown.rfind(begin), shown[-200:]
        assert b"Traceback" not in shown


@pytest.mark.needs_package("textual")
def test_a_terminal_that_goes_ends_the_screen(fake: FakeJob, top: str) -> None:
    with on_screen(top, 80, 24) as keyboard:
        settled(Screen(keyboard, 80, 24))
        (pid,) = processes.children(keyboard.shell)
        keyboard.hang_up()
        until(lambda: read_state(pid) in "XZ")


@pytest.mark.needs_package("textual")
def test_a_job_that_ends_leaves_its_last_state_on_the_screen(fake: FakeJob, top: str) -> None:
    with on_screen(top, 80, 24) as keyboard:
        screen = Screen(keyboard, 80, 24)
        settled(screen)
        fake.end()
        screen.shows("the job has ended, this is the last state", "device wait")
        screen.press(b"q")
        keyboard.reported("ended 0")
        assert keyboard.echo


@pytest.mark.needs_package("textual")
def test_of_several_jobs_the_user_chooses_one(fake: FakeJob, folder: Path, top: str) -> None:
    FakeJob(folder, 4243)
    with on_screen(top, 80, 24) as keyboard:
        screen = Screen(keyboard, 80, 24)
        screen.shows("job 4242", "job 4243", "enter choose")
        screen.press(b"\x1b[B\r")
        assert "job 4243" in settled(screen)


@pytest.mark.needs_package("textual")
def test_the_table_follows_the_size_of_the_terminal(fake: FakeJob, top: str) -> None:
    with on_screen(top, 120, 40) as keyboard:
        screen = Screen(keyboard, 120, 40)
        screen.shows("LAST LINE")
        screen.resize(40, 12)
        until(lambda: "LAST LINE" not in screen.text() and "STATE" in screen.text())


@pytest.mark.needs_package("textual")
def test_without_colours_there_are_none(fake: FakeJob, top: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with on_screen(top, 80, 24) as keyboard:
        screen = Screen(keyboard, 80, 24)
        settled(screen)
        cells = [cell for row in screen._screen.buffer.values() for cell in row.values()]
        seen = {(cell.fg, cell.bg) for cell in cells} - {("default", "default")}
        grey = {value for pair in seen for value in pair if value != "default"}
        assert all(len({value[at : at + 2] for at in (0, 2, 4)}) == 1 for value in grey), grey


def test_without_a_terminal_one_table_is_printed(fake: FakeJob, top: str) -> None:
    done = ran([top, "4242"], check=True)
    about, total, title, *rows = done.stdout.splitlines()
    assert "16 ranks on 2 nodes, restarts 2: dsl train.py --config a.yaml" in about
    assert total.startswith("14 running, 1 device wait, 1 no process, ")
    assert title.split()[:5] == ["RANK", "HOST", "STATE", "TIME", "CPU%"]
    assert len(rows) == 16
    assert rows[2].endswith("step 12 loss nan")
    assert done.stderr == ""


def test_a_job_that_does_not_exist_is_one_line(top: str) -> None:
    done = ran([top, "1"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dsl-top: error: no job of this user runs on this machine\n"


def test_without_textual_one_line_says_how_to_get_it(
    fake: FakeJob, top: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "textual.py").write_text("raise ImportError('no', name='textual')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with on_screen(top, 80, 24) as keyboard:
        keyboard.showed("pip install textual")
        keyboard.reported("ended 1")
        assert "Traceback" not in keyboard.shown().decode()


# A real job.


@pytest.fixture
def job(tmp_path: Path, helpers: Helpers) -> Iterator[Job]:
    line = helpers.line(
        3, "say 'the only line' note {}/ready '%r %p' pause", None, "--log-dir", str(tmp_path / "logs")
    )
    with running(line, tmp_path) as job:
        job.ready(3)
        yield job


@pytest.mark.needs_package("textual")
def test_a_rank_of_a_real_job_gets_a_signal_and_shows_its_log(job: Job, top: str) -> None:
    pid = job.ready(3)["1"]
    with on_screen(top, 100, 24) as keyboard:
        screen = Screen(keyboard, 100, 24)
        screen.shows("3 sleeping", "? help")
        screen.press(b"\x1b[B")
        screen.press(b"l")
        assert "stdout.log" in screen.shows("log of rank 1", "the only line").replace("\n", "")
        screen.press(b"\x1b")
        screen.shows("3 sleeping", "? help")
        screen.press(b"k")
        screen.shows(f"signal to rank 1 (pid {pid}")
        screen.press(b"\x1b[B" * 4 + b"\r")
        screen.shows("send SIGSTOP to rank 1")
        screen.press(b"\x1b[B\r")
        screen.shows("stopped", "SIGSTOP was sent")
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        os.kill(pid, signal.SIGCONT)


def test_the_last_lines_of_workers_are_known_once_somebody_looks(
    tmp_path: Path, top: str, helpers: Helpers
) -> None:
    line = helpers.line(
        2,
        "catch USR1 note {}/ready '%r %p' await USR1 1 say 'after the signal' pause",
        None,
        "--tag-output",
        "always",
    )
    with running(line, tmp_path) as job:
        pids = job.ready(2)
        until(lambda: subprocess.run([top], capture_output=True, timeout=20, check=False).returncode == 0)
        os.kill(pids["1"], signal.SIGUSR1)

        def said() -> list[str]:
            done = ran([top], check=True)
            return [row.partition("  after")[2] for row in done.stdout.splitlines()[3:]]

        until(lambda: said() == ["", " the signal"], 20)


def test_a_rank_of_another_node_says_its_line_and_gets_its_signal(
    nodes: Nodes, testchild: Path, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    words = [str(testchild), "catch", "USR1", "note", str(ready), "%r %p", "await", "USR1", "1"]
    words += ["say", "it came", "pause"]
    nodes.start(*["--nproc-per-node=2 --tag-output=always"] * 2, program=["--no-python", *words])
    until(lambda: ready.exists() and len(ready.read_text().splitlines()) == 4, 20)
    until(lambda: len(find_sockets(".sock")) == 2)
    job, part = sorted(running_jobs(), key=lambda one: not one.view.is_whole)
    part.close()
    before, _ = job.look("status")
    assert [one.rank for node in before for one in node.ranks] == [0, 1, 2, 3]
    target = before[1].ranks[1]
    assert not job.signal(1, target.local_rank, target.pid + 1, signal.SIGUSR1), (
        "another process in its place"
    )
    assert not job.signal(0, target.local_rank, target.pid, signal.SIGUSR1), "another node"
    assert job.signal(1, target.local_rank, target.pid, signal.SIGUSR1)
    until(
        lambda: [one.said for node in job.look("status")[0] for one in node.ranks] == ["", "", "", "it came"]
    )
    job.close()
