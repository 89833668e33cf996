"""Both ways: what a stranger's child leaves behind is no business of ours, what a worker leaves behind is."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.processes import Process
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import complete_lines, running

pytestmark = [pytest.mark.engine, pytest.mark.linux_5_4, pytest.mark.guarantee("G1")]

# `helper & exec dsl …`: the helper is a child of the command, and not of the job.
WITH_HELPER = 'child=$1; words=$2; shift 2; "$child" $words & exec "$@"'


def _with_helper(testchild: Path, words: Sequence[str], line: Sequence[str]) -> list[str]:
    return ["/bin/sh", "-c", WITH_HELPER, "sh", str(testchild), " ".join(words), *line]


def _seen(path: Path, count: int = 1) -> list[Process]:
    """The processes whose pids have been written to a file."""
    until(lambda: len(complete_lines(path)) >= count)
    found = [processes.find(int(line)) for line in complete_lines(path)]
    assert None not in found
    return [one for one in found if one is not None]


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("end", ["itself", "signal", "agent killed"])
def test_what_a_stranger_leaves_while_the_job_runs_is_left_alone(
    end: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The command adopts the helper's orphans, one with a session of its own and one without."""
    begun, orphans, go = tmp_path / "begun", tmp_path / "orphans", tmp_path / "go"
    leave = ["note", str(orphans), "%p", "pause"]
    helper = ["wait", str(begun), "daemon", "[", *leave, "]", "child", "[", *leave, "]", "exit", "0"]
    words = ["only", "0", "[", "touch", str(begun), "]", "wait", str(go), "exit", "0"]
    line = dsl_line(dsl_command, 2, [str(testchild), *words], 0.5)
    with running(_with_helper(testchild, helper, line), tmp_path / "job") as job:
        left = _seen(orphans, 2)
        until(lambda: all(one.ppid == job.guard for one in _seen(orphans, 2)))
        if end == "itself":
            go.touch()
        elif end == "signal":
            os.kill(job.guard, signal.SIGTERM)
        else:
            known = {one.pid for one in left}
            until(lambda: len(set(processes.children(job.guard)) - known) == 1)  # the helper has gone, too
            (agent,) = set(processes.children(job.guard)) - known
            os.kill(agent, signal.SIGKILL)
        assert job.wait() == {"itself": 0, "signal": 143, "agent killed": 137}[end], job.stderr()
        assert [processes.alive(one) for one in left] == [True, True]
        assert [found.state for one in left if (found := processes.find(one.pid))] == ["S", "S"]


@pytest.mark.guarantee("G1")
def test_what_a_killed_agent_leaves_is_ended_beside_a_stranger(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """A daemon of a worker, and its child in a session and with an environment of its own, die; the helper lives."""
    ready, helper = tmp_path / "ready", tmp_path / "helper"
    deaf = ["ignore", "TERM,INT,HUP", "note", str(ready), "%p"]
    bare = ["setsid", "exec", "/usr/bin/env", "-i", str(testchild), *deaf, "pause"]
    words = ["daemon", "[", *deaf, "child", "[", *bare, "]", "pause", "]", "pause"]
    line = dsl_line(dsl_command, 1, [str(testchild), *words])
    stranger = ["note", str(helper), "%p", "pause"]
    with running(_with_helper(testchild, stranger, line), tmp_path / "job") as job:
        (known,) = _seen(helper)
        left = _seen(ready, 2)
        (agent,) = (pid for pid in processes.children(job.guard) if pid != known.pid)
        os.kill(agent, signal.SIGKILL)
        assert job.wait() == 137, job.stderr()
        assert [processes.alive(one) for one in left] == [False, False]
        assert processes.alive(known)
