"""Where many workers may start again, a fork server forks the next ones while these run."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from kit import processes
from kit.waiting import until
from tests.support.fork_server import Command, forked, server, server_pids
from tests.support.forks import AHEAD
from tests.support.group import Group

from dsl._core import ForkServerLost, kernel_interfaces

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.engine,
    pytest.mark.needs_pidfd,
    pytest.mark.skipif(kernel_interfaces()["pidfd"] != "", reason="needs a kernel with pidfds"),
]
PATIENCE_S = 20


def those_ahead(server_pid: int, started: set[int]) -> list[int]:
    """Wait for as many children more as there are workers; in the order in which they were forked."""
    until(lambda: len(processes.children(server_pid)) == len(started) + AHEAD, PATIENCE_S)
    return [pid for pid in processes.children(server_pid) if pid not in started]


def dead_children(server_pid: int) -> set[int]:
    """Those that have ended and are not waited for."""
    found = map(processes.find, processes.children(server_pid))
    return {one.pid for one in found if one is not None and one.state == "Z"}


def begin(testchild: Path) -> tuple[Group, int, list[int]]:
    """A group that may be started again, its server, and the pids of those forked ahead."""
    group = Group([forked(testchild, "pause")] * AHEAD, servers=[server()], may_restart=True)
    started = set(group.all_started().values())
    (pid,) = server_pids()
    return group, pid, those_ahead(pid, started)


def end(group: Group) -> None:
    """End a group, of which nothing is to be left."""
    group.supervisor.stop()
    ended = group.finish()
    assert (ended.stragglers, ended.survivors) == (0, [])


def test_those_forked_ahead_are_the_next_workers_in_their_order(testchild: Path) -> None:
    group, pid, ahead = begin(testchild)
    with group:
        end(group)
        assert all(map(processes.find, ahead))
        group.again([forked(testchild, "pause")] * AHEAD)
        started = group.all_started()
        assert [started[worker] for worker in range(AHEAD)] == ahead
        end(group)
        until(lambda: not processes.children(pid), PATIENCE_S)
    assert group.of(ForkServerLost) == []


def test_those_that_are_not_needed_end(testchild: Path) -> None:
    group, pid, ahead = begin(testchild)
    with group:
        end(group)
        group.again([forked(testchild, "pause")] * 3)
        assert set(group.all_started().values()) == set(ahead[:3])
        until(lambda: set(processes.children(pid)) == set(ahead[:3]), PATIENCE_S)
        end(group)


def test_one_that_has_died_meanwhile_is_missed_by_nobody(testchild: Path) -> None:
    group, pid, ahead = begin(testchild)
    with group:
        for number in (0, 5, AHEAD - 1):
            os.kill(ahead[number], signal.SIGKILL)
        killed = {ahead[number] for number in (0, 5, AHEAD - 1)}
        until(lambda: killed <= dead_children(pid), PATIENCE_S)
        end(group)
        group.again([forked(testchild, "pause")] * AHEAD)
        started = set(group.all_started().values())
        assert len(started & set(ahead)) == AHEAD - 3
        end(group)
    assert group.of(ForkServerLost) == []


def test_they_end_with_the_service_of_their_server(testchild: Path) -> None:
    """One that is done without lives on, for it has workers."""
    group, pid, ahead = begin(testchild)
    with group:
        workers = group.all_started()
        os.kill(pid, signal.SIGSTOP)
        os.kill(workers[0], signal.SIGKILL)
        group.until(lambda group: bool(group.of(ForkServerLost)))
        os.kill(pid, signal.SIGCONT)
        until(lambda: not {*ahead} & {*processes.children(pid)}, PATIENCE_S)
        group.finish()
        group.again([forked(testchild, "pause")] * AHEAD, may_restart=True)
        started = set(group.all_started().values())
        assert not started & {*ahead}
        assert processes.children(pid) == []
        end(group)


def test_they_die_with_their_server(testchild: Path) -> None:
    group, pid, ahead = begin(testchild)
    with group:
        known = [one for one in map(processes.find, ahead) if one is not None]
        assert len(known) == AHEAD
        os.kill(pid, signal.SIGKILL)
        group.finish()
        until(lambda: not any(map(processes.alive, known)), PATIENCE_S)


@pytest.mark.parametrize("how, killed", [("guarded", "agent"), ("guarded", ""), ("embedded", "agent")])
def test_nothing_of_them_is_left(testchild: Path, how: str, killed: str) -> None:
    with Command(testchild, *[["pause"]] * AHEAD, how=how) as command:
        command.until_said("Started", AHEAD)
        (pid,) = server_pids(command.agent)
        until(lambda: len(processes.children(pid)) == 2 * AHEAD, PATIENCE_S)
        if killed:
            os.kill(command.agent, signal.SIGKILL)
        else:
            command.process.terminate()
            assert command.process.wait(PATIENCE_S) == 0
        until(command.is_gone, PATIENCE_S)
