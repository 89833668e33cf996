"""A fork server that is frozen, hangs or is killed at a step of a start: it holds nobody up, and nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.fork_server import Command, forked, server, server_pids
from tests.support.group import Group

from dsl import Exited, ForkServerLost, Output, Started, Stdio, Stopping, WorkerSpec
from dsl._core import kernel_interfaces

pytestmark = pytest.mark.skipif(bool(kernel_interfaces()["pidfd"]), reason="needs a kernel with pidfds")

ORDER_STEPS = ("fork", "answer", "after")
STEPS = ("ready", *ORDER_STEPS)


def until_frozen(parent: int | None = None) -> int:
    """The fork server of a process, or of this one, once it is stopped."""

    def frozen() -> list[int]:
        found = [(pid, processes.find(pid)) for pid in server_pids(parent)]
        return [pid for pid, process in found if process is not None and process.state == "T"]

    return until(frozen)[0]


@pytest.mark.parametrize("step", ORDER_STEPS)
def test_what_happens_while_a_server_is_frozen_is_heard_of(
    testchild: Path, tmp_path: Path, step: str
) -> None:
    """Output, a signal, and the end of the group: nothing waits for the server to be given up."""
    gate = tmp_path / "gate"
    talker = forked(testchild, "wait", str(gate), "say", "heard", "pause", stdout=Stdio.pipe())
    group_of_six = [talker, *[forked(testchild, "pause")] * 5]
    with Group(group_of_six, servers=[server(f"freeze@{step}")], grace_s=60) as group:
        group.until(lambda group: len(group.of(Started)) >= 2)
        until_frozen()
        gate.touch()
        group.until(lambda group: bool(group.of(Output)))
        group.supervisor.stop()
        ended = group.finish()
    assert ended.survivors == ()
    assert group.of(ForkServerLost) == []
    started = {event.worker for event in group.of(Started)}
    assert len(started) < 6
    assert {exit_.exec_stage for worker, exit_ in group.exits().items() if worker not in started} == {
        "cancelled"
    }
    assert {group.exits()[worker].signal for worker in started} == {signal.SIGTERM}


def test_a_failure_is_heard_of_while_a_server_is_frozen_at_the_start_of_others(
    testchild: Path, tmp_path: Path
) -> None:
    """Of a worker that was executed. The others are not started any more."""
    gate = tmp_path / "gate"
    workers = [
        WorkerSpec([str(testchild), "wait", str(gate), "exit", "7"]),
        *[forked(testchild, "pause")] * 4,
    ]
    with Group(workers, servers=[server("freeze@fork")]) as group:
        group.until(lambda group: len(group.of(Started)) == 3)
        until_frozen()
        gate.touch()
        ended = group.finish()
    assert group.of(ForkServerLost) == []
    assert ended.first_failure is not None
    assert (ended.first_failure.worker, ended.first_failure.code) == (0, 7)


@pytest.mark.guarantee("G2")
def test_how_workers_ended_is_known_although_their_server_does_not_tell(
    testchild: Path, tmp_path: Path
) -> None:
    """The kernel shows it, after the time in which the server may tell. Others are heard of meanwhile."""
    end, say = tmp_path / "end", tmp_path / "say"
    workers = [forked(testchild, "wait", str(end), "exit", "5")]
    workers += [forked(testchild, "wait", str(end), "exit", "0")]
    workers += [forked(testchild, "wait", str(end), "raise", "SEGV")]
    workers += [WorkerSpec([str(testchild), "wait", str(say), "say", "heard", "pause"], stdout=Stdio.pipe())]

    def has_ended(pid: int) -> bool:
        process = processes.find(pid)
        return process is None or process.state == "Z"

    with Group(workers, servers=[server("freeze@after")], on_failure="report") as group:
        pids = group.all_started()
        until_frozen()
        end.touch()
        # At the first death: the time in which the server may tell begins with it.
        until(lambda: any(has_ended(pids[worker]) for worker in range(3)))
        say.touch()
        group.until(lambda group: len(group.of(Exited)) == 3)
        kinds = [type(event) for event in group.events]
        assert kinds.index(Output) < kinds.index(ForkServerLost) < kinds.index(Exited)
        ends = {worker: (exit_.code, exit_.signal) for worker, exit_ in group.exits().items()}
        assert ends == {0: (5, None), 1: (0, None), 2: (None, signal.SIGSEGV)}
        assert [event.text for event in group.of(ForkServerLost)] == ["did not tell of a death in 2 s"]
        group.supervisor.stop()
        group.finish()
    assert group.exits()[3].signal == signal.SIGTERM


def test_a_server_that_hangs_is_waited_for_once(testchild: Path) -> None:
    """Nobody can wake it. Its workers end as they are told to, and another group is executed."""
    with Group([forked(testchild, "pause")] * 3, servers=[server("sleep@after")]) as group:
        group.all_started()
        group.supervisor.stop()
        assert group.finish().survivors == ()
        assert {exit_.signal for exit_ in group.exits().values()} == {signal.SIGTERM}
        assert [event.text for event in group.of(ForkServerLost)] == ["did not tell of a death in 2 s"]
        group.again([forked(testchild, "exit", "0")])
        assert group.finish().first_failure is None
    assert server_pids() == []


@pytest.mark.parametrize("step", STEPS)
def test_a_server_that_is_killed_at_a_step_is_named_and_nothing_is_left(testchild: Path, step: str) -> None:
    """Workers that ran die with it, which is why the group ends; those that did not are executed or not started."""

    def are_ours(group: Group) -> bool:
        """All are executed. Others may have started, too, and die with the server before they are heard of."""
        found = [processes.find(event.pid) for event in group.of(Started)]
        return [one.ppid for one in found if one is not None] == [os.getpid()] * 6

    with Group([forked(testchild, "pause")] * 6, servers=[server(f"die@{step}")]) as group:
        group.until(lambda group: bool(group.of(Stopping)) or are_ours(group))
        kinds = [type(event) for event in group.events]
        if Stopping in kinds:
            assert kinds.index(ForkServerLost) < kinds.index(Exited) < kinds.index(Stopping)
        group.supervisor.kill()
        ended = group.finish()
    assert [event.text for event in group.of(ForkServerLost)] == ["was ended by signal 9"]
    assert ended.survivors == ()
    assert sorted(group.exits()) == list(range(6))
    if Stopping in kinds:
        assert ended.first_failure is not None
        assert ended.first_failure.signal == signal.SIGKILL


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how, target", [("guarded", "guard"), ("guarded", "agent"), ("embedded", "agent")])
def test_who_is_killed_while_a_server_is_frozen_leaves_nothing(
    testchild: Path, step: str, how: str, target: str
) -> None:
    with Command(testchild, *[["pause"]] * 6, how=how, mode=f"freeze@{step}") as command:
        until_frozen(command.agent)
        os.kill(getattr(command, target), signal.SIGKILL)
        until(command.is_gone)


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("step", STEPS)
def test_a_signal_while_a_server_is_frozen_leaves_nothing(testchild: Path, step: str) -> None:
    """And what was ordered is not waited for."""
    with Command(testchild, *[["pause"]] * 6, mode=f"freeze@{step}") as command:
        until_frozen(command.agent)
        command.process.terminate()
        names = command.lines.read().split()
        assert command.process.wait(20) == 0
        assert "ForkServerLost" not in names
        assert command.is_gone()
