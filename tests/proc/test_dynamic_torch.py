"""Nodes that come and go through torch's rendezvous, as several commands on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.jobs import Job, complete_lines, running

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

WORKER = """#!/bin/sh
echo "$RANK/$WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON" >> "$1/seen"
until [ -e "$1/end" ]; do
  [ ! -e "$1/fail.$RANK.$TORCHELASTIC_RESTART_COUNT" ] || exit 7
  sleep 0.02
done
"""
PATIENCE_S = 60


class Nodes:
    """Commands that have one store, and what their workers have written."""

    def __init__(self, dslrun: Path, directory: Path, stack: contextlib.ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        self._dslrun = dslrun
        self._stack = stack
        self.directory = directory
        self.program = directory / "worker"
        self.program.write_text(WORKER)
        self.program.chmod(0o755)

    def start(self, name: str, place: int, *options: str, nodes: str = "1:2", run_id: str = "job") -> Job:
        """Start a command; its place among the others is that of its address."""
        words = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint]
        words += ["--rdzv-id", run_id, "--local-addr", f"127.0.0.{place}", "--grace", "2"]
        words += ["--rdzv-conf", "last_call_timeout=2,join_timeout=30,read_timeout=15", *options]
        line = [str(self._dslrun), *words, "--no-python", str(self.program), str(self.directory)]
        return self._stack.enter_context(running(line, self.directory / name))

    def seen(self, *lines: str) -> None:
        """Wait until workers have written these lines."""
        path = self.directory / "seen"
        until(lambda: all(complete_lines(path).count(one) >= lines.count(one) for one in lines), PATIENCE_S)

    def touch(self, name: str) -> None:
        """Let workers find a file."""
        (self.directory / name).touch()


@pytest.fixture
def nodes(dslrun: Path, tmp_path: Path) -> Iterator[Nodes]:
    """No node yet."""
    with contextlib.ExitStack() as stack:
        yield Nodes(dslrun, tmp_path, stack)


def agent_of(job: Job) -> int:
    """The child of the guard that is no delegate."""

    def found() -> list[int]:
        return [pid for pid in processes.children(job.guard) if b"dsl.rendezvous" not in _words(pid)]

    return until(found)[0]


def _words(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b"dsl.rendezvous"


def test_a_job_grows_restarts_shrinks_and_ends_well(nodes: Nodes) -> None:
    """1, 2, 1 nodes; the restart is counted on both, the others on none."""
    a = nodes.start("a", 1, "--max-restarts", "2")
    nodes.seen("0/1 0 start")
    b = nodes.start("b", 2, "--max-restarts", "2")
    nodes.seen("0/2 0 membership", "1/2 0 membership")
    nodes.touch("fail.1.0")
    nodes.seen("0/2 1 failure", "1/2 1 failure")
    os.kill(b.guard, signal.SIGTERM)
    assert b.wait(PATIENCE_S) == 143
    nodes.seen("0/1 1 membership")
    nodes.touch("end")
    assert a.wait(PATIENCE_S) == 0
    said = [job.stderr() for job in (a, b)]
    assert all("restart 1 of 2: rank 1 on host" in one for one in said), said
    # Both are on a host of one name.
    assert f"node {os.uname().nodename} has left the job" in said[0]
    assert "have missed this one" not in said[0]


@pytest.mark.guarantee("G3")
def test_a_store_at_a_torchrun_that_ends_well_is_not_missed(nodes: Nodes) -> None:
    """All is well, and nothing else is said."""
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.endpoint}", "--rdzv-id=job"]
    words += ["--local-addr=127.0.0.9", "--no-python", str(nodes.program), str(nodes.directory)]
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: listens(nodes.endpoint), PATIENCE_S)
        ours = nodes.start("a", 1, nodes="2")
        nodes.seen("0/2 0 start")
        nodes.touch("end")
        assert [ours.wait(PATIENCE_S), torchrun.wait(PATIENCE_S)] == [0, 0]
    finally:
        torchrun.kill()
        torchrun.wait()
    assert "the store" not in ours.stderr()


def listens(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("victim", ["agent", "guard"])
def test_the_others_go_on_without_a_node_that_was_killed_and_nothing_of_it_is_left(
    victim: str, nodes: Nodes
) -> None:
    """The first node holds the store: the other one is killed."""
    a = nodes.start("a", 1)
    nodes.seen("0/1 0 start")
    b = nodes.start("b", 2)
    nodes.seen("0/2 0 membership", "1/2 0 membership")
    os.kill(b.guard if victim == "guard" else agent_of(b), signal.SIGKILL)
    assert b.wait(PATIENCE_S) == (-9 if victim == "guard" else 137)
    until(lambda: not b.left(), 8)
    nodes.seen("0/1 0 membership")
    nodes.touch("end")
    assert a.wait(PATIENCE_S) == 0


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("count, restarts", [("2", "0"), ("1:2", "0"), ("2", "1")])
def test_a_final_failure_ends_both_nodes_with_its_code(count: str, restarts: str, nodes: Nodes) -> None:
    options = ("--max-restarts", restarts)
    jobs = [nodes.start(name, place, *options, nodes=count) for place, name in enumerate("ab", 1)]
    for failed in range(int(restarts) + 1):
        reason = "failure" if failed else "start"
        nodes.seen(f"0/2 {failed} {reason}", f"1/2 {failed} {reason}")
        nodes.touch(f"fail.0.{failed}")
    assert [job.wait(PATIENCE_S) for job in jobs] == [7, 7]
    said = [job.stderr() for job in jobs]
    assert any("the job is over: rank 0 on host" in text for text in said), said
    assert any("rank 0 (local rank 0, pid" in text for text in said), said


def test_a_node_that_has_finished_waits_for_the_other(nodes: Nodes) -> None:
    ends_first = 'if [ "$RANK" = 0 ]; then exit 0; fi\n'
    nodes.program.write_text(WORKER.replace("until", ends_first + "until"))
    jobs = [nodes.start(name, place, nodes="2") for place, name in enumerate("ab", 1)]
    nodes.seen("0/2 0 start", "1/2 0 start")
    until(lambda: any("waiting for the other nodes" in job.stderr() for job in jobs), PATIENCE_S)
    nodes.touch("end")
    assert [job.wait(PATIENCE_S) for job in jobs] == [0, 0]


CALL = """
import os, sys
from dsl.functions.launcher import LaunchConfig, elastic_launch

def train(directory):
    names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    rank, size, restarts = [os.environ[name] for name in names]
    if rank == "1" and restarts == "0":
        raise ValueError("once")
    return f"{rank}/{size} {restarts}"

if __name__ == "__main__":
    endpoint, address = sys.argv[1:]
    config = LaunchConfig(
        2, 2, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint=endpoint, local_addr=address, max_restarts=1
    )
    print(elastic_launch(config, train)("x"))
"""


def test_functions_on_two_nodes_have_results_of_the_same_attempt(nodes: Nodes, tmp_path: Path) -> None:
    script = tmp_path / "call.py"
    script.write_text(CALL)
    with contextlib.ExitStack() as stack:
        jobs = []
        for place in (1, 2):
            line = [sys.executable, str(script), nodes.endpoint, f"127.0.0.{place}"]
            jobs.append(stack.enter_context(running(line, tmp_path / str(place))))
        assert [job.wait(PATIENCE_S) for job in jobs] == [0, 0], [job.stderr() for job in jobs]
        assert [job.stdout() for job in jobs] == ["{0: '0/2 1'}\n", "{1: '1/2 1'}\n"]


@pytest.mark.guarantee("G8")
def test_a_node_of_another_job_does_not_join(nodes: Nodes) -> None:
    """MIN is never reached, and that is one line."""
    a = nodes.start("a", 1, "--rdzv-conf", "join_timeout=3,read_timeout=15", nodes="2")
    b = nodes.start("b", 2, "--rdzv-conf", "join_timeout=3,read_timeout=15", nodes="2", run_id="other")
    assert [job.wait(PATIENCE_S) for job in (a, b)] == [1, 1]
    for job in (a, b):
        errors = [line for line in job.stderr().splitlines() if "error: " in line]
        assert len(errors) == 1, job.stderr()
        assert not (nodes.directory / "seen").exists()
