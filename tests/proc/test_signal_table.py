"""The library's guard with a table of signals: what is forwarded, what stops, what preempts, and what ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.kit.waiting import until
from tests.support.jobs import Job, running

from dsl import Guard, SpecError

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).parents[1] / "workers" / "signal_table.py"
TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
LONG_S = 600.0
KILLED = 128 + signal.SIGKILL


class Guarded(NamedTuple):
    """A command under test: its job, and where its workers leave their notes."""

    job: Job
    directory: Path

    def told(self, kind: str) -> list[dict[str, Any]]:
        """What was printed of the events of one kind so far, in order."""
        lines = [json.loads(line) for line in self.job.stdout().splitlines(keepends=True) if line[-1] == "\n"]
        return [line for line in lines if line.pop("kind") == kind]

    def signals(self) -> list[tuple[int, str]]:
        """(signal, what was done about it), as the events tell."""
        return [(event["signum"], event["action"]) for event in self.told("SignalReceived")]

    def caught(self, number: int) -> int:
        """How often the workers have caught a signal."""
        return [one.signum for one in self.job.caught()].count(number)

    def send(self, number: int) -> None:
        """Signal the guard from a process of its own, so that no two signals have one sender."""
        subprocess.run(["/bin/kill", f"-{int(number)}", str(self.job.guard)], check=True)

    def preempt(self, number: int, times: int) -> None:
        """Send the notice and wait until so many workers have caught it."""
        self.send(number)
        until(lambda: self.caught(number) == times)


@contextlib.contextmanager
def guarded(
    directory: Path,
    words: list[str],
    signals: Mapping[int, str] | None,
    *,
    workers: int = 2,
    grace_s: float = LONG_S,
    preempt_grace_s: float | None = None,
    groups: int = 1,
    before: tuple[str, ...] = (),
    acts: list[str | None] | None = None,
) -> Iterator[Guarded]:
    """The program with workers that do `words` once all of them have told of themselves."""
    job = {
        "signals": signals,
        "preempt_grace_s": preempt_grace_s,
        "grace_s": grace_s,
        "workers": workers,
        "argv": words,
        "groups": groups,
        "gate": str(directory / "gate"),
        "acts": acts,
    }
    with running([*before, sys.executable, str(PROGRAM), json.dumps(job)], directory) as command:
        yield Guarded(command, directory)


def worker(testchild: Path, directory: Path, caught: str, *end: str) -> list[str]:
    """Words of a worker that traces the signals `caught` and announces itself."""
    trace = ["catch", caught, "trace", str(directory / "trace")]
    return [str(testchild), *trace, "note", str(directory / "ready"), "%r %p", *end]


def test_a_stop_signal_that_is_forwarded_leaves_the_job_running(testchild: Path, tmp_path: Path) -> None:
    words = worker(testchild, tmp_path, "TERM", "await", "TERM", "2", "exit", "0")
    with guarded(tmp_path, words, {TERM: "forward"}) as command:
        command.job.ready(2)
        for times in (2, 4):
            command.send(TERM)
            until(lambda times=times: command.caught(TERM) == times)  # type: ignore[misc]
        assert command.job.wait() == 0, command.job.stderr()
        assert command.signals() == [(TERM, "forward")] * 2
        assert command.told("Stopping") == []
        assert command.told("Ended")[0]["stop_signal"] is None


def test_a_preemption_lets_the_workers_write_and_end(testchild: Path, tmp_path: Path) -> None:
    """The grace is no time at all: what the workers need is the time of the preemption."""
    end = ["await", "USR1", "1", "sleep", "300", "note", str(tmp_path / "checkpoint"), "%r", "exit", "0"]
    words = worker(testchild, tmp_path, "USR1", *end)
    with guarded(tmp_path, words, {USR1: "preempt"}, grace_s=0.0, preempt_grace_s=LONG_S) as command:
        command.job.ready(2)
        command.send(USR1)
        assert command.job.wait() == 0, command.job.stderr()
        assert command.signals() == [(USR1, "preempt")]
        assert command.told("Stopping") == [{"reason": "signal", "signum": USR1, "grace_s": LONG_S}]
        assert command.told("Killing") == []
        exits = command.told("Exited")
        assert [(one["status"], one["caused_by_stop"]) for one in exits] == [(0, True)] * 2
        assert command.told("Ended") == [{"stop_signal": USR1, "first_failure": None, "stragglers": 0}]
    assert sorted((tmp_path / "checkpoint").read_text().split()) == ["0", "1"]


def test_a_worker_that_fails_after_a_preemption_is_no_cause_and_stops_nobody(
    testchild: Path, tmp_path: Path
) -> None:
    """Rank 0 has no handler and dies of the notice; rank 1 must have its time all the same."""
    fails = ["only", "0", "[", "default", "USR1", "]"]
    end = ["await", "USR1", "1", "sleep", "200", "note", str(tmp_path / "checkpoint"), "%r", "exit", "0"]
    words = [*worker(testchild, tmp_path, "USR1")[:5], *fails, "note", str(tmp_path / "ready"), "%r %p", *end]
    with guarded(tmp_path, words, {USR1: "preempt"}, preempt_grace_s=LONG_S) as command:
        command.job.ready(2)
        command.send(USR1)
        assert command.job.wait() == 0, command.job.stderr()
        assert sorted(one["status"] for one in command.told("Exited")) == [0, 128 + USR1]
        assert command.told("Ended")[0] == {"stop_signal": USR1, "first_failure": None, "stragglers": 0}
    assert (tmp_path / "checkpoint").read_text().split() == ["1"]


@pytest.mark.guarantee("G1")
def test_who_does_not_end_in_the_time_of_a_preemption_is_killed(testchild: Path, tmp_path: Path) -> None:
    """The whole tree of a deaf worker, in a session of its own too, while the grace is ten minutes."""
    inner = ["daemon", "[", "ignore", "TERM,USR1", "setsid", "touch", str(tmp_path / "inner"), "pause", "]"]
    words = worker(testchild, tmp_path, "USR1,TERM", "only", "0", "[", *inner, "]", "pause")
    with guarded(tmp_path, words, {USR1: "preempt"}, preempt_grace_s=0.4) as command:
        command.job.ready(2)
        until((tmp_path / "inner").exists)
        begin = time.monotonic()
        command.send(USR1)
        assert command.job.wait() == 0, command.job.stderr()
        assert time.monotonic() - begin >= 0.4
        assert [one["status"] for one in command.told("Exited")] == [KILLED] * 2
        assert sorted(command.told("Killing")[0]["workers"]) == [0, 1]
        assert command.told("Ended")[0]["stop_signal"] == USR1
        assert command.job.left() == []


def test_a_stop_signal_shortens_the_time_of_a_preemption_to_the_grace(
    testchild: Path, tmp_path: Path
) -> None:
    words = worker(testchild, tmp_path, "USR1,TERM", "pause")
    with guarded(
        tmp_path, words, {USR1: "preempt", TERM: "stop"}, grace_s=0.5, preempt_grace_s=LONG_S
    ) as command:
        command.job.ready(2)
        command.preempt(USR1, 2)
        begin = time.monotonic()
        command.preempt(TERM, 2)
        assert command.job.wait() == 0, command.job.stderr()
        assert time.monotonic() - begin >= 0.5
        assert (command.caught(USR1), command.caught(TERM)) == (2, 2)
        assert command.signals() == [(USR1, "preempt"), (TERM, "stop")]
        assert command.told("Ended")[0]["stop_signal"] == USR1


def test_only_the_second_stop_signal_after_a_preemption_insists(testchild: Path, tmp_path: Path) -> None:
    """Notices that a scheduler repeats, and what is forwarded otherwise, change nothing in between."""
    words = worker(testchild, tmp_path, "USR1,USR2,TERM", "pause")
    table: dict[int, str] = {USR1: "preempt", USR2: "forward", TERM: "stop"}
    with guarded(tmp_path, words, table, preempt_grace_s=LONG_S) as command:
        command.job.ready(2)
        command.preempt(USR1, 2)
        for number in (USR1, USR2):
            command.send(number)
        command.preempt(TERM, 2)
        assert command.told("Killing") == []
        command.send(TERM)
        assert command.job.wait() == 0, command.job.stderr()
        assert (command.caught(USR1), command.caught(USR2), command.caught(TERM)) == (2, 0, 2)
        assert [one["status"] for one in command.told("Exited")] == [KILLED] * 2


def test_a_preemption_between_two_groups_ends_the_next_before_it_begins(
    testchild: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    words = [str(testchild), "note", str(tmp_path / "ran"), "%r", "exit", "0"]
    with guarded(tmp_path, words, {USR1: "preempt"}, preempt_grace_s=LONG_S, groups=2) as command:
        until(gate.exists)
        command.send(USR1)
        until(command.signals)
        gate.unlink()
        assert command.job.wait() == 0, command.job.stderr()
        first, second = command.told("Ended")
        assert (first["stop_signal"], second["stop_signal"]) == (None, USR1)
        assert command.signals() == [(USR1, "preempt")]
        assert command.told("Stopping") == [{"reason": "signal", "signum": USR1, "grace_s": 0.0}]
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "1"]


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("number", [TERM, signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("target", ["guard", "agent"])
def test_a_signal_that_is_not_in_the_table_ends_guard_or_agent_and_with_it_the_job(
    number: signal.Signals, target: str, testchild: Path, tmp_path: Path
) -> None:
    """Workers that ignore everything and a daemon in a session of its own go too."""
    daemon = ["daemon", "[", "setsid", "touch", str(tmp_path / "daemon"), "pause", "]"]
    words = [str(testchild), "ignore", "TERM,INT,HUP,ALRM", "only", "0", "[", *daemon, "]"]
    words += ["note", str(tmp_path / "ready"), "%r %p", "pause"]
    with guarded(tmp_path, words, {USR1: "forward"}) as command:
        command.job.ready(2)
        until((tmp_path / "daemon").exists)
        os.kill(command.job.guard if target == "guard" else command.job.agent(), number)
        code = command.job.wait()
        assert code == (-number if target == "guard" else 128 + number), command.job.stderr()
        until(lambda: command.job.left() == [])


@pytest.mark.guarantee("G1")
def test_a_guard_that_dies_between_two_groups_takes_the_next_with_it(testchild: Path, tmp_path: Path) -> None:
    """The workers of the second group would wait for ever, and nobody would end them."""
    gate = tmp_path / "gate"
    may_end = tmp_path / "may_end"
    may_end.touch()
    with guarded(tmp_path, [str(testchild), "wait", str(may_end), "exit", "0"], {}, groups=2) as command:
        until(gate.exists)
        may_end.unlink()
        os.kill(command.job.guard, TERM)
        assert command.job.wait() == -TERM
        gate.unlink()
        until(lambda: command.job.left() == [])
        # It is told when it is seen, if no group runs then, and of the group that is stopped for it.
        reasons = [event["reason"] for event in command.told("Stopping")]
        assert reasons in (["guard_lost"], ["guard_lost", "guard_lost"])


def test_signals_that_are_only_told_reach_no_worker_and_whoever_is_told_acts(
    testchild: Path, tmp_path: Path
) -> None:
    """The first stop is answered by nothing, the second by a stop, the third by a kill."""
    words = worker(testchild, tmp_path, "USR1,USR2,TERM", "pause")
    table: dict[int, str] = {USR1: "preempt", USR2: "forward", TERM: "stop"}
    told = [(USR2, "forward"), (USR1, "preempt"), (TERM, "stop"), (TERM, "stop"), (TERM, "stop")]
    with guarded(tmp_path, words, table, acts=[None, "stop", "kill"], preempt_grace_s=0.0) as command:
        command.job.ready(2)
        for count, (number, _) in enumerate(told[:3], start=1):
            command.send(number)
            until(lambda count=count: len(command.signals()) == count)  # type: ignore[misc]
        assert command.told("Stopping") == []
        command.preempt(TERM, 2)
        command.send(TERM)
        assert command.job.wait() == 0, command.job.stderr()
        assert command.signals() == told
        assert (command.caught(USR1), command.caught(USR2), command.caught(TERM)) == (0, 0, 2)
        assert command.told("Stopping") == [{"reason": "request", "signum": TERM, "grace_s": LONG_S}]
        assert [one["status"] for one in command.told("Exited")] == [KILLED] * 2
        assert command.told("Ended")[0]["stop_signal"] is None


def test_copies_of_a_signal_that_is_only_told_are_one(testchild: Path, tmp_path: Path) -> None:
    """Guard and agent get it alike, as from srun; the second time somebody insists."""
    words = worker(testchild, tmp_path, "TERM", "pause")
    with guarded(tmp_path, words, {TERM: "stop"}, acts=[None, "kill"]) as command:
        command.job.ready(2)
        both = [str(command.job.guard), str(command.job.agent())]
        subprocess.run(["/bin/kill", "-TERM", *both], check=True)
        until(command.signals)
        subprocess.run(
            ["/bin/kill", "-TERM", *both], check=False
        )  # the agent may have been ended before its turn
        assert command.job.wait() == 0, command.job.stderr()
        assert command.signals() == [(TERM, "stop")] * 2
        assert command.caught(TERM) == 0


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("target", ["guard", "agent"])
def test_a_dead_guard_or_agent_ends_also_a_group_whose_signals_are_only_told(
    target: str, testchild: Path, tmp_path: Path
) -> None:
    words = worker(testchild, tmp_path, "TERM", "pause")
    with guarded(tmp_path, words, {TERM: "stop"}, acts=[]) as command:
        command.job.ready(2)
        os.kill(command.job.guard if target == "guard" else command.job.agent(), signal.SIGKILL)
        command.job.wait()
        until(lambda: command.job.left() == [])


def test_a_named_signal_that_nohup_ignores_stays_ignored(testchild: Path, tmp_path: Path) -> None:
    words = worker(testchild, tmp_path, "USR1", "await", "USR1", "1", "exit", "0")
    table: dict[int, str] = {signal.SIGHUP: "stop", USR1: "forward"}
    with guarded(tmp_path, words, table, before=("nohup",)) as command:
        command.job.ready(2)
        os.kill(command.job.guard, signal.SIGHUP)
        os.kill(command.job.agent(), signal.SIGHUP)
        command.send(USR1)
        assert command.job.wait() == 0, command.job.stderr()
        assert command.signals() == [(USR1, "forward")]


def test_real_time_signals_can_be_forwarded_and_preempt(testchild: Path, tmp_path: Path) -> None:
    words = worker(testchild, tmp_path, "34,64", "await", "64", "1", "exit", "0")
    with guarded(tmp_path, words, {34: "forward", 64: "preempt"}) as command:
        command.job.ready(2)
        command.preempt(34, 2)
        command.send(64)
        assert command.job.wait() == 0, command.job.stderr()
        assert command.signals() == [(34, "forward"), (64, "preempt")]
        assert command.told("Ended")[0]["stop_signal"] == 64


def test_job_control_is_forwarded_whatever_a_table_says(testchild: Path, tmp_path: Path) -> None:
    words = worker(testchild, tmp_path, "CONT,WINCH", "await", "CONT,WINCH", "1", "exit", "0")
    with guarded(tmp_path, words, {signal.SIGCONT: "stop"}) as command:
        command.job.ready(2)
        command.preempt(signal.SIGCONT, 2)
        command.send(signal.SIGWINCH)
        assert command.job.wait() == 0, command.job.stderr()
        assert command.told("Stopping") == []


@pytest.mark.parametrize(
    "number, why",
    [
        (signal.SIGKILL, "SIGKILL cannot be taken, because no process can catch it"),
        (signal.SIGSTOP, "SIGSTOP cannot be taken, because no process can catch it"),
        (signal.SIGCHLD, "SIGCHLD cannot be taken"),
        (signal.SIGSEGV, "SIGSEGV cannot be taken, because it tells a process of its own fault"),
        (signal.SIGABRT, "SIGABRT cannot be taken"),
        (32, "signal 32 is used by the C library"),
        (33, "signal 33 is used by the C library"),
        (0, "there is no signal 0"),
        (65, "there is no signal 65"),
        (-2, "there is no signal -2"),
        (10**30, f"there is no signal {10**30}"),
    ],
)
def test_a_signal_that_nobody_can_take_is_refused_before_anything_is_changed(number: int, why: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(SpecError, match=f"^{why}"):
        Guard({USR2: "preempt", number: "forward"})
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_an_unknown_meaning_is_refused() -> None:
    with pytest.raises(SpecError, match=r'^signal 10 can mean "stop", "forward" or "preempt", got "pause"$'):
        Guard({USR1: "pause"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="no length of time"):
        Guard({USR1: "preempt"}, preempt_grace_s=-1.0)
