"""Nodes that come and go through torch's rendezvous, as several commands on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.delegates import a_store, listens, torchrun
from tests.support.jobs import Job, is_delegate, running
from tests.support.places import Commands, free_port

from dsl.view.jobs import running_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

TELLS = 'echo "$RANK/$WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON" >> "$1/seen"'
PATIENCE_S = 60


class Nodes(Commands):
    """Those that have one store."""

    def __init__(self, dslrun: Path, directory: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(directory, stack, TELLS, "TORCHELASTIC_RESTART_COUNT")
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._dslrun = dslrun

    def start(self, name: str, place: int, *options: str, nodes: str = "1:2", run_id: str = "job") -> Job:
        """Start a command; its place among the others is that of its address."""
        words = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint]
        words += ["--rdzv-id", run_id, "--local-addr", f"127.0.0.{place}", "--grace", "2"]
        words += ["--rdzv-conf", "last_call_timeout=2,join_timeout=30,read_timeout=15", *options]
        line = [str(self._dslrun), *words, "--no-python", str(self.program), str(self.directory)]
        return self.run(name, line)

    def pair(self, *options: str) -> tuple[Job, Job]:
        """The first node runs alone, then the second one joins it."""
        a = self.start("a", 1, *options)
        self.seen("0/1 0 start")
        b = self.start("b", 2, *options)
        self.seen("0/2 0 membership", "1/2 0 membership")
        return a, b

    def seen(self, *lines: str) -> None:
        """Wait until workers have written these lines."""
        until(lambda: all(self.lines().count(one) >= lines.count(one) for one in lines), PATIENCE_S)


@pytest.fixture
def nodes(dslrun: Path, tmp_path: Path) -> Iterator[Nodes]:
    """No node yet."""
    with contextlib.ExitStack() as stack:
        yield Nodes(dslrun, tmp_path, stack)


def test_the_policy_of_the_node_that_leads_holds_for_all(nodes: Nodes) -> None:
    jobs = nodes.pair("--max-restarts", "2", "--give-up-on", "7")
    nodes.fail(1, 0)
    assert [job.wait(PATIENCE_S) for job in jobs] == [7, 7]
    for job in jobs:
        assert "not tried again: exit code 7 is in --give-up-on" in job.stderr()


def test_a_job_grows_restarts_shrinks_and_ends_well(nodes: Nodes) -> None:
    """1, 2, 1 nodes; the restart is counted on both, the others on none."""
    a, b = nodes.pair("--max-restarts", "2")
    nodes.fail(1, 0)
    nodes.seen("0/2 1 failure", "1/2 1 failure")
    os.kill(b.guard, signal.SIGTERM)
    assert b.wait(PATIENCE_S) == 143
    nodes.seen("0/1 1 membership")
    nodes.end()
    assert a.wait(PATIENCE_S) == 0
    said = [job.stderr() for job in (a, b)]
    for line in ("rank 1 (local rank 0, pid ", "warning: starting all nodes again, restart 1 of 2"):
        assert all(f"dslrun: {line}" in one for one in said), said
    # Both are on a host of one name.
    assert f"node {os.uname().nodename} has left: SIGTERM received there" in said[0]


def test_the_node_that_hosts_the_store_is_bad_and_a_spare_has_its_ranks(nodes: Nodes) -> None:
    """It conducts on, and ends well with the others."""
    a, b = [nodes.start(name, place, "--max-restarts=2", nodes="2") for name, place in (("a", 1), ("b", 2))]
    nodes.seen("0/2 0 start", "1/2 0 start")
    c = nodes.start("c", 3, "--max-restarts=2", nodes="2")
    until(lambda: "is a spare" in a.stderr(), PATIENCE_S)
    for attempt in (0, 1):
        nodes.fail(0, attempt)
        nodes.seen(*[f"{rank}/2 {attempt + 1} failure" for rank in (0, 1)])
    nodes.end()
    assert [job.wait(PATIENCE_S) for job in (a, b, c)] == [0, 0, 0], a.stderr()
    name = f"node {os.uname().nodename}"
    assert f"dslrun: {name} failed first twice in a row: {name} takes its place" in c.stderr()


@pytest.mark.guarantee("G3")
def test_a_store_at_a_torchrun_that_ends_well_is_not_missed(nodes: Nodes) -> None:
    """All is well, and nothing else is said."""
    words = ("--no-python", str(nodes.program), str(nodes.directory))
    with torchrun(nodes.endpoint, "127.0.0.9", *words) as theirs:
        until(lambda: listens(nodes.endpoint), PATIENCE_S)
        ours = nodes.start("a", 1, nodes="2")
        nodes.seen("0/2 0 start")
        nodes.end()
        assert [ours.wait(PATIENCE_S), theirs.wait(PATIENCE_S)] == [0, 0]
    assert "the store" not in ours.stderr()


@pytest.mark.parametrize("place", [1, 9])
def test_a_node_under_torchrun_joins_a_job_that_runs_and_nodes_of_ours_join_both(
    place: int, nodes: Nodes
) -> None:
    """Whichever comes first among the ranks."""
    a = nodes.start("a", 5, "--spares=1", nodes="1:3")
    nodes.seen("0/1 0 start")
    words = ("--no-python", str(nodes.program), str(nodes.directory))
    conf = "last_call_timeout=2,join_timeout=30"
    with torchrun(nodes.endpoint, f"127.0.0.{place}", *words, nodes="1:3", conf=conf) as theirs:
        nodes.seen("1/2 0 membership" if place == 1 else "0/2 0 membership")
        b = nodes.start("b", 7, nodes="1:3")
        nodes.seen(*[f"{rank}/3 0 membership" for rank in ((1, 2) if place == 1 else (0, 1))])
        nodes.end()
        assert [a.wait(PATIENCE_S), b.wait(PATIENCE_S), theirs.wait(PATIENCE_S)] == [0, 0, 0]
    assert "a node under torchrun has come" in a.stderr()
    assert "warning: --spares has no effect: the nodes meet by torch's own rendezvous" in a.stderr()


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("victim", ["agent", "guard"])
def test_the_others_go_on_without_a_node_that_was_killed_and_nothing_of_it_is_left(
    victim: str, nodes: Nodes
) -> None:
    """The first node holds the store: the other one is killed."""
    a, b = nodes.pair()
    os.kill(b.guard if victim == "guard" else b.agent(), signal.SIGKILL)
    assert b.wait(PATIENCE_S) == (-9 if victim == "guard" else 137)
    until(lambda: not b.left(), 8)
    nodes.seen("0/1 0 membership")
    nodes.end()
    assert a.wait(PATIENCE_S) == 0


@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_another_node_conducts_if_that_node_goes_and_the_store_does_not(
    how: signal.Signals, nodes: Nodes
) -> None:
    """The count of restarts goes on."""
    with a_store(nodes.endpoint):
        options = ("--max-restarts", "2", "--rdzv-conf", "is_host=0,last_call_timeout=2,join_timeout=30")
        a = nodes.start("a", 1, *options, nodes="1:3")
        nodes.seen("0/1 0 start")
        b, c = [nodes.start(name, place, *options, nodes="1:3") for place, name in ((2, "b"), (3, "c"))]
        nodes.seen(*[f"{rank}/3 0 membership" for rank in range(3)])
        nodes.fail(1, 0)
        nodes.seen(*[f"{rank}/3 1 failure" for rank in range(3)])
        os.kill(a.agent() if how == signal.SIGKILL else a.guard, how)
        assert a.wait(PATIENCE_S) == (137 if how == signal.SIGKILL else 143)
        nodes.seen(*[f"{rank}/2 1 membership" for rank in range(2)])
        nodes.end()
        assert [b.wait(PATIENCE_S), c.wait(PATIENCE_S)] == [0, 0]


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("count, restarts", [("2", "0"), ("1:2", "0"), ("2", "1")])
def test_a_final_failure_ends_both_nodes_with_its_code(count: str, restarts: str, nodes: Nodes) -> None:
    options = ("--max-restarts", restarts)
    jobs = [nodes.start(name, place, *options, nodes=count) for place, name in enumerate("ab", 1)]
    for failed in range(int(restarts) + 1):
        reason = "failure" if failed else "start"
        nodes.seen(f"0/2 {failed} {reason}", f"1/2 {failed} {reason}")
        nodes.fail(0, failed)
    assert [job.wait(PATIENCE_S) for job in jobs] == [7, 7]
    said = [job.stderr() for job in jobs]
    first = [next(line for line in text.splitlines() if "failed first: exit code 7" in line) for text in said]
    assert first[0].startswith("dslrun: rank 0 (local rank 0, pid "), said
    assert first[0] == first[1]


def test_the_host_of_the_store_leaves_and_keeps_it_until_the_other_node_has_ended(nodes: Nodes) -> None:
    """It conducts on without workers of its own."""
    a, b = nodes.pair()
    os.kill(a.guard, signal.SIGTERM)
    nodes.seen("0/1 0 membership")
    until(lambda: "keeps the store until the other nodes have ended" in a.stderr(), PATIENCE_S)
    assert a.process.poll() is None
    nodes.end()
    assert [a.wait(PATIENCE_S), b.wait(PATIENCE_S)] == [143, 0]


@pytest.mark.guarantee("G2")
def test_a_second_signal_ends_the_wait_of_the_host_and_with_it_the_job(nodes: Nodes) -> None:
    a, b = nodes.pair()
    os.kill(a.guard, signal.SIGTERM)
    until(lambda: "keeps the store until the other nodes have ended" in a.stderr(), PATIENCE_S)
    nodes.seen("0/1 0 membership")
    time.sleep(0.1)  # stop signals of one process within 50 ms are one
    os.kill(a.guard, signal.SIGINT)
    assert [a.wait(PATIENCE_S), b.wait(PATIENCE_S)] == [143, 1]
    assert "the node that conducts the job" in b.stderr()


@pytest.mark.guarantee("G1", "G2")
def test_when_the_host_of_the_store_is_killed_the_other_node_ends(nodes: Nodes) -> None:
    jobs = [nodes.start(name, place, nodes="2") for place, name in enumerate("ab", 1)]
    nodes.seen("0/2 0 start", "1/2 0 start")
    host = until(lambda: next((one for one in jobs if listener_of(one)), None), PATIENCE_S)
    assert host is not None
    other = next(one for one in jobs if one is not host)
    os.kill(host.agent(), signal.SIGKILL)
    assert [host.wait(PATIENCE_S), other.wait(PATIENCE_S)] == [137, 1]
    for job in jobs:
        until(lambda job=job: not job.left(), 8)  # type: ignore[misc]


def listener_of(job: Job) -> bool:
    """Whether this node hosts the store: its delegate listens."""
    for pid in processes.children(job.guard):
        with contextlib.suppress(OSError):
            sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            table = Path(f"/proc/{pid}/net/tcp6").read_text() + Path(f"/proc/{pid}/net/tcp").read_text()
            rows = [line.split() for line in table.splitlines()]
            listening = {f"socket:[{row[9]}]" for row in rows if len(row) > 9 and row[3] == "0A"}
            if is_delegate(pid) and listening & sockets:
                return True
    return False


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("code", [0, 7])
def test_a_spare_ends_as_the_job_does(code: int, nodes: Nodes) -> None:
    """It has no part in it, and hears of the first failure."""
    a, b = nodes.pair()
    spare = nodes.start("c", 3)
    until(lambda: "is a spare, in case that another is lost" in spare.stderr(), PATIENCE_S)
    if code:
        nodes.fail(1, 0)
    else:
        nodes.end()
    assert [one.wait(PATIENCE_S) for one in (a, b, spare)] == [code] * 3
    line = (
        "the job is over: rank 1 (" if code else "the job job has ended without this node, which was a spare"
    )
    assert line in spare.stderr()


@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize("place", [0, 1])
def test_a_signal_ends_the_wait_for_other_nodes(place: int, nodes: Nodes) -> None:
    """At the host of the store, and at another node, which says what it waits for."""
    jobs = [nodes.start("a", 1, nodes="3")]
    text = f"waits for nodes: 1 of 3 are at {nodes.endpoint} with run id job"
    until(lambda: text in jobs[0].stderr(), PATIENCE_S)
    jobs.append(nodes.start("b", 2, nodes="3"))
    text = text.replace("1 of 3", "2 of 3")
    until(lambda: all(text in job.stderr() for job in jobs), PATIENCE_S)
    os.kill(jobs[place].guard, signal.SIGTERM)
    assert jobs[place].wait(PATIENCE_S) in (143, -15)
    line = f"terminated (SIGTERM) while waiting for the nodes with run id job at {nodes.endpoint}"
    assert f"dslrun: {line}\n" in jobs[place].stderr()
    if place == 0:
        assert jobs[1].wait(PATIENCE_S) == 1
        assert "the store of the rendezvous" in jobs[1].stderr().splitlines()[-1]


def test_the_node_that_conducts_shows_the_workers_of_all_nodes(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    a, b = nodes.pair()

    def ranks() -> list[int]:
        jobs = running_jobs()
        looks = [job.look("status")[0] for job in jobs if job.view.pid == a.guard]
        found = [rank.rank for nodes in looks for node in nodes for rank in node.ranks]
        for job in jobs:
            job.close()
        return found

    until(lambda: ranks() == [0, 1], PATIENCE_S)
    nodes.end()
    assert [a.wait(PATIENCE_S), b.wait(PATIENCE_S)] == [0, 0]


def test_a_node_that_has_finished_waits_for_the_other(nodes: Nodes) -> None:
    ends_first = 'if [ "$RANK" = 0 ]; then exit 0; fi\n'
    nodes.program.write_text(nodes.program.read_text().replace("until", ends_first + "until"))
    jobs = [nodes.start(name, place, nodes="2") for place, name in enumerate("ab", 1)]
    nodes.seen("0/2 0 start", "1/2 0 start")
    until(lambda: any("waiting for the other nodes" in job.stderr() for job in jobs), PATIENCE_S)
    nodes.end()
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
