"""One run of the `dsl` command, watched from outside through the process table and the files its workers write."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tests.kit import processes
from tests.kit.processes import Process
from tests.kit.waiting import until
from tests.support.command import dsl_line

SCREENS = ("tostop", "background")
"""Terminals that stop whoever writes to them from the background. ``background``: the command is there, too."""

# Makes its stdin the terminal of its session, with the command in the foreground or without, and becomes the command.
_ON_SCREEN = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
settings = termios.tcgetattr(0)
settings[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, settings)
if sys.argv[1] == "background":
    other = os.fork()
    if other == 0:
        signal.pause()
    os.setpgid(other, other)
    os.tcsetpgrp(0, other)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
os.execvp(sys.argv[2], sys.argv[2:])
"""

PROGRAMS = Path(__file__).parent.parent / "workers"
TOKEN = "DSL_TEST_JOB"
"""Variable that every process of one `Job` carries, beside the token of the test."""


class Caught(NamedTuple):
    """One signal that a worker caught, as `dsl-testchild` wrote it to its trace."""

    signum: int
    pid: int
    sender: int
    time_ns: int
    """CLOCK_MONOTONIC."""


class Job:
    """A started `dsl` command; `directory` is where its output goes and where its workers write.

    With a ``screen``, one of `SCREENS`, its streams are a terminal.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        environ: Mapping[str, str] | None = None,
        screen: str | None = None,
    ) -> None:
        self.directory = directory
        self.token = uuid.uuid4().hex
        self.stdout_path = directory / "stdout"
        self.stderr_path = directory / "stderr"
        self.begin = time.monotonic()
        environ = {**os.environ, **(environ or {}), TOKEN: self.token}
        with contextlib.ExitStack() as open_files:
            if screen is None:
                stdin = subprocess.DEVNULL
                stdout: int | BinaryIO = open_files.enter_context(self.stdout_path.open("wb"))
                stderr: int | BinaryIO = open_files.enter_context(self.stderr_path.open("wb"))
            else:
                self.stderr_path = self.stdout_path
                stdin = stdout = stderr = self._open_screen()
                open_files.callback(os.close, stdin)
                command = [sys.executable, "-c", _ON_SCREEN, screen, *command]
            self.process = subprocess.Popen(
                list(command), stdin=stdin, stdout=stdout, stderr=stderr, env=environ, start_new_session=True
            )

    def _open_screen(self) -> int:
        """A terminal whose content goes to the file of our stdout; what the command has of it."""
        ours, theirs = pty.openpty()

        def show() -> None:
            # The end of a terminal is an error.
            with self.stdout_path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(os.read(ours, 1 << 16))
            os.close(ours)

        threading.Thread(target=show, daemon=True).start()
        return theirs

    @property
    def guard(self) -> int:
        """pid of the command itself."""
        return self.process.pid

    def agent(self) -> int:
        """pid of the guard's child that supervises the workers."""
        return until(lambda: [pid for pid in processes.children(self.guard) if not is_delegate(pid)])[0]

    def ready(self, count: int, timeout_s: float = 20.0) -> dict[str, int]:
        """Wait for `count` lines ``name pid`` in the ready file; {name: pid}."""
        path = self.directory / "ready"

        def lines() -> list[str]:
            if self.process.poll() is not None:
                msg = f"the command ended with {self.process.returncode} too early: {self.stderr()}"
                raise AssertionError(msg)
            return complete_lines(path)

        until(lambda: len(lines()) >= count, timeout_s)
        return {name: int(pid) for name, pid in (line.split() for line in lines())}

    def caught(self, name: str = "trace") -> list[Caught]:
        """Signals in a trace file, in the order in which they were caught."""
        return [Caught(*map(int, line.split())) for line in complete_lines(self.directory / name)]

    def counts(self, name: str = "trace") -> dict[int, Counter[int]]:
        """{pid: how often it caught each signal}."""
        counts: dict[int, Counter[int]] = {}
        for one in self.caught(name):
            counts.setdefault(one.pid, Counter())[one.signum] += 1
        return counts

    def wait(self, timeout_s: float = 20.0) -> int:
        """Exit code as a shell shows it to `subprocess` (-n for a signal that ended the command itself)."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            left = ", ".join(f"{one.pid} {one.name} {one.state}" for one in self.left()[:20])
            msg = f"still running after {timeout_s} s; its processes: {left}; stderr: {self.stderr()}"
            raise AssertionError(msg) from None

    def left(self) -> list[Process]:
        """Living processes of the job."""
        return processes.carrying(f"{TOKEN}={self.token}")

    def stdout(self) -> str:
        """What the command and its workers wrote to stdout so far."""
        return self.stdout_path.read_text(errors="replace")

    def stderr(self) -> str:
        """What the command and its workers wrote to stderr so far."""
        return self.stderr_path.read_text(errors="replace")

    def destroy(self) -> None:
        """SIGKILL to all that carries the token, until nothing does."""
        deadline = time.monotonic() + 10
        while (left := self.left()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.005)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def complete_lines(path: Path) -> list[str]:
    """Lines of a file that others are writing, without one that has only begun; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def is_delegate(pid: int) -> bool:
    """Whether it is one of a rendezvous, or that of a test, or has gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return True
    return "fake_delegate.py" in "".join(words[1:2]) or "".join(words[3:4]).startswith("dsl.rendezvous")


def started_program(name: str, *arguments: str, token: str = "") -> subprocess.Popen[str]:
    """A program of `tests/workers`, which all that it starts can be told by."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, TOKEN: token},
    )


@contextlib.contextmanager
def running(
    command: Sequence[str],
    directory: Path,
    *,
    environ: Mapping[str, str] | None = None,
    screen: str | None = None,
) -> Iterator[Job]:
    """A `Job` for the time of a ``with`` block; nothing of it outlives the block."""
    directory.mkdir(parents=True, exist_ok=True)
    job = Job(command, directory, environ=environ, screen=screen)
    try:
        yield job
    finally:
        job.destroy()


class Helpers:
    """Jobs of the helper program: ``with helpers(2, "note {}/ready '%r %p' pause", 1.0) as job``."""

    def __init__(self, dsl: Path, program: Path, folder: Path) -> None:
        self._dsl = dsl
        self._program = str(program)
        self._folder = folder

    def line(
        self, workers: int, words: str | Sequence[str], grace_s: float | None = None, *options: str
    ) -> list[str]:
        """A command line. ``words``: those of the program, or a text of them, in which ``{}`` is the test's directory."""
        if isinstance(words, str):
            words = shlex.split(words.replace("{}", str(self._folder)))
        return dsl_line(self._dsl, workers, [self._program, *words], grace_s, *options)

    def __call__(
        self, workers: int, words: str | Sequence[str], *more: Any, **how: Any
    ) -> AbstractContextManager[Job]:
        """A job in the test's directory. ``more``: see `line`, ``how``: see `running`."""
        return running(self.line(workers, words, *more), self._folder, **how)


def states(pids: Iterable[int]) -> set[str]:
    """Letters of the states of processes."""
    found = [processes.find(pid) for pid in pids]
    return {process.state if process else "gone" for process in found}


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """The end of a pipe that takes no more, and that nobody reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    try:
        yield write
    finally:
        os.close(read)
        os.close(write)


def is_still(pid: int, thread_name: str | None = None, look_s: float = 0.2) -> bool:
    """Whether the threads did not run between two looks: what polls, or never sleeps, is never still."""
    before = processes.processor_ns(pid, thread_name)
    time.sleep(look_s)
    return processes.processor_ns(pid, thread_name) == before


def install_plug_in(folder: Path, package: str, group: str, entry: str, text: str) -> None:
    """Make a package of one module with an entry point. Python finds it like an installed package."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    (folder / f"{package}.py").write_text(text)
