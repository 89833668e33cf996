"""The library face beside other things to wait for: a descriptor that tells of events, and waits that are woken."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.group import Group

from dsl import Ended, EngineError, Event, Exited, LaunchSpec, Started, Supervisor, WorkerSpec

pytestmark = pytest.mark.engine

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
    """Everything that is told to someone who waits in select alone; no look is in vain."""
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


def test_nothing_is_readable_while_nothing_happens(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]]) as group:
        assert is_readable(group.supervisor, LIMIT_S)
        group.all_started()
        assert not is_readable(group.supervisor)
        assert group.supervisor.wait(0) == []
        group.supervisor.kill()
        assert is_readable(group.supervisor, LIMIT_S)
        group.finish()
        assert not is_readable(group.supervisor)


def test_the_descriptor_sleeps_through_what_the_last_wait_slept_through(
    testchild: Path, tmp_path: Path, supervisor: Supervisor
) -> None:
    go = tmp_path / "go"
    assert supervisor.wait(0, routine=False) == []
    workers = [
        WorkerSpec([str(testchild), "touch", str(tmp_path / "up"), "wait", str(go), "exit", "0"]),
        WorkerSpec([str(testchild), "pause"]),
    ]
    supervisor.start(LaunchSpec(workers))
    until((tmp_path / "up").exists)
    assert not is_readable(supervisor)
    assert supervisor.wait(0, routine=False) == []
    supervisor.kill()
    batches = poll_to_the_end(supervisor, routine=False)
    assert {event.worker for event in batches[0] if isinstance(event, Started)} == {0, 1}


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


def test_a_wake_before_the_wait_is_not_lost_and_ends_only_one(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]]) as group:
        group.all_started()
        supervisor = group.supervisor
        supervisor.wake()
        supervisor.wake()
        assert not is_readable(supervisor), "a wake is no event"
        assert supervisor.wait(None) == []
        assert supervisor.wait(0) == []
        answers: list[list[Event]] = []
        waiter = threading.Thread(target=lambda: answers.append(supervisor.wait(None)))
        waiter.start()
        until(lambda: is_waiting(waiter))
        assert answers == []
        supervisor.wake()
        waiter.join(LIMIT_S)
        assert answers == [[]]


def test_events_keep_when_a_wait_is_woken(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]]) as group:
        assert is_readable(group.supervisor, LIMIT_S)
        group.supervisor.wake()
        assert group.supervisor.wait(LIMIT_S) == []
        assert [type(event) for event in group.supervisor.wait(LIMIT_S)] == [Started]


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
