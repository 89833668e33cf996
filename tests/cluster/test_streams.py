"""G6 on several hosts: no line is lost, torn or given to another rank, and nobody who reads slowly holds the end."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import termios
from typing import TYPE_CHECKING

import pytest
from kit.waiting import until
from tests.support.fleet import SSH, Fleet, Launch, Ways, gone_within
from tests.support.logs import Found, check

if TYPE_CHECKING:
    from pathlib import Path

    from kit.cluster import Cluster

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


def _without_tags(data: bytes) -> bytes:
    """The lines without ``[rank3]: ``, which must fit the rank that they begin with."""
    lines = []
    for line in data.splitlines(keepends=True):
        tag, _, text = line.partition(b" ")
        assert tag.strip(b"[]:").endswith(text.split(b" ", 1)[0]), line[:100]
        lines.append(text)
    return b"".join(lines)


def test_both_streams_of_a_worker_come_home_apart(hosts: Cluster, launch: Launch) -> None:
    with launch(("say", "out of %r", "complain", "err of %r"), SSH) as job:
        assert job.wait() == 0
        gone_within(hosts)
    assert sorted(job.stdout.splitlines()) == [f"out of {rank}" for rank in range(6)]
    assert sorted(job.stderr.splitlines()) == [f"err of {rank}" for rank in range(6)]


@pytest.mark.parametrize("ways", ["ssh", "pdsh", "openmpi5", "mpich5", "slurm"], indirect=True)
def test_each_host_keeps_the_files_of_its_ranks(hosts: Cluster, launch: Launch, ways: Ways) -> None:
    """In a directory that each host has for itself."""
    words = ("say", "out of %r", "complain", "err of %r")
    with launch(words, ways, "--log-dir", "/run/logs", "--redirects", "3") as job:
        assert job.wait() == 0, job.stderr
        gone_within(hosts)
    for host in hosts:
        texts = [path.read_text() for path in (host.root / "run/logs").rglob("*.log")]
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


@pytest.mark.parametrize("ways", ["ssh", "pdsh"], indirect=True)
def test_a_reader_that_stalls_loses_no_line(
    hosts: Cluster, launch: Launch, ways: Ways, testchild: Path
) -> None:
    pipe = Pipe()
    with launch(numbered(2000), ways, stdout=pipe.write_fd) as job:
        _is_stalled(job, pipe)
        data = pipe.read()
        assert job.wait() == 0
        gone_within(hosts)
    assert check(testchild.with_name("dsl-linecheck"), data) == Found(12_000, 0, 0, 0, 0)


@pytest.mark.parametrize("ways", ["ssh", "pdsh"], indirect=True)
def test_a_reader_that_stalls_holds_up_no_stop(hosts: Cluster, launch: Launch, ways: Ways) -> None:
    words = ("note", "{}/ready", "%r %p", "flood", "64", "100", "4096", "pause")
    pipe = Pipe()
    with launch(words, ways, "--grace", "1", stdout=pipe.write_fd) as job:
        job.ready(6)
        _is_stalled(job, pipe)
        job.process.send_signal(signal.SIGTERM)
        job.until_said("stopped by dsl")
        workers_are_gone = gone_within(hosts.hosts[1:])
        job.process.send_signal(signal.SIGTERM)  # who waits for a reader that never comes may say so
        assert job.wait() == 143
        gone_within(hosts)
    assert workers_are_gone < 5
    os.close(pipe.read_fd)
    os.close(pipe.write_fd)


def _is_stalled(job: Fleet, pipe: Pipe) -> None:
    """Wait until the pipe is full."""
    size = fcntl.fcntl(pipe.read_fd, fcntl.F_GETPIPE_SZ)
    until(lambda: _waiting(pipe.read_fd) > size - 4096)
    assert job.process.poll() is None


def _waiting(fd: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]
