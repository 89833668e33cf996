"""On several hosts no line is lost, torn or given to another rank, and nobody who reads slowly holds the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster
from tests.kit.waiting import until
from tests.support.fleet import SSH, Fleet, Launch, Ways, gone_within
from tests.support.logs import Found, check, is_full

pytestmark = pytest.mark.guarantee("G6")

TOTAL = 100_000
LAUNCHERS = ("ssh", "pdsh", "openmpi5", "mpich5", "slurm")


def numbered(count: int) -> tuple[str, ...]:
    """So many lines of each of six ranks."""
    return ("numbered", "1", str(count), "60", "block", "note", "{}/written", "%r")


@pytest.mark.parametrize("ways", LAUNCHERS, indirect=True)
def test_every_line_of_every_rank_arrives_whole_and_tagged(
    hosts: Cluster, launch: Launch, ways: Ways, testchild: Path
) -> None:
    with launch(numbered(TOTAL // 6), ways, "--tag-output", "always") as job:
        assert job.wait(60) == 0, job.stderr
        gone_within(hosts)
    data = (job.folder / "stdout").read_bytes()
    found = check(testchild.with_name("dsl-linecheck"), _without_tags(data))
    assert found == Found(TOTAL // 6 * 6, 0, 0, 0, 0)


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ways", ["ssh", "pdsh"], indirect=True)
@pytest.mark.parametrize("run", range(10))
def test_three_million_lines_arrive_and_no_fragment_of_one(
    hosts: Cluster, launch: Launch, ways: Ways, testchild: Path, run: int
) -> None:
    """What stands still between a worker's pipe and the console makes no line unfinished."""
    with launch(numbered(500_000), ways, name=f"run{run}") as job:
        assert job.wait(240) == 0, job.stderr
        gone_within(hosts)
    data = (job.folder / "stdout").read_bytes()
    assert check(testchild.with_name("dsl-linecheck"), data) == Found(3_000_000, 0, 0, 0, 0)


def _without_tags(data: bytes) -> bytes:
    """The lines without ``[rank 3] ``, which must name the rank that they begin with."""
    lines = []
    for line in data.split(b"\n")[:-1]:
        tag, _, text = line.partition(b"] ")
        assert tag.removeprefix(b"[rank ").strip() == text.split(b" ", 1)[0], line[:100]
        lines.append(text + b"\n")
    return b"".join(lines)


def test_both_streams_of_a_worker_come_home_apart(hosts: Cluster, launch: Launch) -> None:
    with launch(("say", "out of %r", "complain", "err of %r"), SSH) as job:
        assert job.wait() == 0
        gone_within(hosts)
    assert sorted(job.stdout.splitlines()) == [f"out of {rank}" for rank in range(6)]
    assert sorted(job.stderr.splitlines()) == [f"err of {rank}" for rank in range(6)]


def test_a_silent_worker_shows_what_it_has_said_and_its_line_comes_again_whole(
    hosts: Cluster, launch: Launch
) -> None:
    """For one worker a host, which is not alone all the same."""
    words = (
        *("only", "0", "[", "raw", "loading", "wait", "{}/said", "raw", " done\\n", "touch", "{}/done", "]"),
        *("only", "1", "[", "wait", "{}/shown", "say", "rank %r", "wait", "{}/done", "]"),
    )
    with launch(words, SSH, hosts=hosts.hosts[:2], slots=1) as job:
        until(lambda: job.stdout == "loading")
        (job.folder / "shown").touch()
        until(lambda: job.stdout == "loading\u2026\nrank 1\n")
        (job.folder / "said").touch()
        assert job.wait() == 0
        gone_within(hosts)
    assert job.stdout == "loading\u2026\nrank 1\nloading done\n"


def test_a_stream_that_nobody_sees_holds_up_no_other(hosts: Cluster, launch: Launch) -> None:
    words = ("raw", "x" * 100_000, "complain", "err of %r")
    with launch(words, SSH, stdout=subprocess.DEVNULL) as job:
        assert job.wait() == 0
        gone_within(hosts)
    assert sorted(job.stderr.splitlines()) == [f"err of {rank}" for rank in range(6)]


def test_a_full_disk_under_stdout_is_told_and_fails_the_job(hosts: Cluster, launch: Launch) -> None:
    with open("/dev/full", "wb") as full, launch(("say", "out of %r"), SSH, stdout=full) as job:
        assert job.wait() == 1
        gone_within(hosts)
    said = "warning: cannot write stdout: No space left on device, the job goes on without what does not fit"
    assert job.stderr.splitlines() == [f"dsl: {said}"]


@pytest.mark.parametrize("ways", ["ssh", "pdsh", "openmpi5", "mpich5", "slurm"], indirect=True)
def test_each_host_keeps_the_files_of_its_ranks(hosts: Cluster, launch: Launch, ways: Ways) -> None:
    """In a directory that each host has for itself."""
    words = ("say", "out of %r", "complain", "err of %r")
    folder = f"run/logs-{uuid.uuid4().hex}"
    with launch(words, ways, "--log-dir", f"/{folder}", "--redirects", "3") as job:
        assert job.wait() == 0, job.stderr
        gone_within(hosts)
    for host in hosts:
        texts = [path.read_text() for path in (host.root / folder).rglob("*.log")]
        ranks = (2 * host.index, 2 * host.index + 1)
        assert sorted(texts) == sorted(f"{kind} of {rank}\n" for kind in ("out", "err") for rank in ranks)


class Pipe:
    """Our end of the pipe that is the stdout of a command."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def read(self) -> bytes:
        """Everything, to its end."""
        os.close(self.write_fd)
        with open(self.read_fd, "rb") as file:
            return file.read()

    def close(self) -> None:
        """Nobody will read it."""
        os.close(self.read_fd)
        os.close(self.write_fd)


@pytest.mark.parametrize("pause_s", [0.5, pytest.param(12.0, marks=pytest.mark.stress)])
@pytest.mark.parametrize("ways", ["ssh", "pdsh"], indirect=True)
def test_a_reader_that_stalls_loses_no_line(
    hosts: Cluster, launch: Launch, ways: Ways, testchild: Path, pause_s: float
) -> None:
    pipe = Pipe()
    with launch(numbered(20_000), ways, stdout=pipe.write_fd) as job:
        _is_stalled(job, pipe)
        time.sleep(pause_s)  # it is the reader that pauses, nothing is waited for
        data = pipe.read()
        assert job.wait() == 0
        gone_within(hosts)
    assert check(testchild.with_name("dsl-linecheck"), data) == Found(120_000, 0, 0, 0, 0)


@pytest.mark.parametrize("ways", ["ssh", "pdsh"], indirect=True)
def test_a_reader_that_stalls_holds_up_no_stop(hosts: Cluster, launch: Launch, ways: Ways) -> None:
    words = ("note", "{}/ready", "%r %p", "flood", "64", "100", "4096", "pause")
    pipe = Pipe()
    with launch(words, ways, "--grace", "1", stdout=pipe.write_fd) as job:
        job.ready(6)
        _is_stalled(job, pipe)
        job.process.send_signal(signal.SIGTERM)
        until(lambda: not [one for host in hosts for one in host.strangers() if one.name == "dsl-testchild"])
        assert job.process.poll() is None, "what is left of the output waits for its reader"
        # One that comes before all hosts have told of their end is for the workers, the next is for the output.
        until(lambda: _insist(job))
        assert job.wait() == 143
        gone_within(hosts)
    assert "SIGTERM received: output that nobody has read is lost" in job.stderr
    pipe.close()


@pytest.mark.parametrize("ways", ["ssh", "pdsh"], indirect=True)
def test_a_command_that_is_killed_waits_for_no_reader(hosts: Cluster, launch: Launch, ways: Ways) -> None:
    pipe = Pipe()
    words = ("note", "{}/ready", "%r %p", "flood", "64", "100", "4096", "pause")
    with launch(words, ways, "--grace", "1", stdout=pipe.write_fd) as job:
        job.ready(6)
        _is_stalled(job, pipe)
        job.process.kill()
        job.wait()
        gone_within(hosts)
    pipe.close()


def _insist(job: Fleet) -> bool:
    """One more SIGTERM; true if the command ends of it."""
    job.process.send_signal(signal.SIGTERM)
    return job.ends_within(1)


def _is_stalled(job: Fleet, pipe: Pipe) -> None:
    """Wait until the pipe is full."""
    until(lambda: is_full(pipe.read_fd))
    assert job.process.poll() is None
