"""Processes that leave the group, the session or the tree in which their worker was started."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.group import Group
from tests.support.jobs import complete_lines, running

from dsl import LaunchSpec, Output, Stdio, Supervisor, WorkerSpec

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


@pytest.mark.guarantee("G1")
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


def test_a_stranger_that_writes_to_the_pipe_of_a_worker_does_not_keep_the_group(
    testchild: Path, tmp_path: Path
) -> None:
    """The pipe is emptied of what it holds when the worker ends, and not for as long as somebody fills it."""
    go = tmp_path / "go"
    spec = WorkerSpec([str(testchild), "wait", str(go), "exit", "0"], stdout=Stdio.pipe())
    with Group([spec]) as group:
        (pid,) = group.all_started().values()
        with Path(f"/proc/{pid}/fd/1").open("wb") as pipe:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
            writer = [str(testchild), "wait", str(go), "flood", "100", "100", "65536"]
            strangers = [subprocess.Popen(writer, stdout=pipe) for _ in range(4)]
        go.touch()
        group.finish()
        ends = [stranger.wait(20) for stranger in strangers]
    assert ends == [-signal.SIGPIPE] * 4
    assert sum(len(event.data) for event in group.of(Output)) < 100 << 20


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
            group.supervisor.start(_sleeper(testchild))
            before_ns = processes.processor_ns(os.getpid(), "dsl-engine")
            until(lambda: group.supervisor.wait(1.0) is not None)
            group.supervisor.wait(0.5)
            assert processes.processor_ns(os.getpid(), "dsl-engine") - before_ns < 100_000_000
    finally:
        over.set()
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _sleeper(testchild: Path) -> LaunchSpec:
    return LaunchSpec([WorkerSpec([str(testchild), "pause"])])


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
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_DESCRIPTORS], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True True\n", done.stderr
