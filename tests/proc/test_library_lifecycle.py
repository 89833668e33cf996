"""The library face: what happens to a group is told completely, once, and in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.group import Group

from dsl import (
    Ended,
    EngineError,
    Event,
    Exited,
    Killing,
    LaunchSpec,
    Started,
    Stopping,
    Supervisor,
    WorkerSpec,
)

pytestmark = pytest.mark.engine


def test_each_worker_starts_once_ends_once_and_the_group_ends_last(testchild: Path) -> None:
    with Group([[str(testchild), "exit", "0"]] * 20) as group:
        ended = group.finish()
    assert sorted(event.worker for event in group.of(Started)) == list(range(20))
    assert sorted(event.exit.worker for event in group.of(Exited)) == list(range(20))
    assert [type(event) for event in group.events].count(Ended) == 1
    for worker in range(20):
        started = next(i for i, e in enumerate(group.events) if isinstance(e, Started) and e.worker == worker)
        exited = next(
            i for i, e in enumerate(group.events) if isinstance(e, Exited) and e.exit.worker == worker
        )
        assert started < exited
    assert (ended.first_failure, ended.stop_signal, ended.stragglers, ended.survivors) == (None, None, 0, ())


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


def test_a_signal_death_is_told_as_one(testchild: Path) -> None:
    with Group([[str(testchild), "raise", "SEGV"]]) as group:
        ended = group.finish()
    assert ended.first_failure is not None
    assert (ended.first_failure.code, ended.first_failure.signal, ended.first_failure.status) == (
        None,
        11,
        139,
    )


def test_a_failure_stops_the_others_and_they_are_victims(testchild: Path) -> None:
    workers = [[str(testchild), "pause"]] * 3 + [[str(testchild), "exit", "9"]]
    with Group(workers) as group:
        ended = group.finish()
    assert ended.first_failure is not None
    assert (ended.first_failure.worker, ended.first_failure.code) == (3, 9)
    assert not ended.first_failure.caused_by_stop
    assert ended.first_failure.order == 0
    (stopping,) = group.of(Stopping)
    assert (stopping.reason, stopping.signum, stopping.grace_s) == ("failure", signal.SIGTERM, 5.0)
    for worker in range(3):
        exit_ = group.exits()[worker]
        assert (exit_.signal, exit_.caused_by_stop) == (signal.SIGTERM, True)
    assert group.of(Killing) == []


def test_failures_may_be_only_reported(testchild: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    workers = [[str(testchild), "exit", "9"], [str(testchild), "wait", str(go), "exit", "0"]]
    with Group(workers, on_failure="report") as group:
        group.until(lambda now: 0 in now.exits())
        go.touch()
        ended = group.finish()
    assert group.exits()[1].code == 0
    assert group.of(Stopping) == []
    assert ended.first_failure is not None
    assert ended.first_failure.worker == 0


def test_stop_ends_the_obedient_at_once_and_the_deaf_at_the_deadline(testchild: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("deaf1", "deaf2")]
    deaf = [[str(testchild), "ignore", "TERM", "touch", str(file), "pause"] for file in files]
    with Group([[str(testchild), "pause"], *deaf], grace_s=60.0) as group:
        group.all_started()
        until(lambda: all(file.exists() for file in files))
        group.supervisor.stop(grace_s=2.0)
        group.until(lambda now: 0 in now.exits())
        assert group.of(Killing) == []
        ended = group.finish()
    (killing,) = group.of(Killing)
    assert sorted(killing.workers) == [1, 2]
    exits = group.exits()
    assert {worker: exit_.signal for worker, exit_ in exits.items()} == {
        0: signal.SIGTERM,
        1: signal.SIGKILL,
        2: signal.SIGKILL,
    }
    assert all(exit_.caused_by_stop for exit_ in exits.values())
    assert ended.first_failure is None
    assert group.of(Stopping)[0].reason == "request"


def test_a_second_stop_can_only_shorten_the_grace(testchild: Path, tmp_path: Path) -> None:
    deaf = [str(testchild), "ignore", "TERM", "touch", str(tmp_path / "deaf"), "pause"]
    with Group([deaf], grace_s=60.0) as group:
        until((tmp_path / "deaf").exists)
        group.supervisor.stop(grace_s=0.2)
        group.supervisor.stop(grace_s=50.0)
        group.finish(timeout_s=10.0)
    assert group.exits()[0].signal == signal.SIGKILL


def test_the_stop_signal_can_be_chosen(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]]) as group:
        group.all_started()
        group.supervisor.stop(signum=signal.SIGINT)
        group.finish()
    assert group.exits()[0].signal == signal.SIGINT


def test_a_stopped_worker_is_woken_to_end(testchild: Path) -> None:
    with Group([[str(testchild), "stop", "pause"]], grace_s=60.0) as group:
        pid = group.all_started()[0]
        until(lambda: (found := processes.find(pid)) is not None and found.state == "T")
        group.supervisor.stop()
        group.finish(timeout_s=10.0)
    assert group.exits()[0].signal == signal.SIGTERM
    assert group.of(Killing) == []


def test_stopping_and_continuing_is_not_an_exit(testchild: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Group([[str(testchild), "wait", str(go), "exit", "0"]]) as group:
        pid = group.all_started()[0]
        group.supervisor.signal(signal.SIGSTOP)
        until(lambda: (found := processes.find(pid)) is not None and found.state == "T")
        group.supervisor.signal(signal.SIGCONT)
        until(lambda: (found := processes.find(pid)) is not None and found.state != "T")
        assert group.exits() == {}
        go.touch()
        group.finish()
    assert group.exits()[0].code == 0


def test_signals_reach_one_worker_or_all_exactly_once(testchild: Path, tmp_path: Path) -> None:
    def worker(index: int) -> list[str]:
        trace = str(tmp_path / f"trace{index}")
        return [
            str(testchild),
            "catch",
            "USR1,USR2",
            "trace",
            trace,
            "touch",
            str(tmp_path / f"r{index}"),
            "pause",
        ]

    with Group([worker(index) for index in range(3)]) as group:
        until(lambda: all((tmp_path / f"r{index}").exists() for index in range(3)))
        group.supervisor.signal(signal.SIGUSR1, worker=1)
        until((tmp_path / "trace1").read_text)
        group.supervisor.signal(signal.SIGUSR2)
        until(lambda: all("12 " in (tmp_path / f"trace{index}").read_text() for index in range(3)))
        group.supervisor.kill()
        group.finish()
    numbers = [
        [line.split()[0] for line in (tmp_path / f"trace{index}").read_text().splitlines()]
        for index in range(3)
    ]
    assert numbers == [["12"], ["10", "12"], ["12"]]


def test_kill_needs_no_cooperation(testchild: Path, tmp_path: Path) -> None:
    deaf = [str(testchild), "ignore", "TERM,INT,HUP", "touch", str(tmp_path / "deaf.%p"), "pause"]
    with Group([deaf] * 4, grace_s=60.0) as group:
        until(lambda: len(list(tmp_path.glob("deaf.*"))) == 4)
        group.supervisor.kill()
        group.finish()
    assert {exit_.signal for exit_ in group.exits().values()} == {signal.SIGKILL}


def test_close_ends_what_runs_and_may_be_called_again(testchild: Path) -> None:
    group = Group([[str(testchild), "pause"]] * 3, grace_s=60.0)
    pids = group.all_started().values()
    found = [processes.find(pid) for pid in pids]
    group.supervisor.close()
    assert not any(process and processes.alive(process) for process in found)
    group.supervisor.close()


def test_one_supervisor_runs_group_after_group(testchild: Path) -> None:
    supervisor = Supervisor()
    try:
        for code in (3, 4):
            supervisor.start(LaunchSpec([WorkerSpec([str(testchild), "exit", str(code)])]))
            events: list[Event] = []
            while not (events and isinstance(events[-1], Ended)):
                events += supervisor.wait(10.0)
            assert events[-1].first_failure is not None
            assert events[-1].first_failure.code == code
    finally:
        supervisor.close()


def test_waiting_returns_nothing_when_nothing_happens(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]]) as group:
        group.all_started()
        begin = time.monotonic()
        assert group.supervisor.wait(0.05) == []
        assert time.monotonic() - begin >= 0.05


@pytest.mark.guarantee("G1")
def test_what_a_worker_leaves_behind_is_ended_and_counted(testchild: Path, tmp_path: Path) -> None:
    """Embedded too, a descendant in its own session goes with the group."""
    pid_file = tmp_path / "left"
    left = ["setsid", "ignore", "TERM,INT,HUP", "touch", str(pid_file), "pause"]
    with Group([[str(testchild), "child", "[", *left, "]", "wait", str(pid_file), "exit", "0"]]) as group:
        ended = group.finish()
    assert ended.stragglers == 1
    assert ended.survivors == ()
    process = processes.find(int(pid_file.read_text()))
    assert process is None or not processes.alive(process)


def test_no_descriptor_is_left_open_by_a_group(testchild: Path) -> None:
    def run() -> None:
        with Group([[str(testchild), "exit", "0"]] * 10) as group:
            group.finish()

    run()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run()
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_ends_the_group_and_frees_a_thread_that_waits(testchild: Path) -> None:
    with Group([[str(testchild), "ignore", "TERM", "pause"]]) as group:
        (pid,) = group.all_started().values()
        answers: list[list[Event]] = []
        waiter = threading.Thread(target=lambda: answers.append(group.supervisor.wait()))
        waiter.start()
        until(lambda: _is_waiting(waiter))
        group.supervisor.close()
        assert processes.find(pid) is None
        waiter.join(10)
        assert not waiter.is_alive()


def _is_waiting(thread: threading.Thread) -> bool:
    """True once the thread sleeps in the kernel's poll."""
    wchan = Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()
    return "poll" in wchan


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
