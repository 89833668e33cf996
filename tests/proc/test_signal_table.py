"""The library's guard with a table of signals: what is forwarded, what stops, what preempts, and what ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
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
    with running([sys.executable, str(PROGRAM), json.dumps(job)], directory) as command:
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


@pytest.mark.parametrize(
    "number, why",
    [
        (signal.SIGKILL, "SIGKILL cannot be taken, because no process can catch it"),
        (33, "signal 33 is used by the C library"),
        (-2, "there is no signal -2"),
        (10**30, f"there is no signal {10**30}"),
    ],
)
def test_a_signal_that_nobody_can_take_is_refused_before_anything_is_changed(number: int, why: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(SpecError, match=f"^{why}"):
        Guard({USR2: "preempt", number: "forward"})
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
