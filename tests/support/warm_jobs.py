"""Jobs whose workers leave processes that are hard to find, on a warm server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.kit import processes
from tests.kit.processes import Process
from tests.kit.waiting import until
from tests.support.arena import Arena
from tests.support.warm import Place, command_line

# Named as secrets are, so that each job may have its own and all have one server.
COOKIE = "WARM_JOB_TOKEN"
GONE_S = 20.0
"""Until nothing of a job may be left."""

# It leaves processes that have a session of their own, no parent and no environment, and ignore SIGTERM. They note the
# cookie of their job in their command line. All processes of a worker hold a lock: one that changes its pid all the time
# is missed in the process table, but not in the kernel's count of those who have a file open.
WORKER = """
import fcntl, os, signal, sys, textwrap, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
cookie, rank = os.environ["WARM_JOB_TOKEN"], os.environ["RANK"]
lock = os.open(f"held.{cookie}.{rank}", os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
os.set_inheritable(lock, True)
for number, words in enumerate(DAEMONS):
    words = ["ignore", "TERM", "touch", f"left.{cookie}.{rank}.{number}", *words]
    child = os.posix_spawn(TESTCHILD, [TESTCHILD, "--" + cookie, "daemon", "[", *words, "]"], {})
    os.waitpid(child, 0)
open(f"ready.{cookie}.{rank}", "w").write(f"{os.getpid()} {os.getppid()}")
while not os.path.exists(f"go.{cookie}"):
    time.sleep(0.01)
raise SystemExit
"""
PAUSES = ["pause"]
HOPS = ["hop", "1500", "1000"]
"""It is another process every millisecond, for some seconds, and then pauses. A process that is stopped reaps none of them."""


def write_worker(folder: Path, testchild: Path, *daemons: list[str]) -> None:
    """The program of the workers, which leave these daemons."""
    text = f"TESTCHILD, DAEMONS = {str(testchild)!r}, {daemons!r}\n{WORKER}"
    (folder / "train.py").write_text(text)


class Job:
    """A job of two workers. Each worker leaves a process behind that is hard to find."""

    def __init__(self, place: Place, folder: Path, inside: Arena | None = None) -> None:
        self.cookie = uuid.uuid4().hex
        self.folder = folder
        self.process = self._start(place, inside)

    def _start(self, place: Place, inside: Arena | None) -> subprocess.Popen[bytes]:
        line = place.command("--grace=2", "train.py", workers=2)
        more = {COOKIE: self.cookie}
        if inside is not None:
            line = inside.inside(line)
            more["DSL_ENGINE_DISABLE"] = "cgroup"
        with (self.folder / f"said.{self.cookie}").open("w") as said:
            return subprocess.Popen(
                line,
                cwd=self.folder,
                env=place.environ(more),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    def ready(self) -> list[tuple[int, int]]:
        """Pids of the workers that run with all that they leave, and of their parents."""
        found = [self.folder / f"ready.{self.cookie}.{rank}" for rank in range(2)]
        left = [self.folder / f"left.{self.cookie}.{rank}.0" for rank in range(2)]

        def all_there() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(self.said())
            return all(path.exists() for path in left) and all(
                path.exists() and path.read_text() for path in found
            )

        until(all_there, 30)
        return [(int(pid), int(parent)) for pid, parent in (path.read_text().split() for path in found)]

    def branches(self) -> list[int]:
        """The processes that have forked the workers, in the order of the ranks."""
        return list(dict.fromkeys([parent for _, parent in self.ready()]))

    @property
    def guard(self) -> int:
        return self.process.pid

    @property
    def agent(self) -> int:
        return until(lambda: processes.children(self.process.pid))[0]

    def go(self) -> int:
        """Let the workers end; the exit code."""
        (self.folder / f"go.{self.cookie}").touch()
        return self.process.wait(40)

    def left(self) -> list[Process]:
        """Everything of the job that runs."""
        found = processes.carrying(f"{COOKIE}={self.cookie}")
        for pid in processes.every_pid():
            if self.cookie in command_line(pid):
                process = processes.find(pid)
                if process is not None and process.state not in "ZX":
                    found.append(process)
        return found

    def is_held(self) -> bool:
        """Whether a process of the job runs, by its lock."""
        for path in self.folder.glob(f"held.{self.cookie}.*"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        return False

    def said(self) -> str:
        return (self.folder / f"said.{self.cookie}").read_text()

    def close(self) -> None:
        """End what a failed test has left."""
        self.process.kill()
        self.process.wait()

        def ended() -> bool:
            for one in self.left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            return not self.is_held()

        until(ended, 30)


@contextlib.contextmanager
def running(place: Place, folder: Path, inside: Arena | None = None) -> Iterator[Job]:
    job = Job(place, folder, inside)
    try:
        yield job
    finally:
        job.close()


def warmed(place: Place, folder: Path, inside: Arena | None = None) -> int:
    """The server, which has served a job. One that has read files of this very moment serves no second job."""

    def served() -> bool:
        with running(place, folder, inside) as job:
            job.ready()
            assert job.go() == 0, job.said()
        return bool(place.told())

    until(served, 40)
    return place.server().pid


def gone(job: Job) -> None:
    until(lambda: not job.is_held() and not job.left(), GONE_S)


def serves(place: Place, folder: Path, server: int) -> None:
    """The server has survived and serves another job."""
    with running(place, folder) as job:
        for pid in job.branches():
            branch = processes.find(pid)
            assert branch is not None
            assert branch.ppid == server
        assert job.go() == 0, job.said()
        gone(job)
    assert place.server().pid == server
