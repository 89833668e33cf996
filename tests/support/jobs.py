"""One run of the `dsl` command, watched from outside through the process table and the files its workers write."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

from kit import processes
from kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kit.processes import Process

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
    """A started `dsl` command; `directory` is where its output goes and where its workers write."""

    def __init__(
        self, command: Sequence[str], directory: Path, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        self.token = uuid.uuid4().hex
        self.stdout_path = directory / "stdout"
        self.stderr_path = directory / "stderr"
        self.begin = time.monotonic()
        with self.stdout_path.open("wb") as stdout, self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **(environ or {}), TOKEN: self.token},
                start_new_session=True,
            )

    @property
    def guard(self) -> int:
        """pid of the command itself."""
        return self.process.pid

    def agent(self) -> int:
        """pid of the guard's child that supervises the workers."""
        return until(lambda: processes.children(self.guard))[0]

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


@contextlib.contextmanager
def running(
    command: Sequence[str], directory: Path, *, environ: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """A `Job` for the time of a ``with`` block; nothing of it outlives the block."""
    directory.mkdir(parents=True, exist_ok=True)
    job = Job(command, directory, environ=environ)
    try:
        yield job
    finally:
        job.destroy()
