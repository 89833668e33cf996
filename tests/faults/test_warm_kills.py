"""Warm server, its branch, agent or guard are killed or stopped: nothing of the job is left, and nobody else is harmed."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import processes
from kit.processes import Process
from kit.waiting import until
from tests.support.arena import Arena
from tests.support.bystanders import Bystanders
from tests.support.warm import Place, command_line

pytestmark = [pytest.mark.guarantee("G1"), pytest.mark.timeout(900)]

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
        line = place.command("train.py", workers=2)
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

    def branch(self) -> int:
        """The process that has forked the workers."""
        [parent] = {parent for _, parent in self.ready()}
        return parent

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


@pytest.fixture
def place(tmp_path: Path, testchild: Path) -> Iterator[Place]:
    write_worker(tmp_path, testchild, PAUSES)
    with Place() as place:
        yield place


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
        branch = processes.find(job.branch())
        assert branch is not None
        assert branch.ppid == server
        assert job.go() == 0, job.said()
        gone(job)
    assert place.server().pid == server


def test_a_server_that_is_killed_before_a_job_is_replaced(place: Place, tmp_path: Path) -> None:
    server = warmed(place, tmp_path)
    os.kill(server, signal.SIGKILL)
    until(lambda: processes.find(server) is None)
    with running(place, tmp_path) as job:
        job.ready()
        assert job.go() == 0, job.said()
    assert place.server().pid != server


def test_a_server_that_is_stopped_before_a_job_holds_it_up_for_seconds(place: Place, tmp_path: Path) -> None:
    server = warmed(place, tmp_path)
    os.kill(server, signal.SIGSTOP)
    try:
        begin_s = time.monotonic()
        with running(place, tmp_path) as job:
            job.ready()
            took_s = time.monotonic() - begin_s
            assert job.go() == 0
            lines = [line for line in job.said().splitlines() if "fork server" in line]
        assert took_s < 20
        assert len(lines) <= 2, lines
    finally:
        os.kill(server, signal.SIGCONT)
    serves(place, tmp_path, server)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_struck_during_a_job_does_no_harm(
    place: Place, tmp_path: Path, number: signal.Signals
) -> None:
    server = warmed(place, tmp_path)
    with running(place, tmp_path) as job:
        workers = [pid for pid, _ in job.ready()]
        os.kill(server, number)
        assert all(processes.find(pid) for pid in workers)
        assert job.go() == 0, job.said()
        gone(job)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGCONT)
    with running(place, tmp_path) as job:
        job.ready()
        assert job.go() == 0, job.said()
        gone(job)


def test_a_branch_that_is_killed_ends_its_job_and_leaves_nobody(place: Place, tmp_path: Path) -> None:
    server = warmed(place, tmp_path)
    with running(place, tmp_path) as job:
        os.kill(job.branch(), signal.SIGKILL)
        assert job.process.wait(30) != 0
        gone(job)
        assert "was killed by SIGKILL: its workers died with it" in job.said()
        assert "may be left" not in job.said()
    serves(place, tmp_path, server)


def test_daemons_that_change_their_pid_end_with_the_job(place: Place, tmp_path: Path, testchild: Path, net: Arena) -> None:
    write_worker(tmp_path, testchild, PAUSES, HOPS, HOPS)
    for _ in range(3):
        with running(place, tmp_path, net) as job:
            job.ready()
            job.go()
            assert not job.is_held(), job.said()
            assert "may be left" not in job.said()


def test_a_server_that_is_stopped_ends_what_its_killed_branch_has_left(place: Place, tmp_path: Path, net: Arena) -> None:
    server = warmed(place, tmp_path, net)
    with running(place, tmp_path, net) as job:
        branch = job.branch()
        os.kill(server, signal.SIGSTOP)
        os.kill(branch, signal.SIGKILL)
        assert job.process.wait(30) != 0
        assert not job.is_held(), job.said()
        assert "was killed by SIGKILL" in job.said()
        assert "may be left" not in job.said()


@pytest.mark.parametrize("others", ["", "agent"])
def test_what_nobody_can_prove_to_have_ended_is_said(place: Place, tmp_path: Path, net: Arena, others: str) -> None:
    """The guard says it if the agent was killed, too."""
    server = warmed(place, tmp_path, net)
    with running(place, tmp_path, net) as job:
        struck = [job.agent] if others else []
        struck += [job.branch(), server]
        # None of them can react to the death of another one.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in struck:
                os.kill(pid, number)
        assert job.process.wait(30) != 0
        (line,) = [line for line in job.said().splitlines() if "may be left" in line]
        assert "the fork server that would end them is gone or does not answer" in line


@pytest.mark.parametrize("struck", ["agent", "guard", "agent guard"])
@pytest.mark.parametrize("branch", ["runs", "is stopped"])
def test_a_command_that_is_killed_leaves_nobody(
    place: Place, tmp_path: Path, struck: str, branch: str, bystanders: Bystanders
) -> None:
    server = warmed(place, tmp_path)
    with running(place, tmp_path) as job:
        job.ready()
        if branch == "is stopped":
            os.kill(job.branch(), signal.SIGSTOP)
        for pid in [getattr(job, name) for name in struck.split()]:
            os.kill(pid, signal.SIGKILL)
        job.process.wait(30)
        gone(job)
    serves(place, tmp_path, server)
    assert bystanders.harm() == []


def test_of_two_jobs_on_one_server_the_other_goes_on(place: Place, tmp_path: Path) -> None:
    server = warmed(place, tmp_path)
    for target in ("agent", "guard", "branch"):
        with running(place, tmp_path) as one, running(place, tmp_path) as other:
            one.ready()
            workers = [pid for pid, _ in other.ready()]
            os.kill(one.branch() if target == "branch" else getattr(one, target), signal.SIGKILL)
            one.process.wait(30)
            gone(one)
            assert len(other.left()) >= 4
            assert all(processes.find(pid) for pid in workers)
            assert other.go() == 0, other.said()
            gone(other)
    serves(place, tmp_path, server)


STRIKES = (
    *("kill agent", "kill guard", "kill agent guard", "kill branch", "kill agent branch", "kill server"),
    *("kill branch server", "kill agent branch server", "kill guard branch server", "stop branch, kill agent"),
    *("stop server, kill branch", "stop server branch, kill agent", "stop branch, kill server", "stop branch server"),
)
"""What is done to which processes of a warm job, all at once. Guard and agent together tell nothing more."""


def _strike(strikes: str, place: Place, job: Job) -> list[int]:
    """Returns the pids of those that were stopped."""
    servers = place.servers()
    pids = [one.pid for one in servers]
    branches = [one.pid for one in servers if one.ppid in pids]
    struck = {
        "agent": processes.children(job.guard)[:1],
        "guard": [job.guard],
        "branch": branches,
        "server": [pid for pid in pids if pid not in branches],
    }
    stopped = []
    for strike in strikes.split(", "):
        verb, *names = strike.split()
        for pid in [pid for name in names for pid in struck[name]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if verb == "stop" else signal.SIGKILL)
            stopped += [pid] if verb == "stop" else []
    return stopped


def _end(job: Job, strikes: str, stopped: list[int]) -> str:
    """``gone``, ``said`` if something may be left and the command says so, else a fault."""
    (job.folder / f"go.{job.cookie}").touch()
    code = job.process.wait(60)
    try:
        gone(job)
    except AssertionError:
        if "may be left" in job.said() and "branch" in strikes and "server" in strikes and code:
            return "said"
        return f"code {code}, stopped {stopped}, left {job.left()}, held {job.is_held()}: {job.said()}"
    return "gone"


@pytest.mark.parametrize("runs", [14, pytest.param(200, marks=pytest.mark.stress)])
@pytest.mark.timeout(7200)
def test_kills_at_random_moments_leave_nobody_or_say_so(
    place: Place, tmp_path: Path, testchild: Path, net: Arena, bystanders: Bystanders, runs: int
) -> None:
    """No control group helps, and each worker has a daemon that changes its pid all the time."""
    write_worker(tmp_path, testchild, PAUSES, HOPS)
    warmed(place, tmp_path, net)
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    faults = []
    for run in range(runs):
        dice = random.Random(run)
        strikes = STRIKES[run % len(STRIKES)]
        with running(place, tmp_path, net) as job:
            if dice.random() < 0.7:
                with contextlib.suppress(AssertionError):
                    job.ready()
            time.sleep(dice.random() * 0.2)  # the moment is what is tried
            stopped = _strike(strikes, place, job)
            end = _end(job, strikes, stopped)
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        found[strikes, end if end in ("gone", "said") else "fault"] += 1
        if end not in ("gone", "said"):
            faults.append(f"run {run}: {strikes}: {end}")
    for (strikes, end), count in sorted(found.items()):
        print(f"{strikes:32} {end:5} {count}")
    faults += bystanders.harm()
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("jobs", [50, pytest.param(1000, marks=pytest.mark.stress)])
def test_many_jobs_leave_a_server_as_it_was(place: Place, tmp_path: Path, jobs: int) -> None:
    (tmp_path / "short.py").write_text("import textwrap\n")

    def run(count: int) -> None:
        for _ in range(count):
            done = place.run("short.py", cwd=tmp_path)
            assert done.returncode == 0, done.stderr

    run(10)
    server = place.server().pid
    files, memory = until(lambda: _settled_files(server)), _memory(server)
    run(jobs)
    assert place.server().pid == server
    assert until(lambda: _settled_files(server)) == files
    assert _memory(server) < memory + (1 << 20)


def _settled_files(pid: int) -> list[str]:
    """What a server has open beside calls; nothing while the call is open that it has just answered."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}").partition(":")[0])
        except FileNotFoundError:
            return []
    return sorted(found) if found.count("socket") == 1 else []


def _memory(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous"))
