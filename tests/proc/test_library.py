"""The library face beside other things of a program: what it tells, how it is waited for, what it leaves alone, and that it sleeps.

How a group is stopped and what it leaves is held by the tests of the engine in rust/engine/tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.group import Group
from tests.support.jobs import TOKEN, Helpers, is_still, started_program

from dsl import (
    BindingError,
    Ended,
    EngineError,
    Event,
    Exited,
    LaunchSpec,
    SpecError,
    Started,
    Stdio,
    Supervisor,
    WorkerSpec,
)

pytestmark = pytest.mark.engine


def test_children_handlers_and_mask_of_the_caller_are_left_alone(testchild: Path) -> None:
    """Its own child's code is not stolen, another child in its own session is not taken for a leftover of ours."""
    words = ["child", "[", "setsid", "pause", "]", "exit", "0"]
    output, errors = started_program("embed_host.py", "beside", str(testchild), *words).communicate(
        timeout=20
    )
    assert output == "code 17 alive True heard [1] same True\n", errors


OWNED = (
    "this supervisor belongs to the process that made it, and is of no use in a forked child: make another"
)


@pytest.mark.parametrize(
    "action, said",
    [
        # The C library asks every thread by a signal of its own, which none of ours may block.
        ("regroup", ["changed"]),
        # A child that a handler starts inherits the mask: with all signals blocked nothing but SIGKILL would end it.
        ("handle", ["child -15 masks True"]),
        ("fork", [OWNED, "parent 0"]),
        # One that nobody closes holds up no other thread.
        ("forget", ["went on True"]),
    ],
)
def test_a_program_does_with_a_supervisor_what_it_does_without(
    action: str, said: list[str], testchild: Path
) -> None:
    """With a worker that pauses (`embed_host.py`)."""
    program = started_program("embed_host.py", action, str(testchild), "pause")
    try:
        output, errors = program.communicate(timeout=30)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 0, errors
    assert output.splitlines() == said


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


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("manner", ["fall-off", "raise", "exit", "kill"])
def test_the_group_ends_with_the_program_that_started_it(
    manner: str, testchild: Path, tmp_path: Path
) -> None:
    """Without close(), by an exception, even by SIGKILL: the workers do not outlive their owner."""
    token = f"{manner}-{os.getpid()}-{time.monotonic_ns()}"
    program = started_program("embed_host.py", manner, str(testchild), "pause", token=token)
    program.communicate(timeout=20)
    assert program.returncode == {"fall-off": 0, "raise": 1, "exit": 3, "kill": -9}[manner]
    until(lambda: not processes.carrying(f"{TOKEN}={token}"), timeout_s=10)


def test_ignored_child_signals_never_turn_a_failure_into_success(testchild: Path) -> None:
    """With SIGCHLD ignored the kernel throws exit codes away: the group is refused before it starts."""
    output, errors = started_program(
        "embed_host.py", "refuse", str(testchild), "sleep", "50", "exit", "9"
    ).communicate(timeout=20)
    assert output.startswith("refused: SIGCHLD is ignored in this process"), output + errors


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "kind, why, other",
    [
        (SpecError, "empty argv", []),
        (BindingError, "4000", WorkerSpec(["x"], cpus=[4000])),
        (BindingError, "1000", WorkerSpec(["x"], mempolicy=("bind", [1000]))),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    kind: type[Exception], why: str, other: WorkerSpec | list[str], testchild: Path
) -> None:
    before = processes.children(os.getpid())
    with pytest.raises(kind, match=why):
        Group([[str(testchild), "pause"], other])
    assert processes.children(os.getpid()) == before


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


LIMIT_S = 20.0


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    one = Supervisor()
    yield one
    one.close()


def is_readable(supervisor: Supervisor, timeout_s: float = 0.0) -> bool:
    return bool(select.select([supervisor], [], [], timeout_s)[0])


def is_waiting(thread: threading.Thread) -> bool:
    """True once the thread sleeps in the kernel's poll."""
    return "poll" in Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()


def poll_to_the_end(supervisor: Supervisor, *, routine: bool) -> list[list[Event]]:
    """All events that a program gets which waits with select alone. Each wake-up brings some."""
    batches: list[list[Event]] = []
    while not (batches and isinstance(batches[-1][-1], Ended)):
        assert is_readable(supervisor, LIMIT_S), batches
        batches.append(supervisor.wait(0, routine=routine))
        assert batches[-1] != [], "readable, but nothing to take"
    return batches


def test_whoever_polls_hears_of_every_event_and_never_in_vain(
    testchild: Path, supervisor: Supervisor
) -> None:
    for _ in range(2):
        supervisor.start(LaunchSpec([WorkerSpec([str(testchild), "exit", "0"])] * 20))
        events = [event for batch in poll_to_the_end(supervisor, routine=True) for event in batch]
        assert sorted(event.worker for event in events if isinstance(event, Started)) == list(range(20))
        assert sorted(event.exit.worker for event in events if isinstance(event, Exited)) == list(range(20))
        assert not is_readable(supervisor)
        assert supervisor.wait(0) == []


def test_an_event_loop_reads_it_beside_a_pipe(
    testchild: Path, tmp_path: Path, supervisor: Supervisor
) -> None:
    async def run() -> tuple[list[Event], bytes]:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        events: list[Event] = []
        said: list[bytes] = []
        read, write = os.pipe()

        def hear() -> None:
            events.extend(supervisor.wait(0))
            if events and isinstance(events[-1], Ended):
                ended.set()

        def read_pipe() -> None:
            said.append(os.read(read, 10))
            (tmp_path / "go").touch()

        loop.add_reader(supervisor.fileno(), hear)
        loop.add_reader(read, read_pipe)
        supervisor.start(
            LaunchSpec([WorkerSpec([str(testchild), "wait", str(tmp_path / "go"), "exit", "0"])])
        )
        os.write(write, b"go")
        try:
            await asyncio.wait_for(ended.wait(), LIMIT_S)
        finally:
            loop.remove_reader(supervisor.fileno())
            loop.remove_reader(read)
            os.close(read)
            os.close(write)
        return events, b"".join(said)

    events, said = asyncio.run(run())
    assert [type(event) for event in events] == [Started, Exited, Ended]
    assert said == b"go"


def test_a_signal_handler_wakes_the_wait_that_it_interrupts(testchild: Path) -> None:
    main = threading.main_thread()
    assert threading.current_thread() is main

    def interrupt() -> None:
        until(lambda: is_waiting(main))
        signal.pthread_kill(main.ident or 0, signal.SIGUSR1)

    with Group([[str(testchild), "pause"]]) as group:
        group.all_started()
        before = signal.signal(signal.SIGUSR1, lambda *_: group.supervisor.wake())
        other = threading.Thread(target=interrupt)
        other.start()
        try:
            assert group.supervisor.wait(None) == []
        finally:
            other.join()
            signal.signal(signal.SIGUSR1, before)


def test_closing_wakes_whoever_polls_and_ends_the_descriptor(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]]) as group:
        group.all_started()
        answers: list[bool] = []
        waiter = threading.Thread(target=lambda: answers.append(is_readable(group.supervisor, LIMIT_S)))
        waiter.start()
        until(lambda: is_waiting(waiter))
        group.supervisor.close()
        waiter.join(LIMIT_S)
        assert answers == [True]
        with pytest.raises(EngineError, match="closed"):
            group.supervisor.fileno()
        with pytest.raises(EngineError, match="closed"):
            group.supervisor.wait(0)
        group.supervisor.wake()


def test_an_exit_tells_code_times_and_resources(testchild: Path) -> None:
    before_ns = time.time_ns()
    with Group([[str(testchild), "alloc", "32", "exit", "7"]], on_failure="report") as group:
        group.finish()
    after_ns = time.time_ns()
    (exit_,) = group.exits().values()
    (started,) = group.of(Started)
    assert (exit_.worker, exit_.code, exit_.signal, exit_.status, exit_.core_dumped) == (0, 7, None, 7, False)
    assert (exit_.exec_stage, exit_.exec_errno, exit_.exec_path) == (None, None, None)
    assert exit_.pid == started.pid > 0
    assert before_ns <= exit_.started_ns <= exit_.ended_ns <= after_ns
    assert exit_.max_rss_bytes > 32 << 20
    assert 0 < exit_.cpu_user_s + exit_.cpu_system_s < (after_ns - before_ns) / 1e9 * 4


@pytest.mark.guarantee("G1")
def test_a_with_block_ends_what_runs_and_closes(testchild: Path) -> None:
    """However the block is left."""
    with Supervisor() as supervisor:
        supervisor.start(LaunchSpec([WorkerSpec([str(testchild), "ignore", "TERM", "pause"])]))
        (started,) = [event for event in supervisor.wait(10) if isinstance(event, Started)]
    assert not Path(f"/proc/{started.pid}").exists()
    with pytest.raises(EngineError):
        supervisor.wait(0)
    with pytest.raises(EngineError):
        supervisor.__enter__()
    with pytest.raises(KeyError, match="mine"), Supervisor() as supervisor:
        raise KeyError("mine")
    with pytest.raises(EngineError):
        supervisor.fileno()


def test_null_and_a_given_descriptor(testchild: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    read_end, write_end = os.pipe()
    try:
        spec = WorkerSpec(
            [str(testchild), "dump", str(dump), "say", "to the pipe"],
            stdin=Stdio.null(),
            stdout=Stdio.fd(write_end),
            stderr=Stdio.null(),
        )
        with Group([spec]) as group:
            group.finish()
        assert os.read(read_end, 100) == b"to the pipe\n"
        os.fstat(write_end)
    finally:
        os.close(read_end)
        os.close(write_end)
    fds = json.loads(dump.read_text())["fds"]
    assert {fd: target for fd, (target, _) in fds.items() if fd != "1"} == {
        "0": "/dev/null",
        "2": "/dev/null",
    }


def test_only_stderr_can_follow_stdout(testchild: Path) -> None:
    with pytest.raises((SpecError, ValueError)):
        Group([WorkerSpec([str(testchild)], stdout=Stdio.stdout())])


@pytest.mark.linux_5_4
def test_guard_and_agent_sleep_while_the_workers_do(helpers: Helpers) -> None:
    with helpers(3, "note {}/ready '%r %p' pause") as job:
        job.ready(3)
        until(lambda: is_still(job.guard) and is_still(job.agent()))


@pytest.mark.linux_5_4
@pytest.mark.needs_pidfd
def test_the_engine_inside_a_program_sleeps_too(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]] * 3) as group:
        group.all_started()
        assert processes.processor_ns(os.getpid(), "dsl-engine") > 0  # there is such a thread
        until(lambda: is_still(os.getpid(), "dsl-engine"))
