"""Nodes that come and go: real agents and workers, and delegates through which the test plays the other nodes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.hub import Hub, Node, elastic_line, meet
from tests.support.jobs import Job, is_delegate
from tests.support.places import Commands

from dsl.model.job import Notice
from dsl.rendezvous.delegate_messages import Finish, Leave, Meet, MeetingRefused, NodesFinished, Waiting

TELLS = (
    'echo "$RANK/$WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON $DSL_ATTEMPT $$" >> "$1/seen"'
)
PORT = 29777  # nobody listens there: the workers have no store


class Table(Commands):
    """A hub, and commands that come to it."""

    def __init__(self, hub: Hub, directory: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(directory, stack, TELLS, "DSL_ATTEMPT")
        self.hub = hub

    def node(self, name: str, *options: str, nodes: str = "1:2") -> tuple[Job, Node]:
        """Start a command, and wait for its delegate."""
        job = self.command(name, *options, nodes=nodes)
        return job, self.hub.node()

    def command(self, name: str, *options: str, nodes: str = "1:2", before: tuple[str, ...] = ()) -> Job:
        """Start a command."""
        words = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--no-python", "--grace", "2", *options]
        line = elastic_line(self.hub, [*words, str(self.program), str(self.directory)])
        return self.run(name, [*before, *line])

    def seen(self, count: int) -> list[str]:
        """The first lines of so many workers, without their pids, in no order."""
        until(lambda: len(self.lines()) >= count)
        return sorted(line.rpartition(" ")[0] for line in self.lines())

    def pids(self, count: int) -> list[int]:
        """Of so many workers."""
        self.seen(count)
        return [int(line.rpartition(" ")[2]) for line in self.lines()]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    """Where delegates come together."""
    with contextlib.ExitStack() as stack:
        yield Table(stack.enter_context(Hub(tmp_path / "hub")), tmp_path, stack)


def finish(nodes: list[Node]) -> None:
    for node in nodes:
        node.expect(Finish)
    for node in nodes:
        node.say(NodesFinished())
        node.hang_up()


def delegate_of(job: Job) -> int:
    """The child of the guard that is one."""
    return until(lambda: [pid for pid in processes.children(job.guard) if is_delegate(pid)])[0]


def assert_nothing_left(job: Job) -> None:
    until(lambda: not job.left(), timeout_s=8)


def test_each_node_counts_the_restarts_of_its_own_failures(table: Table) -> None:
    """As under torchrun. The other one hears that a node waits."""
    (job_a, a), (job_b, b) = table.node("a", "--max-restarts", "2"), table.node("b", "--max-restarts", "2")
    assert (a.opened.point.least_nodes, a.opened.max_nodes, a.opened.point.backend) == (1, 2, "c10d")
    meet([a, b], PORT)
    assert table.seen(2) == ["0/2 0 start 0", "1/2 0 start 0"]
    table.fail(1, 0)
    a.say(Waiting())
    meet([a, b], PORT, round_=1)
    assert table.seen(4)[1:] == ["0/2 0 start 0", "1/2 0 start 0", "1/2 1 failure 1"]
    table.end()
    finish([a, b])
    assert [job_a.wait(), job_b.wait()] == [0, 0]
    assert "the nodes of the job have changed" in job_a.stderr()
    assert "restart 1 of 2" in job_b.stderr()


def test_a_node_that_joins_costs_no_restart(table: Table) -> None:
    job, a = table.node("a")
    meet([a], PORT)
    table.seen(1)
    a.say(Waiting())
    meet([a], PORT, round_=1)
    assert table.seen(2) == ["0/1 0 membership 1", "0/1 0 start 0"]
    table.end()
    finish([a])
    assert job.wait() == 0


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("moment", ["running", "meeting", "finishing"])
def test_a_signal_ends_the_part_of_one_node_and_leaves_the_job_to_the_others(
    moment: str, signum: signal.Signals, code: int, table: Table
) -> None:
    """Between two attempts the signal is heard, too."""
    job, a = table.node("a", "--max-restarts", "3")
    meet([a], PORT)
    table.seen(1)
    if moment == "meeting":
        table.fail(0, 0)
        a.expect(Meet)
    elif moment == "finishing":
        table.end()
        a.expect(Finish)
    os.kill(job.guard, signum)
    assert a.next() is None  # the end of its socket says enough
    a.hang_up()
    assert job.wait() == code
    assert_nothing_left(job)


def test_a_preempted_node_leaves_and_can_be_queued_again(table: Table) -> None:
    job, a = table.node("a", "--preempt-signal", "USR1")
    meet([a], PORT)
    table.seen(1)
    os.kill(job.guard, signal.SIGUSR1)
    assert a.next() is None
    a.hang_up()
    assert job.wait() == 75


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("moment", ["running", "meeting", "finishing"])
@pytest.mark.parametrize("victim", ["agent", "guard"])
def test_nothing_is_left_when_guard_or_agent_is_killed(victim: str, moment: str, table: Table) -> None:
    """Neither workers nor delegate."""
    job, a = table.node("a", "--max-restarts", "3")
    meet([a], PORT)
    workers = table.pids(1)
    if moment == "meeting":
        table.fail(0, 0)
        a.expect(Meet)
    elif moment == "finishing":
        table.end()
        a.expect(Finish)
    delegate = delegate_of(job)
    os.kill(job.guard if victim == "guard" else job.agent(), signal.SIGKILL)
    assert a.next() is None
    a.hang_up()
    assert job.wait() == (-9 if victim == "guard" else 137)
    assert_nothing_left(job)
    found = [processes.find(pid) for pid in (*workers, delegate)]
    assert [one for one in found if one is not None and one.state != "Z"] == []


@pytest.mark.guarantee("G1")
def test_a_delegate_that_hangs_does_not_outlive_the_command(table: Table) -> None:
    job, a = table.node("a")
    meet([a], PORT)
    table.seen(1)
    delegate = delegate_of(job)
    os.kill(delegate, signal.SIGSTOP)
    os.kill(job.agent(), signal.SIGKILL)
    assert job.wait() == 137
    assert processes.find(delegate) is None
    assert_nothing_left(job)


@pytest.mark.guarantee("G1")
def test_what_was_a_child_of_the_command_before_is_no_business_of_the_job(
    table: Table, tmp_path: Path
) -> None:
    """Nor is it ended by an agent that is killed."""
    before = ("/bin/sh", "-c", 'sleep 77 & echo $! > "$0"; exec "$@"', str(tmp_path / "stranger"))
    job = table.command("a", before=before)
    a = table.hub.node()
    meet([a], PORT)
    table.seen(1)
    stranger = int((tmp_path / "stranger").read_text())
    agents = [pid for pid in processes.children(job.guard) if pid not in (stranger, delegate_of(job))]
    os.kill(agents[0], signal.SIGKILL)
    assert job.wait() == 137
    assert processes.find(stranger) is not None
    os.kill(stranger, signal.SIGKILL)


def test_workers_outlive_a_delegate_that_crashes(table: Table) -> None:
    job, a = table.node("a")
    meet([a], PORT)
    (worker,) = table.pids(1)
    a.hang_up()
    until(lambda: "the process that meets the other nodes has ended" in job.stderr())
    assert processes.find(worker) is not None
    table.end()
    assert job.wait() == 0
    assert len(table.seen(1)) == 1


def test_a_failure_that_a_nodes_own_policy_excludes_closes_the_job(table: Table) -> None:
    (job, a), (_, b) = table.node("a", "--max-restarts=2", "--give-up-on=7"), table.node("b")
    meet([a, b], PORT)
    table.seen(2)
    table.fail(0, 0)
    assert a.expect(Leave).closes
    a.hang_up()
    assert job.wait() == 7
    assert "not tried again: exit code 7 is in --give-up-on" in job.stderr()
    table.end()
    finish([b])


def test_restarts_that_are_spent_close_the_job(table: Table) -> None:
    job, a = table.node("a", nodes="2")
    other_job, b = table.node("b", nodes="2")
    meet([a, b], PORT)
    table.seen(2)
    table.fail(0, 0)
    assert a.expect(Leave).closes
    a.hang_up()
    assert job.wait() == 7
    b.say(Waiting())
    b.expect(Meet)
    b.say(MeetingRefused("the job is over", "closed"))
    assert other_job.wait() == 1
    assert "the job is over" in other_job.stderr()


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("kind, code", [("timeout", 1), ("settings", 2)])
def test_nodes_that_do_not_meet_are_one_line(kind: str, code: int, table: Table) -> None:
    job, a = table.node("a")
    a.expect(Meet)
    a.say(Notice("info", "waiting for 1 of 2 nodes"))
    a.say(MeetingRefused("only 1 of 2 nodes came within 600 s", kind))  # type: ignore[arg-type]
    assert job.wait() == code
    assert job.stderr().splitlines() == [
        "dslrun: waiting for 1 of 2 nodes",
        "dslrun: error: only 1 of 2 nodes came within 600 s",
    ]


@pytest.mark.guarantee("G2")
def test_a_spare_that_the_job_did_not_need_ends_well(table: Table) -> None:
    job, a = table.node("a")
    a.expect(Meet)
    text = "the job j has ended without this node, which was a spare"
    a.say(MeetingRefused(text, "unneeded"))
    assert job.wait() == 0
    assert job.stderr() == f"dslrun: {text}\n"


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize(
    "signum, how",
    [
        (signal.SIGTERM, "terminated (SIGTERM)"),
        (signal.SIGINT, "interrupted (SIGINT)"),
        (signal.SIGHUP, "terminated (SIGHUP)"),
    ],
)
def test_a_signal_ends_the_first_meeting_and_nothing_is_left(
    signum: signal.Signals, how: str, table: Table
) -> None:
    job, a = table.node("a")
    a.expect(Meet)
    os.kill(job.guard, signum)
    assert a.next() is None
    assert job.wait() == -signum
    assert_nothing_left(job)
    assert job.stderr() == f"dslrun: {how} while waiting for the nodes with run id none\n"


@pytest.mark.guarantee("G8")
def test_a_delegate_that_dies_at_once_is_one_line(table: Table) -> None:
    job, a = table.node("a")
    a.expect(Meet)
    a.hang_up()
    assert job.wait() == 1
    assert job.stderr() == "dslrun: error: the process that meets the other nodes has ended\n"


def test_a_dry_run_says_how_the_nodes_will_meet_and_starts_nothing(table: Table) -> None:
    job = table.command("a", "--dry-run", "--nproc-per-node", "2", "--rdzv-endpoint", "h:29400")
    assert job.wait() == 0
    line = "1 to 2 nodes will meet through c10d at h:29400 as job none; this node alone would start:"
    assert f"dslrun: {line}\n" in job.stderr()
    assert "RANK=1" in job.stdout() or "rank 1" in job.stdout()
