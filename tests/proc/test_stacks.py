"""What is found out about one process: its Python stack, or the kernel's view and why there is no more."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import running
from tests.support.places import free_port

from dsl.model.observation import Look, RankStacks, RankStatus, Sight
from dsl.view.taker import TAKE_S, take_stacks

SLEEPING = """
import sys, threading, time
def inner():
    open(sys.argv[1], "w").close()
    time.sleep(1000)
inner()
"""


@contextlib.contextmanager
def started(*words: str, ready: Path, **environ: str) -> Iterator[int]:
    """A program from the moment when it has made its file; its pid."""
    with subprocess.Popen(words, env={**os.environ, **environ}, start_new_session=True) as process:
        try:
            until(ready.exists, 60)
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[int]:
    ready, script = tmp_path / "ready", tmp_path / "train.py"
    script.write_text(SLEEPING)
    with started(sys.executable, str(script), str(ready), ready=ready) as pid:
        until(lambda: is_asleep(pid))
        yield pid


def is_asleep(pid: int) -> bool:
    process = processes.find(pid)
    return process is not None and process.state == "S"


def stacks_of(pid: int, what: Sight = "stacks") -> RankStacks:
    (found,) = take_stacks(Look(1, what), [RankStatus(3, 1, pid)])
    assert (found.rank, found.local_rank) == (3, 1)
    return found


def names(found: RankStacks) -> list[tuple[str, int]]:
    return [(frame.function, frame.line) for frame in found.threads[0].frames]


@pytest.mark.needs_package("py-spy")
def test_a_python_process_shows_its_stack_and_its_system_call(sleeping: int) -> None:
    found = stacks_of(sleeping)
    assert (found.pid, found.problem, found.state) == (sleeping, "", "S")
    assert names(found) == [("inner", 5), ("<module>", 6)]
    assert found.threads[0].is_main
    assert found.threads[0].call == "clock_nanosleep"
    assert found.cpu_share < 0.5


@pytest.mark.needs_package("py-spy")
def test_native_frames_are_shown_and_the_process_goes_on(sleeping: int) -> None:
    found = stacks_of(sleeping, "native")
    functions = [name for name, _ in names(found)]
    assert functions.index("inner") > 0, found
    assert is_asleep(sleeping)


@pytest.mark.needs_package("py-spy")
def test_a_stopped_process_shows_its_stack_and_stays_stopped(sleeping: int) -> None:
    os.kill(sleeping, signal.SIGSTOP)
    until(lambda: not is_asleep(sleeping))
    looks: tuple[Sight, ...] = ("stacks", "native")
    for what in looks:
        found = stacks_of(sleeping, what)
        assert (found.state, names(found)[0]) == ("T", ("inner", 5))
    process = processes.find(sleeping)
    assert process is not None
    assert process.state == "T"


@pytest.mark.needs_package("py-spy")
def test_below_a_wrapper_the_python_process_is_looked_at(tmp_path: Path) -> None:
    ready, script = tmp_path / "ready", tmp_path / "train.py"
    script.write_text(SLEEPING)
    command = f"{sys.executable} {script} {ready}; true"
    with started("/bin/sh", "-c", command, ready=ready) as pid:
        until(lambda: all(map(is_asleep, processes.children(pid))))
        found = stacks_of(pid)
        assert (found.pid, found.problem, names(found)[0]) == (pid, "", ("inner", 5))


def test_a_program_without_python_shows_the_view_of_the_kernel(tmp_path: Path) -> None:
    fifo, ready = tmp_path / "fifo", tmp_path / "ready"
    os.mkfifo(fifo)
    with started("/bin/sh", "-c", f"touch {ready}; exec cat {fifo}", ready=ready) as pid:
        until(lambda: stacks_of(pid).threads[0].call == f"openat({fifo})")
        assert stacks_of(pid).problem == "it is no Python process"


def test_a_process_that_has_ended_has_no_pid() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        until(lambda: (found := processes.find(process.pid)) is not None and found.state == "Z")
        assert stacks_of(process.pid).pid == 0


def with_py_spy(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this script is the py-spy that is found first."""
    script = folder / "py-spy"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    "text, problem",
    [
        ("echo Permission Denied: try sudo >&2; exit 1", "py-spy may not read the process"),
        ("echo 'Error: odd\n\nStack backtrace:\n  0: x' >&2; exit 1", "py-spy says: Error: odd"),
        ("echo '[{}]'", "py-spy cannot be used: 'frames'"),
        ("exec sleep 60", "py-spy gave no answer within 1.5 s"),
    ],
)
def test_where_py_spy_fails_the_kernel_is_asked_and_the_reason_is_told(
    text: str, problem: str, sleeping: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_py_spy(tmp_path, text, monkeypatch)
    begin = time.monotonic()
    found = stacks_of(sleeping)
    assert time.monotonic() - begin < TAKE_S
    assert found.problem.startswith(problem)
    assert (names(found), found.threads[0].call) == ([], "clock_nanosleep")


def test_without_py_spy_one_is_told_how_to_install_it(
    sleeping: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = stacks_of(sleeping)
    assert found.problem == "py-spy is not installed here: pip install py-spy"
    assert found.threads[0].call == "clock_nanosleep"


def test_a_taker_that_hangs_is_ended_and_leaves_no_process(
    sleeping: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    before = processes.children(os.getpid())
    (found,) = take_stacks(Look(1, "stacks"), [RankStatus(0, 0, sleeping)], 0.2)
    assert found.problem == "the process that takes stacks gave no answer in time"
    assert processes.children(os.getpid()) == before


@pytest.mark.needs_package("py-spy")
@pytest.mark.parametrize("count, hangs", [(64, False), (24, True)])
def test_the_stacks_of_many_processes_are_there_in_time(
    *, count: int, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where py-spy hangs for each of them: then the kernel's view is."""
    script = tmp_path / "train.py"
    script.write_text(SLEEPING)
    if hangs:
        with_py_spy(tmp_path, "exec sleep 60", monkeypatch)
    with contextlib.ExitStack() as stack:
        files = [tmp_path / f"ready-{number}" for number in range(count)]
        pids = [
            stack.enter_context(started(sys.executable, str(script), str(file), ready=file)) for file in files
        ]
        begin = time.monotonic()
        found = list(take_stacks(Look(1, "stacks"), [RankStatus(at, at, pid) for at, pid in enumerate(pids)]))
        took_s = time.monotonic() - begin
    assert sorted(one.rank for one in found) == list(range(count))
    assert {bool(one.problem) for one in found} == {hangs}
    assert {one.threads[0].call for one in found} == {"clock_nanosleep"}
    assert took_s < TAKE_S


RECORDED = """
import os, sys, time
import torch, torch.distributed as dist
from torch.distributed.elastic.control_plane import worker_main
@worker_main()
def main():
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    open(sys.argv[1], "w").close()
    time.sleep(1000)
main()
"""


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_the_flight_recorder_of_torch_tells_the_last_collective(tmp_path: Path) -> None:
    ready, script = tmp_path / "ready", tmp_path / "train.py"
    script.write_text(RECORDED)
    with started(
        *(sys.executable, str(script), str(ready)),
        ready=ready,
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        TORCH_WORKER_SERVER_SOCKET=str(tmp_path / "socket"),
        TORCH_FR_BUFFER_SIZE="100",
    ) as pid:
        found = stacks_of(pid)
    assert (found.collective, found.sequence, found.process_group) == ("all_reduce", 3, "default_pg")


def dsl_stacks(dsl: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(dsl.with_name("dsl-stacks")), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def test_a_job_without_python_is_explained_by_the_kernel(
    dsl_command: Path, testchild: Path, tmp_path: Path, temporary: Path
) -> None:
    program = [str(testchild), "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 2, program), tmp_path) as job:
        pids = job.ready(2)
        result = dsl_stacks(dsl_command, str(job.guard), "--json")
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert (found["schema"], found["missing"]) == (1, [])
        assert found["explanation"].startswith("all 2 ranks are in ")
        ranks = [one["RankStacks"] for one in found["nodes"][0]["ranks"]]
        assert {str(one["rank"]): one["pid"] for one in ranks} == pids
        assert {one["problem"] for one in ranks} == {"it is no Python process"}


def test_without_a_job_there_is_one_line(
    dsl_command: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    result = dsl_stacks(dsl_command)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "dsl-stacks: error: no job of this user runs on this machine\n"
