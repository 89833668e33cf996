"""Workers that a fork server forks: they start, run, end and die as executed ones do, and the server is nobody's victim."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Any

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.fork_server import Command, forked, leaver, server, server_pids
from tests.support.group import Group
from tests.support.jobs import states

from dsl import (
    Ended,
    Exited,
    ForkServerLost,
    ForkServerReady,
    ForkServerSlow,
    SpecError,
    Started,
    Stdio,
    Stopping,
    WorkerSpec,
)
from dsl._core import kernel_interfaces

pytestmark = [pytest.mark.engine, pytest.mark.linux_5_4]

FORKS = not kernel_interfaces()["pidfd"]
"""Without pidfds every worker is executed, and all that is said here holds all the same, but for who its parent is."""
needs_forks = pytest.mark.skipif(not FORKS, reason="needs a kernel with pidfds")


def parents(group: Group) -> set[int]:
    """Who has started the workers of a group, which run."""
    found = [processes.find(pid) for pid in group.all_started().values()]
    return {process.ppid for process in found if process is not None}


@pytest.mark.parametrize("words", [["exit", "0"], ["exit", "7"], ["raise", "SEGV"], ["raise", "KILL"]])
def test_an_ending_is_told_as_of_an_executed_worker(testchild: Path, words: list[str]) -> None:
    told = []
    for worker in (forked(testchild, *words), WorkerSpec([str(testchild), *words])):
        with Group([worker], servers=[server()]) as group:
            ended = group.finish()
        exit_ = group.exits()[0]
        assert exit_.pid == group.of(Started)[0].pid
        assert (ended.first_failure is None) == (exit_.status == 0)
        told.append((exit_.code, exit_.signal, exit_.status, exit_.order, exit_.caused_by_stop))
    assert told[0] == told[1]


@needs_forks
def test_usage_is_told_by_who_waits_for_it(testchild: Path) -> None:
    with Group([forked(testchild, "alloc", "64", "exit", "0")], servers=[server()]) as group:
        group.finish()
    exit_ = group.exits()[0]
    assert exit_.max_rss_bytes > 64 << 20
    assert exit_.cpu_user_s + exit_.cpu_system_s > 0
    assert 0 < exit_.started_ns <= exit_.ended_ns


def state_of(worker: WorkerSpec, path: Path) -> dict[str, Any]:
    with Group([worker], servers=[server()]) as group:
        ended = group.finish()
    assert ended.first_failure is None, group.events
    state: dict[str, Any] = json.loads(path.read_text())
    assert state["pgid"] == state["pid"]
    for name in ("pid", "ppid", "pgid"):
        del state[name]
    token = next(entry for entry in state["env"] if entry.startswith("DSL_JOB_ID=")).rpartition("=")[2]
    state["env"] = sorted(entry.replace(token, "TOKEN") for entry in state["env"])
    state["cgroups"] = [line.replace(token, "TOKEN") for line in state["cgroups"]]
    return state


def test_a_worker_has_what_an_executed_one_has(testchild: Path, tmp_path: Path) -> None:
    """Streams, kept descriptors and no others, directory, CPUs, memory policy, limits, signals, environment."""
    read, write = os.pipe()
    kept = fcntl(write, F_DUPFD_CLOEXEC, 700)
    (tmp_path / "input").write_text("x")
    path = tmp_path / "state"
    cpu = min(os.sched_getaffinity(0))

    def state(server: int | None, entry: int) -> dict[str, Any]:
        worker = WorkerSpec(
            ["/usr/bin/env", str(testchild), "dump", str(path)],
            env={"OWN": "\udcff=="},
            cwd=tmp_path,
            stdin=Stdio.file(tmp_path / "input"),
            stdout=Stdio.file(tmp_path / "output", append=True),
            stderr=Stdio.stdout(),
            cpus=[cpu],
            mempolicy=("local", []),
            keep_fds=[kept, read],
            fork_server=server,
            fork_entry=entry,
        )
        return state_of(worker, path)

    plain, fork = state(None, 0), state(0, 1)
    for fd in (read, write, kept):
        os.close(fd)
    assert sorted(fork["fds"], key=int) == ["0", "1", "2", str(read), str(kept)]
    assert plain == fork


def test_an_unwatched_stream_a_pipe_and_a_log_are_the_workers_own(testchild: Path, tmp_path: Path) -> None:
    workers = [
        forked(testchild, "say", "to-pipe", stdout=Stdio.pipe()),
        forked(testchild, "say", "to-log", stdout=Stdio.log(tmp_path / "log")),
        forked(testchild, "complain", "to-file", stderr=Stdio.file(tmp_path / "file")),
    ]
    with Group(workers, servers=[server()]) as group:
        group.finish()
    output = [event for event in group.events if type(event).__name__ == "Output"]
    assert b"".join(event.data for event in output) == b"to-pipe\n"  # type: ignore[union-attr]
    assert (tmp_path / "log").read_text() == "to-log\n"
    assert (tmp_path / "file").read_text() == "to-file\n"


SHOW = """
import os
fds = [fd for fd in range(20) if os.path.lexists(f"/proc/self/fd/{fd}")]
import ctypes, json, pathlib, sys
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
shown = {
    "argv": sys.argv,
    "command": pathlib.Path("/proc/self/cmdline").read_bytes().decode(),
    "environ": pathlib.Path("/proc/self/environ").read_bytes().decode("latin-1"),
    "getenv": getenv(b"OWN").decode(),
    "inherited": os.popen("echo $OWN").read(),
    "fds": fds,
    "handlers": next(line for line in open("/proc/self/status") if line.startswith("SigCgt")),
    "blocked": next(line for line in open("/proc/self/status") if line.startswith("SigBlk")),
}
print(json.dumps(shown), flush=True)
"""


@needs_forks
def test_others_see_the_workers_command_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SHOW)
    worker = WorkerSpec(
        [sys.executable, str(path), "a b", ""],
        env={"OWN": "own value"},
        stdout=Stdio.file(tmp_path / "shown"),
        fork_server=0,
        fork_entry=1,
    )
    with Group([worker], servers=[server()]) as group:
        ended = group.finish()
    assert ended.first_failure is None
    shown = json.loads((tmp_path / "shown").read_text())
    assert shown["argv"] == [str(path), "a b", ""]
    assert shown["command"].split("\0") == [sys.executable, str(path), "a b", "", ""]
    assert "OWN=own value" in shown["environ"].split("\0")
    assert (shown["getenv"], shown["inherited"]) == ("own value", "own value\n")
    assert shown["fds"] == [0, 1, 2]
    assert {int(shown[name].split()[1], 16) for name in ("handlers", "blocked")} == {0}


@needs_forks
def test_a_worker_with_more_descriptors_than_an_order_takes_is_executed(testchild: Path) -> None:
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(248)]
    try:
        with Group([forked(testchild, keep_fds=kept)], servers=[server()]) as group:
            ended = group.finish()
    finally:
        for fd in kept:
            os.close(fd)
    assert ended.first_failure is None
    (lost,) = group.of(ForkServerLost)
    assert lost.text == "takes no orders: too many descriptors"


@pytest.mark.parametrize(
    "options, stage",
    [
        ({"cwd": "/absent"}, "chdir"),
        ({"stdin": Stdio.file("/absent")}, "stdio"),
        ({"keep_fds": [901]}, "stdio"),
    ],
)
def test_a_failed_step_is_named(testchild: Path, options: dict[str, Any], stage: str) -> None:
    workers = [
        forked(testchild, "pause"),
        forked(testchild, "exit", "0", **options),
        forked(testchild, "pause"),
    ]
    with Group(workers, servers=[server()]) as group:
        ended = group.finish()
    assert ended.first_failure is not None
    assert (ended.first_failure.worker, ended.first_failure.exec_stage) == (1, stage)
    assert sorted(group.exits()) == [0, 1, 2]
    assert all(group.exits()[worker].caused_by_stop for worker in (0, 2))


@needs_forks
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_worker_that_cannot_enter_ends_though_the_program_was_forked_meanwhile(testchild: Path) -> None:
    """The program's child holds a copy of our end of its gate: its closing is not heard."""
    workers = [forked(testchild, "pause"), forked(testchild, "pause"), forked(testchild, cwd="/absent")]
    with Group(workers, servers=[server("freeze@fork")]) as group:
        group.until(lambda group: len(group.of(Started)) == 2)
        (pid,) = server_pids()
        until(lambda: states([pid]) == {"T"})
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            os.kill(pid, signal.SIGCONT)
            ended = group.finish()
            assert (ended.stragglers, ended.survivors) == (0, ())
            until(lambda: processes.children(pid) == [])
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@needs_forks
def test_64_workers_are_children_of_the_server_and_another_group_has_the_same(testchild: Path) -> None:
    workers = [forked(testchild, "pause")] * 64
    with Group(workers, servers=[server()]) as group:
        assert parents(group) == set(server_pids())
        first = group.all_started()
        group.supervisor.stop()
        ended = group.finish()
        assert (ended.stragglers, ended.survivors, ended.first_failure) == (0, (), None)
        assert {exit_.signal for exit_ in group.exits().values()} == {15}
        servers = server_pids()
        group.again(workers)
        assert parents(group) == set(servers)
        assert not set(first.values()) & set(group.all_started().values())
        group.supervisor.kill()
        group.finish()
        assert server_pids() == servers
    assert server_pids() == []
    assert group.of(ForkServerLost) == []


def test_a_failure_stops_the_others_and_deaths_keep_their_order(testchild: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    workers = [
        forked(testchild, "pause"),
        forked(testchild, "touch", str(tmp_path / "pid"), "wait", str(gate), "exit", "5"),
        forked(testchild, "wait", str(tmp_path / "pid"), "waitpid", str(tmp_path / "pid"), "exit", "6"),
    ]
    with Group(workers, on_failure="report", servers=[server()]) as group:
        group.all_started()
        gate.touch()
        group.until(lambda group: len(group.of(Exited)) == 2)
        assert [event.exit.worker for event in group.of(Exited)] == [1, 2]
        group.supervisor.stop()
        ended = group.finish()
    assert ended.first_failure is not None
    assert (ended.first_failure.worker, ended.first_failure.code) == (1, 5)


@pytest.mark.parametrize("how", ["daemon", "child"])
def test_what_a_worker_leaves_behind_is_ended_and_the_server_is_not(
    testchild: Path, tmp_path: Path, how: str
) -> None:
    left = tmp_path / "left"
    worker = forked(
        testchild, how, "[", "setsid", "ignore", "TERM", "touch", str(left), "pause", "]", "wait", str(left)
    )
    with Group([worker], grace_s=0.3, servers=[server()]) as group:
        ended = group.finish()
        process = processes.find(int(left.read_text()))
        assert process is None or process.state in "ZX"
        assert (ended.stragglers, ended.survivors) == (1, ())
        if FORKS:
            servers = server_pids()
            group.again([forked(testchild, "pause")])
            assert parents(group) == set(servers)
            group.supervisor.kill()
            group.finish()


@needs_forks
def test_what_the_server_has_started_for_itself_ends_with_it_and_not_with_a_group(testchild: Path) -> None:
    with Group([forked(testchild, "pause")], servers=[server("helper")]) as group:
        group.all_started()
        (pid,) = server_pids()

        def helpers() -> list[processes.Process]:
            found = [processes.find(child) for child in processes.children(pid)]
            return [process for process in found if process is not None and process.name == "sleep"]

        (helper,) = until(helpers)
        group.supervisor.kill()
        ended = group.finish()
        assert (ended.stragglers, ended.survivors) == (0, ())
        assert processes.alive(helper)
        assert server_pids() == [pid]
    until(lambda: not processes.alive(helper))


@pytest.mark.parametrize(
    "mode, text",
    [
        ("refuse", "refused: it is poisoned by a thread"),
        ("exit", "ended with code 3: SomeError: no such module"),
        ("flood", "ended with code 3: SomeError: no such module (the end of 64 MiB of output)"),
        ("hang-up", "was ended by signal 9"),
        ("barren", "could not fork: Resource temporarily unavailable (os error 11)"),
        ("mute", "forked a worker that came to nothing"),
    ],
)
def test_without_a_server_the_workers_are_executed_and_told_why_once(
    testchild: Path, mode: str, text: str
) -> None:
    with Group([forked(testchild, "pause")] * 3, servers=[server(mode)]) as group:
        assert parents(group) == {os.getpid()}
        group.supervisor.stop()
        assert group.finish().survivors == ()
        lost = [event.text for event in group.of(ForkServerLost)]
        assert lost == [text if FORKS else "cannot be watched: this kernel has no pidfds"]
        group.again([forked(testchild, "exit", "0")])
        assert group.finish().first_failure is None
        assert group.of(ForkServerLost) == []


def test_a_server_that_cannot_be_executed_is_lost(testchild: Path) -> None:
    with Group([forked(testchild, "exit", "0")], servers=[["/absent/python"]]) as group:
        assert group.finish().first_failure is None
    (lost,) = group.of(ForkServerLost)
    assert lost.server == 0
    if FORKS:
        assert lost.text == "could not be started: /absent/python: No such file or directory (os error 2)"


@needs_forks
def test_what_a_server_writes_is_kept_in_no_file(testchild: Path) -> None:
    """It would lie in memory: an import that prints without end would take all of it."""
    with Group([forked(testchild, "pause")], servers=[server()]) as group:
        group.all_started()
        (pid,) = server_pids()
        assert [stat.S_ISFIFO(os.stat(f"/proc/{pid}/fd/{fd}").st_mode) for fd in (1, 2)] == [True, True]


@needs_forks
def test_a_server_that_is_stopped_while_it_imports_is_done_without(testchild: Path) -> None:
    """At the second look that finds it so: a debugger that stops it for a moment is no reason."""
    with Group([forked(testchild, "exit", "0")], servers=[server("freeze@ready")], slow_s=0.2) as group:
        ended = group.finish()
        assert (ended.first_failure, ended.survivors) == (None, ())
        assert [type(event) for event in group.events[:2]] == [ForkServerSlow, ForkServerLost]
        assert [event.text for event in group.of(ForkServerLost)] == ["was stopped and did not go on"]
        # It is killed when it is given up, and may end later than the group.
        until(lambda: not server_pids())


@needs_forks
def test_a_group_that_waits_for_its_server_can_be_stopped(testchild: Path) -> None:
    with Group(
        [forked(testchild, "exit", "0"), WorkerSpec([str(testchild), "exit", "0"])], servers=[server("never")]
    ) as group:
        until(server_pids)
        group.supervisor.stop()
        group.finish()
        assert {exit_.exec_stage for exit_ in group.exits().values()} == {"cancelled"}
        assert group.of(Started) == []
    assert server_pids() == []


@needs_forks
def test_a_server_killed_between_two_groups_is_missed_by_nobody(testchild: Path) -> None:
    with Group([forked(testchild, "exit", "0")], servers=[server()]) as group:
        group.finish()
        (pid,) = server_pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not server_pids())
        group.again([forked(testchild, "pause")])
        assert parents(group) == {os.getpid()}
        assert [event.text for event in group.of(ForkServerLost)] == ["was ended by signal 9"]
        group.supervisor.kill()
        group.finish()


@needs_forks
def test_a_server_that_is_killed_takes_its_workers_along_and_the_cause_is_told_first(testchild: Path) -> None:
    with Group([forked(testchild, "pause")] * 8, servers=[server()]) as group:
        group.all_started()
        (pid,) = server_pids()
        os.kill(pid, signal.SIGKILL)
        ended = group.finish()
    kinds = [type(event) for event in group.events]
    assert kinds.index(ForkServerLost) < kinds.index(Exited) < kinds.index(Stopping)
    assert {exit_.signal for exit_ in group.exits().values()} == {9}
    assert ended.first_failure is not None
    assert ended.survivors == ()


@needs_forks
def test_a_server_that_is_stopped_goes_on_when_its_workers_are_told_to_end(testchild: Path) -> None:
    """As stopped workers do: it alone knows how they end, and by what they used."""
    with Group([forked(testchild, "pause")] * 16, servers=[server()]) as group:
        group.all_started()
        (pid,) = server_pids()
        os.kill(pid, signal.SIGSTOP)
        group.supervisor.stop()
        assert group.finish().survivors == ()
        assert {exit_.signal for exit_ in group.exits().values()} == {signal.SIGTERM}
        assert group.of(ForkServerLost) == []


@needs_forks
def test_a_server_that_dies_while_it_forks_loses_no_worker(testchild: Path) -> None:
    """Those that it had forked may have started and died with it; the others are executed, or not started any more."""
    with Group([forked(testchild, "pause")] * 6, servers=[server("die@answer")]) as group:
        group.until(lambda group: bool(group.of(ForkServerLost)))
        group.supervisor.kill()
        assert group.finish().survivors == ()
        assert sorted(event.exit.worker for event in group.of(Exited)) == list(range(6))
        assert [event.text for event in group.of(ForkServerLost)] == ["was ended by signal 9"]


def test_a_foreground_worker_is_in_the_group_of_the_terminal(testchild: Path) -> None:
    workers = [forked(testchild, "stop", "pause", foreground=True), forked(testchild, "pause")]
    with Group(workers, servers=[server()]) as group:
        pids = group.all_started()
        assert [os.getpgid(pids[worker]) for worker in (0, 1)] == [os.getpgrp(), pids[1]]
        until(lambda: states([pids[0]]) == {"T"})
        group.supervisor.stop()
        group.finish()
    assert {exit_.signal for exit_ in group.exits().values()} == {15}


def test_a_server_that_nobody_has_started_is_refused(testchild: Path) -> None:
    with pytest.raises(SpecError, match="no fork server 0"):
        Group([forked(testchild, "exit", "0")])
    for entry in (0, 2):
        with pytest.raises(SpecError, match="fork_entry"):
            Group([WorkerSpec(["python", "x.py"], fork_server=0, fork_entry=entry)])


@needs_forks
def test_a_server_is_ready_before_its_first_worker_starts(testchild: Path) -> None:
    with Group([forked(testchild, "exit", "0")], servers=[server()]) as group:
        group.finish()
    assert [type(event) for event in group.events] == [ForkServerReady, Started, Exited, Ended]


@pytest.mark.parametrize("who", ["guard", "agent"])
def test_nothing_is_left_when_the_guard_or_the_agent_is_killed(
    testchild: Path, tmp_path: Path, who: str
) -> None:
    with Command(testchild, leaver(tmp_path / "left"), ["pause"]) as command:
        command.until_said("Started", 2)
        until((tmp_path / "left").exists)
        until(lambda: len(processes.carrying(command.mark)) >= 5 + FORKS)
        os.kill(getattr(command, who), signal.SIGKILL)
        until(command.is_gone)


@pytest.mark.parametrize("words", [["exit", "0"], ["daemon", "[", "pause", "]", "exit", "0"]])
def test_a_guarded_group_ends_beside_a_living_server(testchild: Path, words: list[str]) -> None:
    with Command(testchild, *[words] * 3) as command:
        command.until_said("Ended")
        assert command.process.wait(20) == 0
        assert command.is_gone()


@needs_forks
def test_a_guarded_server_that_is_killed_ends_the_group(testchild: Path) -> None:
    with Command(testchild, ["pause"], ["pause"]) as command:
        command.until_said("Started", 2)
        for pid in server_pids(command.agent):
            os.kill(pid, signal.SIGKILL)
        command.until_said("ForkServerLost")
        command.until_said("Exited", 2)
        assert command.process.wait(20) == 0
        assert command.is_gone()


def test_nothing_is_left_when_the_program_of_an_embedded_supervisor_is_killed(testchild: Path) -> None:
    with Command(testchild, ["pause"], ["ignore", "TERM", "pause"], how="embedded") as command:
        command.until_said("Started", 2)
        command.process.kill()
        command.process.wait()
        until(command.is_gone)


@pytest.mark.guarantee("G5")
def test_entries_that_no_mapping_can_hold_arrive_as_they_are(testchild: Path, tmp_path: Path) -> None:
    """As for workers that are executed. The program that is forked is executed with a mapping: so a script looks."""
    entries = ["TWICE=1", "=nameless", "no equals sign", "TWICE=2", "RANK=7", "RANK=8"]
    script = tmp_path / "script.py"
    script.write_text(
        f"open({str(tmp_path / 'dump')!r}, 'wb').write(open('/proc/self/environ', 'rb').read())"
    )
    with Command(script, [], how="embedded", odd="|".join(entries)) as command:
        command.until_said("Ended")
        assert command.process.wait(20) == 0
    if FORKS:
        found = (tmp_path / "dump").read_text().split("\0")
        odd = [entry for entry in found if entry.startswith(("TWICE", "=", "no ", "RANK="))]
        assert sorted(odd) == sorted([*entries[:4], "RANK=0"])
