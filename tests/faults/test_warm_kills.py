"""Warm server, its branch, agent or guard are killed or stopped: nothing of the job is left, and nobody else is harmed."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.arena import Arena
from tests.support.bystanders import Bystanders
from tests.support.warm import Place
from tests.support.warm_jobs import HOPS, PAUSES, Job, gone, running, serves, warmed, write_worker

pytestmark = [pytest.mark.guarantee("G1"), pytest.mark.timeout(900)]


@pytest.fixture(params=["1", "2"])
def place(
    tmp_path: Path, testchild: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Place]:
    """With so many branches that fork the two workers of a job."""
    monkeypatch.setenv("DSL_ENGINE_FORKERS", request.param)
    write_worker(tmp_path, testchild, PAUSES)
    with Place() as place:
        yield place


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
        os.kill(job.branches()[0], signal.SIGKILL)
        assert job.process.wait(30) != 0
        gone(job)
        assert "was killed by SIGKILL: its workers died with it" in job.said()
        assert "may be left" not in job.said()
    serves(place, tmp_path, server)


def test_daemons_that_change_their_pid_end_with_the_job(
    place: Place, tmp_path: Path, testchild: Path, net: Arena
) -> None:
    write_worker(tmp_path, testchild, PAUSES, HOPS, HOPS)
    for _ in range(3):
        with running(place, tmp_path, net) as job:
            job.ready()
            job.go()
            assert not job.is_held(), job.said()
            assert "may be left" not in job.said()


def test_a_server_that_is_stopped_ends_what_its_killed_branch_has_left(
    place: Place, tmp_path: Path, net: Arena
) -> None:
    server = warmed(place, tmp_path, net)
    with running(place, tmp_path, net) as job:
        branch = job.branches()[0]
        os.kill(server, signal.SIGSTOP)
        os.kill(branch, signal.SIGKILL)
        assert job.process.wait(30) != 0
        assert not job.is_held(), job.said()
        assert "was killed by SIGKILL" in job.said()
        assert "may be left" not in job.said()


def test_a_guard_continues_server_and_branch_of_an_agent_that_was_killed(
    place: Place, tmp_path: Path, net: Arena, bystanders: Bystanders
) -> None:
    server = warmed(place, tmp_path, net)
    with running(place, tmp_path, net) as job:
        for pid in (server, *job.branches()):
            os.kill(pid, signal.SIGSTOP)
        os.kill(job.agent, signal.SIGKILL)
        assert job.process.wait(30) == 137
        assert not job.is_held(), job.said()
        assert "may be left" not in job.said()
    assert place.server().pid == server
    assert bystanders.harm() == []


@pytest.mark.parametrize("others", ["", "agent"])
def test_what_nobody_can_prove_to_have_ended_is_said(
    place: Place, tmp_path: Path, net: Arena, others: str
) -> None:
    """The guard says it if the agent was killed, too."""
    server = warmed(place, tmp_path, net)
    with running(place, tmp_path, net) as job:
        struck = [job.agent] if others else []
        struck += [*job.branches(), server]
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
            for pid in job.branches():
                os.kill(pid, signal.SIGSTOP)
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
            os.kill(one.branches()[-1] if target == "branch" else getattr(one, target), signal.SIGKILL)
            one.process.wait(30)
            gone(one)
            assert len(other.left()) >= 4
            assert all(processes.find(pid) for pid in workers)
            assert other.go() == 0, other.said()
            gone(other)
    serves(place, tmp_path, server)


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


STRIKES = (
    *("kill agent", "kill guard", "kill agent guard", "kill branch", "kill agent branch", "kill server"),
    *(
        "kill branch server",
        "kill agent branch server",
        "kill guard branch server",
        "stop branch, kill agent",
    ),
    *(
        "stop server, kill branch",
        "stop server branch, kill agent",
        "stop branch, kill server",
        "stop branch server",
    ),
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
    found, faults = _campaign(place, tmp_path, net, runs)
    for (strikes, end), count in sorted(found.items()):
        print(f"{strikes:32} {end:5} {count}")
    faults += bystanders.harm()
    assert not faults, "\n".join(faults)


def _campaign(
    place: Place, folder: Path, net: Arena, runs: int
) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """How often each strike ended in which way, and the faults."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    faults = []
    for run in range(runs):
        dice = random.Random(run)
        strikes = STRIKES[run % len(STRIKES)]
        with running(place, folder, net) as job:
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
    return found, faults
