"""`dsl-stacks`, and ``--stacks-on-failure``: what the ranks of a job do, looked at from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.events import a_plan
from tests.support.jobs import Helpers, Job, running, states
from tests.support.places import Nodes, free_port

from dsl.model.observation import Look, RankStacks, RankStatus, Sight
from dsl.view import lookout
from dsl.view.lookout import TAKE_S, take_stacks

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
        until(lambda: states([pid]) == {"S"})
        yield pid


def stacks_of(pid: int, what: Sight = "stacks") -> RankStacks:
    (found,) = take_stacks(Look(1, what), [RankStatus(3, 1, pid)])
    assert (found.rank, found.local_rank) == (3, 1)
    return found


def names(found: RankStacks) -> list[tuple[str, int]]:
    return [(frame.function, frame.line) for frame in found.threads[0].frames]


@pytest.mark.needs_package("py-spy")
def test_a_python_process_shows_its_stack_and_its_system_call_and_goes_on(sleeping: int) -> None:
    found = stacks_of(sleeping)
    assert (found.pid, found.problem, found.state) == (sleeping, "", "S")
    assert names(found) == [("inner", 5), ("<module>", 6)]
    assert found.threads[0].is_main
    assert found.threads[0].call == "clock_nanosleep"
    assert found.cpu_share < 0.5
    functions = [name for name, _ in names(stacks_of(sleeping, "native"))]
    assert functions.index("inner") > 0, functions
    assert states([sleeping]) == {"S"}


@pytest.mark.needs_package("py-spy")
def test_a_stopped_process_shows_its_stack_and_stays_stopped(sleeping: int) -> None:
    os.kill(sleeping, signal.SIGSTOP)
    until(lambda: states([sleeping]) == {"T"})
    looks: tuple[Sight, ...] = ("stacks", "native")
    for what in looks:
        found = stacks_of(sleeping, what)
        assert (found.state, names(found)[0]) == ("T", ("inner", 5))
    assert states([sleeping]) == {"T"}


@pytest.mark.needs_package("py-spy")
def test_below_a_wrapper_the_python_process_is_looked_at(tmp_path: Path) -> None:
    ready, script = tmp_path / "ready", tmp_path / "train.py"
    script.write_text(SLEEPING)
    command = f"{sys.executable} {script} {ready}; true"
    with started("/bin/sh", "-c", command, ready=ready) as pid:
        until(lambda: states(processes.children(pid)) <= {"S"})
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
        until(lambda: states([process.pid]) == {"Z"})
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


@pytest.mark.parametrize(
    "does, within_s, why", [("sleep 60", 0.2, "gave no answer in time"), ("true", 20.0, "was ended")]
)
def test_a_taker_that_hangs_or_dies_is_told_and_leaves_no_process(
    does: str, within_s: float, why: str, sleeping: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {does}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    before = processes.children(os.getpid())
    (found,) = take_stacks(Look(1, "stacks"), [RankStatus(0, 0, sleeping)], within_s)
    assert found.problem == f"the process that takes stacks {why}"
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


def test_a_job_without_python_is_explained_by_the_kernel(
    dsl_command: Path, temporary: Path, helpers: Helpers
) -> None:
    with helpers(2, "note {}/ready '%r %p' pause") as job:
        pids = job.ready(2)
        result = ran([dsl_command.with_name("dsl-stacks"), job.guard, "--json"], check=True)
        found = json.loads(result.stdout)
        assert (found["schema"], found["missing"]) == (1, [])
        assert found["explanation"].startswith("all 2 ranks are in ")
        ranks = [one["RankStacks"] for one in found["nodes"][0]["ranks"]]
        assert {str(one["rank"]): one["pid"] for one in ranks} == pids
        assert {one["problem"] for one in ranks} == {"it is no Python process"}


WORKER = """
import os, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
def wait_for_others():
    time.sleep(1000)
def tell():
    with open(f"{folder}/new-{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/new-{rank}", f"{folder}/ready-{rank}")
tell()
if rank != "1":
    wait_for_others()
while not os.path.exists(f"{folder}/fail"):
    time.sleep(0.02)
sys.exit(3)
"""
TOLD = "the others at that moment: all {} ranks are in sleep() (train.py:5)"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(WORKER)
    return path


def fail(folder: Path, ranks: int) -> None:
    """Let rank 1 fail when the other ranks sleep."""
    files = [folder / f"ready-{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() for file in files))
    pids = [int(file.read_text()) for rank, file in enumerate(files) if rank != 1]
    until(lambda: states(pids) == {"S"})
    (folder / "fail").touch()


@contextlib.contextmanager
def failing(dsl: Path, script: Path, *options: str) -> Iterator[Job]:
    """A job from the moment when its rank 1 fails."""
    line = [str(dsl), "--num_gpus", "3", "--no_local_rank", *options, str(script), str(script.parent)]
    with running(line, script.parent / "job") as job:
        fail(script.parent, 3)
        yield job


@pytest.mark.needs_package("py-spy")
def test_the_report_says_what_the_others_did(dsl_command: Path, script: Path) -> None:
    with failing(dsl_command, script, "--stacks-on-failure") as job:
        assert job.wait() == 3
    # What other jobs have in /dev/shm may cause a warning.
    lines = [line for line in job.stderr().splitlines() if "shared memory" not in line]
    assert lines[0].startswith("dsl: rank 1 (")
    assert "dsl: stopped by dsl: ranks 0,2 (SIGTERM)" in lines
    assert f"dsl: {TOLD.format(2)}" in lines
    assert any(line.endswith(f"wait_for_others ({script}:5)") for line in lines)


def test_a_look_that_the_end_of_the_attempt_cuts_off_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = RankStacks(1, 1, 7, problem=lookout.ENDED)
    monkeypatch.setattr(lookout, "take_stacks", lambda *_: iter([ended]))
    look = lookout.FailureLook(a_plan(2), [0, 7])
    assert select.select([look], [], [], 20)[0]
    assert look.stacks == ()
    look.close()


def test_without_the_option_nothing_is_looked_at(dsl_command: Path, script: Path) -> None:
    with failing(dsl_command, script) as job:
        assert job.wait() == 3
    assert "at that moment" not in job.stderr()


def test_a_look_that_hangs_delays_the_stop_by_three_seconds_at_most(
    dsl_command: Path, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_py_spy(tmp_path, "kill -STOP $PPID\nexec sleep 60", monkeypatch)
    with failing(dsl_command, script, "--stacks-on-failure") as job:
        begin = time.monotonic()
        assert job.wait() == 3
        assert 2 < time.monotonic() - begin < 4
    assert "gave no answer in time" in job.stderr()


@pytest.mark.needs_package("py-spy")
def test_a_job_with_restarts_looks_and_goes_on(dsl_command: Path, script: Path, tmp_path: Path) -> None:
    with failing(dsl_command, script, "--stacks-on-failure", "--max-restarts", "1") as job:
        first = (tmp_path / "ready-2").read_text()
        until(lambda: (tmp_path / "ready-2").read_text() != first)
        assert job.wait() == 3
    first, _, last = job.stderr().partition("starting all 3 workers again")
    assert TOLD.format(2) in first, first
    assert last.count("failed first") == 1


def test_a_signal_during_the_look_ends_the_job_at_once(
    dsl_command: Path, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_py_spy(tmp_path, f"touch {tmp_path}/looks\nexec sleep 60", monkeypatch)
    with failing(dsl_command, script, "--stacks-on-failure") as job:
        until((tmp_path / "looks").exists)
        job.process.terminate()
        begin = time.monotonic()
        assert job.wait() == 3
        assert time.monotonic() - begin < 1


@pytest.mark.needs_package("py-spy")
def test_the_ranks_of_other_nodes_are_told(nodes: Nodes, script: Path, tmp_path: Path) -> None:
    options = "--nproc-per-node=2 --stacks-on-failure"
    jobs: list[Job] = nodes.start(options, options, program=(str(script), str(tmp_path)))
    fail(tmp_path, 4)
    assert [job.wait() for job in jobs] == [3, 3]
    assert TOLD.format(3) in jobs[0].stderr(), jobs[0].stderr()


def test_a_signal_to_another_node_is_no_failure(nodes: Nodes, script: Path, tmp_path: Path) -> None:
    options = "--nproc-per-node=2 --stacks-on-failure"
    jobs: list[Job] = nodes.start(options, options, program=(str(script), str(tmp_path)))
    until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(4)))
    jobs[1].process.terminate()
    assert [job.wait() for job in jobs] == [143, 143]
    assert "at that moment" not in jobs[0].stderr()
