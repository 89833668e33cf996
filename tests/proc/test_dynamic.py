"""Nodes that come and go: real agents and workers, and delegates through which the test plays the other nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.hub import Hub, Node, elastic_line, meet
from tests.support.jobs import Job, complete_lines, running

from dsl.model.job import Notice
from dsl.model.judgement import Failed
from dsl.model.nodes import MeetingRefused, NodesFinished, PeerFailure
from dsl.model.outcome import Membership, MembershipChanged
from dsl.rendezvous.delegate_messages import Finish, Leave, Meet

WORKER = """#!/bin/sh
echo "$RANK/$WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON $DSL_ATTEMPT $$" >> "$1/seen"
until [ -e "$1/end" ]; do
  [ ! -e "$1/fail.$RANK.$DSL_ATTEMPT" ] || exit 7
  sleep 0.02
done
"""
FAILED = Failed("rank", "3", 3, 1, 77, 9, 5, code=9)
PORT = 29777  # nobody listens there: the workers have no store


class Table:
    """A hub, and what the workers of all nodes have written."""

    def __init__(self, hub: Hub, directory: Path, stack: contextlib.ExitStack) -> None:
        self.hub = hub
        self.directory = directory
        self._stack = stack
        self._program = directory / "worker"
        self._program.write_text(WORKER)
        self._program.chmod(0o755)

    def node(self, name: str, *options: str, nodes: str = "1:2") -> tuple[Job, Node]:
        """Start a command, and wait for its delegate."""
        job = self.command(name, *options, nodes=nodes)
        return job, self.hub.node()

    def command(self, name: str, *options: str, nodes: str = "1:2", before: tuple[str, ...] = ()) -> Job:
        """Start a command."""
        words = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--no-python", "--grace", "2", *options]
        line = elastic_line(self.hub, [*words, str(self._program), str(self.directory)])
        return self._stack.enter_context(running([*before, *line], self.directory / name))

    def seen(self, count: int) -> list[str]:
        """The first lines of so many workers, without their pids, in no order."""
        until(lambda: len(self._lines()) >= count)
        return sorted(line.rpartition(" ")[0] for line in self._lines())

    def pids(self, count: int) -> list[int]:
        """Of so many workers."""
        self.seen(count)
        return [int(line.rpartition(" ")[2]) for line in self._lines()]

    def _lines(self) -> list[str]:
        return complete_lines(self.directory / "seen")

    def fail(self, rank: int, attempt: int) -> None:
        """Make a worker fail."""
        (self.directory / f"fail.{rank}.{attempt}").touch()

    def end(self) -> None:
        """Make all workers end."""
        (self.directory / "end").touch()


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


def agent_of(job: Job) -> int:
    """The child of the guard that is no delegate."""

    def found() -> list[int]:
        return [pid for pid in processes.children(job.guard) if pid != delegate_of(job)]

    return until(found)[0]


def delegate_of(job: Job) -> int:
    """The child of the guard that is one."""

    def found() -> list[int]:
        return [pid for pid in processes.children(job.guard) if "fake_delegate.py" in words_of(pid)]

    return until(found)[0]


def words_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode().split("\0")
        return " ".join(words[:3]) if "-c" not in words[:2] else ""
    return ""


def assert_nothing_left(job: Job) -> None:
    until(lambda: not job.left(), timeout_s=8)


def test_a_failure_on_one_node_starts_the_workers_of_both_again_and_the_count_agrees(table: Table) -> None:
    (job_a, a), (job_b, b) = table.node("a", "--max-restarts", "2"), table.node("b", "--max-restarts", "2")
    assert (a.opened.point.least_nodes, a.opened.max_nodes, a.opened.point.backend) == (1, 2, "c10d")
    meet([a, b], PORT)
    assert table.seen(2) == ["0/2 0 start 0", "1/2 0 start 0"]
    table.fail(1, 0)
    failing = b.expect(PeerFailure)
    assert (failing.rank, failing.code) == (1, 7)
    a.say(PeerFailure("hostb", 1, 7, failing.failed, is_final=False))
    orders = meet([a, b], PORT, round_=1)
    assert [(order.restarts, order.reason) for order in orders] == [(1, "failure")] * 2
    assert table.seen(4)[2:] == ["1/2 0 start 0", "1/2 1 failure 1"]
    table.end()
    finish([a, b])
    assert [job_a.wait(), job_b.wait()] == [0, 0]
    assert "restart 1 of 2: rank 1 on host hostb failed with 7, starting all workers again" in job_a.stderr()
    assert "restart 1 of 2: rank 1 on host" in job_b.stderr()


def test_a_node_that_joins_and_leaves_costs_no_restart(table: Table) -> None:
    job, a = table.node("a")
    meet([a], PORT)
    table.seen(1)
    a.say(MembershipChanged(Membership(1, 1), ()))
    assert [(one.restarts, one.reason) for one in meet([a], PORT, round_=1)] == [(0, "membership")]
    assert table.seen(2) == ["0/1 0 membership 1", "0/1 0 start 0"]
    a.say(MembershipChanged(Membership(1, 0), ("b",)))
    meet([a], PORT, round_=2)
    assert table.seen(3)[1] == "0/1 0 membership 2"
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
        a.expect(PeerFailure)
        a.expect(Meet)
    elif moment == "finishing":
        table.end()
        a.expect(Finish)
    os.kill(job.guard, signum)
    a.expect(Leave)
    a.hang_up()
    assert job.wait() == code
    assert_nothing_left(job)


def test_a_preempted_node_leaves_and_can_be_queued_again(table: Table) -> None:
    job, a = table.node("a", "--preempt-signal", "USR1")
    meet([a], PORT)
    table.seen(1)
    os.kill(job.guard, signal.SIGUSR1)
    a.expect(Leave)
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
        a.expect(PeerFailure)
        a.expect(Meet)
    elif moment == "finishing":
        table.end()
        a.expect(Finish)
    delegate = delegate_of(job)
    os.kill(job.guard if victim == "guard" else agent_of(job), signal.SIGKILL)
    if victim == "guard":
        a.expect(Leave)
        a.hang_up()
    else:
        assert a.next() is None  # the end of its socket says enough
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
    os.kill(agent_of(job), signal.SIGKILL)
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


@pytest.mark.guarantee("G2", "G3")
def test_a_final_failure_of_another_node_ends_this_one_with_its_code_and_names_it(table: Table) -> None:
    job, a = table.node("a")
    meet([a], PORT)
    table.seen(1)
    a.say(PeerFailure("hostb", 3, 9, FAILED, is_final=True))
    a.expect(Leave)
    a.hang_up()
    assert job.wait() == 9
    assert "the job is over: rank 3 on host hostb failed: exit code 9" in job.stderr()


def test_restarts_that_are_spent_end_the_job_on_all_nodes(table: Table) -> None:
    job, a = table.node("a", nodes="2")
    b_job, b = table.node("b", nodes="2")
    meet([a, b], PORT)
    table.seen(2)
    table.fail(0, 0)
    a.expect(PeerFailure)
    fail = a.expect(PeerFailure)
    assert (fail.rank, fail.code) == (0, 7)
    b.say(PeerFailure("hosta", 0, 7, fail.failed, is_final=True))
    b.expect(Leave)
    for node in (a, b):
        node.hang_up()
    assert [job.wait(), b_job.wait()] == [7, 7]


def test_a_failure_that_may_follow_from_a_lost_node_waits_for_word_of_it(table: Table) -> None:
    """No restart was granted, and none is counted."""
    job, a = table.node("a")
    other_job, b = table.node("b")
    meet([a, b], PORT)
    table.seen(2)
    table.fail(0, 0)
    a.expect(PeerFailure)
    a.say(MembershipChanged(Membership(1, 0), ("hostb",)))
    assert [one.restarts for one in meet([a], PORT, round_=1)] == [0]
    assert "0/1 0 membership 1" in table.seen(3)
    b.hang_up()
    table.end()
    finish([a])
    assert [job.wait(), other_job.wait()] == [0, 0]


def test_whoever_has_finished_starts_again_with_a_node_that_failed(table: Table) -> None:
    job, a = table.node("a", "--max-restarts", "1")
    meet([a], PORT)
    table.seen(1)
    table.end()
    a.expect(Finish)
    (table.directory / "end").unlink()
    a.say(PeerFailure("hostb", 1, 7, None, is_final=False))
    assert [one.restarts for one in meet([a], PORT, round_=1)] == [1]
    table.seen(2)
    table.end()
    finish([a])
    assert job.wait() == 0


def test_a_node_that_holds_the_store_stays_until_its_delegate_goes_or_a_second_signal(table: Table) -> None:
    (job_a, a), (job_b, b) = table.node("a"), table.node("b")
    meet([a, b], PORT)
    table.seen(2)
    for job, node in ((job_a, a), (job_b, b)):
        os.kill(job.guard, signal.SIGTERM)
        node.expect(Leave)
        node.say(Notice("warning", "this node holds the store"))
        until(lambda job=job: "warning: this node holds the store" in job.stderr())  # type: ignore[misc]
        assert job.process.poll() is None
    a.hang_up()
    assert job_a.wait() == 143
    time.sleep(0.1)  # stop signals of one process within 50 ms are one
    os.kill(job_b.guard, signal.SIGINT)
    assert job_b.wait() == 143


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
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_spare_that_the_job_did_not_need_ends_as_the_job_did(table: Table, *, has_failed: bool) -> None:
    job, a = table.node("a")
    a.expect(Meet)
    if has_failed:
        a.say(PeerFailure("hostb", 3, 9, FAILED, is_final=True))
    a.say(MeetingRefused("the job j has ended without this node, which was a spare", "unneeded"))
    assert job.wait() == (9 if has_failed else 0)
    over = "the job is over: rank 3 on host hostb failed: exit code 9"
    unneeded = "the job j has ended without this node, which was a spare"
    assert job.stderr() == f"dslrun: {over if has_failed else unneeded}\n"


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
    a.hang_up()
    assert job.wait() == 1
    assert job.stderr() == "dslrun: error: the process that meets the other nodes has ended\n"


def test_a_dry_run_says_how_the_nodes_will_meet_and_starts_nothing(table: Table) -> None:
    job = table.command("a", "--dry-run", "--nproc-per-node", "2", "--rdzv-endpoint", "h:29400")
    assert job.wait() == 0
    line = "1 to 2 nodes will meet through c10d at h:29400 as job none; this node alone would start:"
    assert f"dslrun: {line}\n" in job.stderr()
    assert "RANK=1" in job.stdout() or "rank 1" in job.stdout()
