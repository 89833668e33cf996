"""Processes that leave the group, the session or the tree in which their worker was started, and strangers beside them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.processes import Process
from tests.kit.waiting import until
from tests.support.command import dsl_line, ran
from tests.support.group import Group
from tests.support.jobs import Helpers, complete_lines, running

from dsl import LaunchSpec, Supervisor, WorkerSpec

pytestmark = [pytest.mark.engine, pytest.mark.linux_5_4, pytest.mark.guarantee("G1")]

LEAVES = """
import os, signal, sys, time
child = os.fork()
if not child:
    signal.pause()
os.setpgid(child, child)
os.setpgid(0, child)
def end(signum, frame):
    os.kill(child, signal.SIGKILL)
    os._exit(9)
signal.signal(signal.SIGTERM, end)
with open(sys.argv[1], "w") as ready:
    ready.write(f"{os.getpid()}\\n")
while True:
    time.sleep(60)
"""


def test_a_worker_that_has_left_its_group_gets_the_stop_signal(dsl_command: Path, tmp_path: Path) -> None:
    """It would lose its checkpoint if it only got SIGKILL in the end."""
    ready = tmp_path / "ready"
    line = dsl_line(dsl_command, 1, [sys.executable, "-c", LEAVES, str(ready)], 60.0)
    with running(line, tmp_path / "job") as job:
        until(lambda: complete_lines(ready))
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143
        assert "code 9" in job.stderr()


@pytest.mark.parametrize("end", [lambda it: it.stop(), lambda it: it.kill()], ids=["stop", "kill"])
def test_a_child_with_a_session_and_an_environment_of_its_own_ends_with_its_worker(
    end: Callable[[Supervisor], None], testchild: Path, tmp_path: Path
) -> None:
    """Nothing leads to it once the worker is dead, if there is neither a cgroup nor a subreaper."""
    ready = tmp_path / "ready"
    # It takes a while to die, because the kernel has to free its memory first.
    slow = ["alloc", "512", "note", str(ready), "%p", "pause"]
    bare = ["exec", "/usr/bin/env", "-i", str(testchild), *slow]
    with Group([[str(testchild), "child", "[", "setsid", *bare, "]", "pause"]]) as group:
        group.all_started()
        (pid,) = (int(line) for line in until(lambda: complete_lines(ready)))
        left = processes.find(pid)
        assert left is not None
        end(group.supervisor)
        ended = group.finish()
        assert not processes.alive(left)
        assert ended.survivors == ()


def test_a_failed_start_beside_a_fork_of_the_host_program_leaves_an_idle_engine(testchild: Path) -> None:
    """The fork has copies of descriptors that the engine has closed; an entry of epoll lives as long as one does."""
    over = threading.Event()
    forked: list[int] = []

    def fork() -> None:
        for _ in range(300):
            if over.is_set():
                return
            pid = os.fork()
            if not pid:
                signal.pause()
                os._exit(0)
            forked.append(pid)

    thread = threading.Thread(target=fork)
    try:
        absent = [[str(testchild.with_name("absent"))]] * 200
        with Group(absent, on_failure="report") as group:
            thread.start()
            group.finish()
            over.set()
            thread.join()
            group.supervisor.start(LaunchSpec([WorkerSpec([str(testchild), "pause"])]))
            before_ns = processes.processor_ns(os.getpid(), "dsl-engine")
            until(lambda: group.supervisor.wait(1.0) is not None)
            group.supervisor.wait(0.5)
            assert processes.processor_ns(os.getpid(), "dsl-engine") - before_ns < 100_000_000
    finally:
        over.set()
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


SHORT_OF_DESCRIPTORS = """
import os, resource
from dsl import Supervisor
def ours():
    # Other jobs may remove their cgroups meanwhile: os.walk passes over what has gone.
    name = f"dsl-{os.getpid()}-"
    return [one for _, names, _ in os.walk("/sys/fs/cgroup") for one in names if one.startswith(name)]
made = refused = 0
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for limit in range(3, 30):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        supervisor = Supervisor()
    except Exception:
        refused += 1
    else:
        made += 1
        supervisor.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    assert not ours(), (limit, ours())
print(made > 0, refused > 3)
"""


def test_a_supervisor_that_cannot_be_made_leaves_no_cgroup() -> None:
    """Each step of its making is refused once, for want of descriptors."""
    done = ran([sys.executable, "-c", SHORT_OF_DESCRIPTORS])
    assert done.stdout == "True True\n", done.stderr


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


@pytest.mark.parametrize("end", ["itself", "signal", "agent killed"])
def test_what_a_stranger_leaves_while_the_job_runs_is_left_alone(
    end: str, testchild: Path, tmp_path: Path, helpers: Helpers
) -> None:
    """The command adopts the helper's orphans, one with a session of its own and one without."""
    begun, orphans, go = tmp_path / "begun", tmp_path / "orphans", tmp_path / "go"
    leave = ["note", str(orphans), "%p", "pause"]
    helper = ["wait", str(begun), "daemon", "[", *leave, "]", "child", "[", *leave, "]", "exit", "0"]
    line = helpers.line(2, "only 0 [ touch {}/begun ] wait {}/go exit 0", 0.5)
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


def test_what_a_killed_agent_leaves_is_ended_beside_a_stranger(
    testchild: Path, tmp_path: Path, helpers: Helpers
) -> None:
    """A daemon of a worker, and its child in a session and with an environment of its own, die; the helper lives."""
    ready, helper = tmp_path / "ready", tmp_path / "helper"
    deaf = ["ignore", "TERM,INT,HUP", "note", str(ready), "%p"]
    bare = ["setsid", "exec", "/usr/bin/env", "-i", str(testchild), *deaf, "pause"]
    words = ["daemon", "[", *deaf, "child", "[", *bare, "]", "pause", "]", "pause"]
    line = helpers.line(1, words)
    stranger = ["note", str(helper), "%p", "pause"]
    with running(_with_helper(testchild, stranger, line), tmp_path / "job") as job:
        (known,) = _seen(helper)
        left = _seen(ready, 2)
        (agent,) = (pid for pid in processes.children(job.guard) if pid != known.pid)
        os.kill(agent, signal.SIGKILL)
        assert job.wait() == 137, job.stderr()
        assert [processes.alive(one) for one in left] == [False, False]
        assert processes.alive(known)
