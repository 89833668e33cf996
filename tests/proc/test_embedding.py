"""The engine inside somebody else's Python: it takes what it started, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.group import Group
from tests.support.jobs import TOKEN

from dsl import (
    BindingError,
    Ended,
    EngineError,
    Event,
    Exited,
    LaunchSpec,
    SpecError,
    Started,
    Supervisor,
    WorkerSpec,
)

pytestmark = pytest.mark.engine

PROGRAMS = Path(__file__).resolve().parent.parent / "workers"


def _program(name: str, *arguments: str, token: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, TOKEN: token},
    )


def test_children_handlers_and_mask_of_the_caller_are_left_alone(testchild: Path) -> None:
    """Its own child's code is not stolen, another child in its own session is not taken for a leftover of ours."""
    words = ["child", "[", "setsid", "pause", "]", "exit", "0"]
    output, errors = _program("embed_signals.py", str(testchild), *words).communicate(timeout=20)
    assert output == "code 17 alive True heard [1] same True\n", errors


def test_an_interrupt_is_served_within_50_ms(testchild: Path, tmp_path: Path) -> None:
    """The caller waits without a limit and no event comes: only the signal can wake it."""
    delays_ms = []
    for run in range(9):
        ready = tmp_path / f"ready{run}"
        program = _program("embed_interrupt.py", str(ready), str(testchild), "pause")
        until(ready.exists)
        begin_ns = time.monotonic_ns()
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=20)
        assert program.returncode == 0, errors
        delays_ms.append((int(output) - begin_ns) / 1e6)
    assert median(delays_ms) < 50


def _host(action: str, testchild: Path) -> list[str]:
    """What a program says that does this with a worker that pauses (`embed_host.py`)."""
    program = _program("embed_host.py", action, str(testchild), "pause")
    try:
        output, errors = program.communicate(timeout=30)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 0, errors
    return output.splitlines()


def test_the_program_may_change_its_user_and_groups(testchild: Path) -> None:
    """The C library asks every thread by a signal of its own, which none of ours may block."""
    assert _host("regroup", testchild) == ["changed"]


def test_a_handler_that_runs_while_one_waits_has_the_callers_mask(testchild: Path) -> None:
    """A child that it starts inherits the mask: with all signals blocked nothing but SIGKILL would end it."""
    assert _host("handle", testchild) == ["child -15 masks True"]


def test_a_forked_child_is_told_that_the_supervisor_is_not_its_own(testchild: Path) -> None:
    text = "this supervisor belongs to the process that made it, and is of no use in a forked child: make another"
    assert _host("fork", testchild) == [text, "parent 0"]


def test_a_supervisor_that_nobody_closed_holds_up_no_other_thread(testchild: Path) -> None:
    assert _host("forget", testchild) == ["went on True"]


def test_waiting_without_a_group_is_an_error_and_not_for_ever(testchild: Path) -> None:
    supervisor = Supervisor()
    try:
        for _ in range(2):
            with pytest.raises(EngineError, match="runs no group: call start first"):
                supervisor.wait()
            assert supervisor.wait(0) == []
            supervisor.wake()
            assert supervisor.wait() == [], "a wake is an answer"
            supervisor.start(LaunchSpec([WorkerSpec([str(testchild), "exit", "0"])]))
            events: list[Event] = []
            while not (events and isinstance(events[-1], Ended)):
                events += supervisor.wait()
    finally:
        supervisor.close()


def test_other_threads_run_while_one_waits(testchild: Path) -> None:
    """The GIL is released: a thread counts on while the main thread waits for an event that does not come."""
    counted = threading.Event()
    with Group([[str(testchild), "pause"]]) as group:
        group.all_started()
        thread = threading.Thread(target=counted.set)
        threading.Timer(0.05, thread.start).start()
        group.supervisor.wait(0.5)
        assert counted.wait(5)
        thread.join()


def test_another_thread_may_stop_what_one_waits_for(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]] * 2, grace_s=60.0) as group:
        group.all_started()
        timer = threading.Timer(0.1, group.supervisor.stop)
        timer.start()
        events: list[Event] = []
        while not (events and isinstance(events[-1], Ended)):
            events += group.supervisor.wait()
        timer.join()


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("manner", ["fall-off", "raise", "exit", "kill"])
def test_the_group_ends_with_the_program_that_started_it(
    manner: str, testchild: Path, tmp_path: Path
) -> None:
    """Without close(), by an exception, even by SIGKILL: the workers do not outlive their owner."""
    token = f"{manner}-{os.getpid()}-{time.monotonic_ns()}"
    program = _program("embed_exit.py", manner, str(testchild), "pause", token=token)
    program.communicate(timeout=20)
    assert program.returncode == {"fall-off": 0, "raise": 1, "exit": 3, "kill": -9}[manner]
    until(lambda: not processes.carrying(f"{TOKEN}={token}"), timeout_s=10)


def test_ignored_child_signals_never_turn_a_failure_into_success(testchild: Path) -> None:
    """With SIGCHLD ignored the kernel throws exit codes away: the group is refused before it starts."""
    output, errors = _program(
        "embed_exit.py", "child-ignored", str(testchild), "sleep", "50", "exit", "9"
    ).communicate(timeout=20)
    assert output.startswith("refused: SIGCHLD is ignored in this process"), output + errors


def _children() -> Sequence[int]:
    return processes.children(os.getpid())


def _start(make: Callable[[str], LaunchSpec], program: str) -> None:
    supervisor = Supervisor()
    try:
        supervisor.start(make(program))
    finally:
        supervisor.close()


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "make",
    [
        lambda program: LaunchSpec([]),
        lambda program: LaunchSpec([WorkerSpec([])]),
        lambda program: LaunchSpec([WorkerSpec([""])]),
        lambda program: LaunchSpec([WorkerSpec([program, "a\0b"])]),
        lambda program: LaunchSpec([WorkerSpec([program], env={"A\0B": "1"})]),
        lambda program: LaunchSpec([WorkerSpec([program], env={"A=B": "1"})]),
        lambda program: LaunchSpec([WorkerSpec([program], env={"": "1"})]),
        lambda program: LaunchSpec([WorkerSpec([program], cwd="a\0b")]),
        lambda program: LaunchSpec([WorkerSpec([program])], grace_s=-1.0),
        lambda program: LaunchSpec([WorkerSpec([program])], grace_s=float("nan")),
        lambda program: LaunchSpec([WorkerSpec([program], foreground=True)] * 2),
    ],
    ids=[
        "no-workers",
        "no-argv",
        "empty-program",
        "nul-argument",
        "nul-name",
        "equals-name",
        "empty-name",
        "nul-cwd",
        "negative-grace",
        "nan-grace",
        "two-foreground",
    ],
)
def test_a_spec_that_cannot_work_is_refused_before_anything_starts(
    make: Callable[[str], LaunchSpec], testchild: Path
) -> None:
    before = _children()
    with pytest.raises((SpecError, ValueError)) as caught:
        _start(make, str(testchild))
    assert str(caught.value)
    assert "\n" not in str(caught.value)
    assert _children() == before


def test_cpus_that_are_not_ours_are_refused_before_anything_starts(testchild: Path) -> None:
    before = _children()
    with pytest.raises(BindingError, match="4000"):
        Group([[str(testchild), "pause"], WorkerSpec([str(testchild)], cpus=[4000])])
    assert _children() == before


def test_memory_nodes_that_do_not_exist_are_refused(testchild: Path) -> None:
    with pytest.raises(BindingError, match="1000"):
        Group([WorkerSpec([str(testchild)], mempolicy=("bind", [1000]))])


def test_a_worker_is_bound_before_its_first_instruction(testchild: Path, tmp_path: Path) -> None:
    import json

    cpu = min(os.sched_getaffinity(0))
    dump = tmp_path / "dump"
    spec = WorkerSpec([str(testchild), "dump", str(dump)], cpus=[cpu], mempolicy=("preferred", [0]))
    before = os.sched_getaffinity(0)
    with Group([spec]) as group:
        assert group.finish().first_failure is None
    state = json.loads(dump.read_text())
    assert state["Cpus_allowed_list"] == str(cpu)
    assert state["memory_policy"] == [1, 0]
    assert os.sched_getaffinity(0) == before


def test_environment_is_laid_over_the_groups_and_ours_is_the_default(
    testchild: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    monkeypatch.setenv("OURS", "1")
    dumps = [tmp_path / "default", tmp_path / "given"]
    for path, group_env in zip(dumps, (None, {"A": "group", "B": "group"}), strict=True):
        spec = WorkerSpec([str(testchild), "dump", str(path)], env={"B": "worker"})
        with Group([spec], env=group_env) as group:
            group.finish()
    default, given = (
        dict(entry.split("=", 1) for entry in json.loads(path.read_text())["env"]) for path in dumps
    )
    assert (default["OURS"], default["B"]) == ("1", "worker")
    assert {name: value for name, value in given.items() if not name.startswith("DSL_")} == {
        "A": "group",
        "B": "worker",
    }


def test_workers_are_added_to_a_group_that_stays_open(testchild: Path) -> None:
    with Supervisor() as supervisor:
        worker = WorkerSpec([str(testchild), "exit", "3"])
        with pytest.raises(EngineError, match="no worker can be added: this supervisor runs no group"):
            supervisor.add(worker)
        supervisor.start(LaunchSpec((), on_failure="report", grace_s=5.0, stays_open=True, at_once=1))
        assert [supervisor.add(worker) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(SpecError, match="worker 3: descriptor 2"):
            supervisor.add(WorkerSpec(["true"], keep_fds=(2,)))
        happened: list[tuple[str, int]] = []
        while len(happened) < 6:
            for event in supervisor.wait(20):
                if isinstance(event, Exited):
                    happened.append(("end", event.exit.worker))
                elif isinstance(event, Started):
                    happened.append(("start", event.worker))
        assert happened == [(what, worker) for worker in range(3) for what in ("start", "end")]
        supervisor.stop()
        with pytest.raises(EngineError, match="or the group is ending"):
            supervisor.add(worker)
        while not isinstance(supervisor.wait(20)[-1], Ended):
            pass


def test_bytes_arguments_and_a_working_directory(testchild: Path, tmp_path: Path) -> None:
    import json

    dump = tmp_path / "dump"
    raw = bytes(range(1, 256))
    with Group([WorkerSpec([str(testchild), "dump", str(dump), b"--" + raw], cwd=tmp_path)]) as group:
        group.finish()
    state = json.loads(dump.read_text())
    assert state["argv"][-1].encode("latin-1") == b"--" + raw
    assert state["cwd"] == str(tmp_path)
