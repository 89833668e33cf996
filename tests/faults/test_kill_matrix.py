"""Whoever is killed, however the workers behave, nothing of the job is left and nobody else is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.kit.waiting import until
from tests.support.jobs import SCREENS, Helpers, Job, running, states
from tests.support.tally import Run, Tally

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.mark import ParameterSet
    from tests.support.arena import Arena
    from tests.support.bystanders import Bystanders

pytestmark = pytest.mark.guarantee("G1", "G2")

GRACE_S = 0.4
POLITE = "TERM,INT,HUP"


class Case(NamedTuple):
    """One row of the matrix."""

    victim: str
    """``worker`` (rank 1), ``agent`` or ``guard``."""
    signal: str
    """Name without SIG. HUP is always sent under nohup."""
    behaviour: str
    """Key of `BEHAVIOURS`."""
    code: int | None
    """Exit code of the command; None when the signal must change nothing and the job goes on."""

    @property
    def name(self) -> str:
        return f"{self.victim}-{self.signal}-{self.behaviour}"

    @property
    def nohup(self) -> bool:
        return self.signal == "HUP"


def words(behaviour: str, directory: str, testchild: str) -> list[str]:
    """Words for `dsl-testchild`: announce the processes in ``ready``, then behave."""
    note = ["note", f"{directory}/ready"]
    worker = [*note, "%r %p", "pause"]
    descendant = ["ignore", POLITE, *note, "d%p %p"]
    begin = ["catch", "USR1", "trace", f"{directory}/trace"]
    shapes = {
        "plain": worker,
        "deaf": ["ignore", POLITE, *worker],
        "setsid": ["child", "[", "setsid", *descendant, "pause", "]", *worker],
        "daemon": ["daemon", "[", *descendant, "pause", "]", *worker],
        # Bounded: one process that keeps changing its pid, one that makes 40 children, in two ranks.
        "forking": [
            *("only", "0,1", "[", "child", "[", *descendant, "hop", "4000", "500", "]"),
            *("child", "[", *descendant, "churn", "40", "1000", "]", "]", *worker),
        ],
        "stopped": [*note, "%r %p", "stop", "pause"],
        "threadchild": ["threadchild", "[", "setsid", *descendant, "pause", "]", *worker],
        "bloom": ["only", "0,1", "[", "child", "[", *descendant, "bloom", "5", "300", "]", "]", *worker],
        "vfork": ["child", "[", *descendant, "vforkblock", "]", *worker],
        "renamed": [
            *("only", "0,1", "[", "child", "[", "setsid", "exec", "/usr/bin/env", "--unset=DSL_JOB_ID"),
            *(testchild, *descendant, "pause", "]", "]", *worker),
        ],
        "setuid": ["daemon", "[", *descendant, "setuid", "65534", "pause", "]", *worker],
    }
    return begin + shapes[behaviour]


def announced(behaviour: str, workers: int) -> int:
    """How many lines the ready file gets."""
    everybody = {"setsid", "daemon", "threadchild", "vfork", "setuid"}
    extra = {"forking": 4, "bloom": 2, "renamed": 2}
    return workers + (workers if behaviour in everybody else extra.get(behaviour, 0))


SIX = ("plain", "deaf", "setsid", "daemon", "forking", "stopped")
HARD = ("threadchild", "bloom", "vfork", "renamed", "setuid")


def _cases() -> list[Case]:
    cases = [Case("worker", "TERM", "plain", 143), Case("worker", "INT", "plain", 130)]
    cases += [Case("worker", "KILL", behaviour, 137) for behaviour in SIX + HARD]
    cases += [Case("worker", "TERM", "deaf", None), Case("worker", "HUP", "plain", None)]
    for victim in ("agent", "guard"):
        killed = 137 if victim == "agent" else -9
        cases += [Case(victim, "TERM", behaviour, 143) for behaviour in SIX]
        cases += [Case(victim, "INT", behaviour, 130) for behaviour in ("plain", "deaf", "daemon", "stopped")]
        cases += [Case(victim, "KILL", behaviour, killed) for behaviour in SIX]
        cases += [Case(victim, "HUP", behaviour, None) for behaviour in ("plain", "daemon")]
    cases += [Case("agent", "KILL", behaviour, 137) for behaviour in HARD]
    cases += [Case("guard", "TERM", behaviour, 143) for behaviour in HARD]
    return cases


CASES = _cases()

SAMPLE_AT_64 = {
    "worker-KILL-deaf",
    "agent-KILL-daemon",
    "agent-KILL-forking",
    "guard-TERM-forking",
    "guard-KILL-setsid",
    "guard-INT-stopped",
}
"""Cases that every run also does with 64 workers."""

SAMPLE_ON_A_SCREEN = {
    "worker-TERM-plain",
    "worker-KILL-daemon",
    "agent-TERM-plain",
    "agent-KILL-setsid",
    "guard-TERM-stopped",
    "guard-INT-deaf",
    "guard-KILL-daemon",
}
"""Cases that are also tried on a terminal that stops background processes when they write to it."""


def _parameters() -> list[ParameterSet]:
    made = []
    for screen in SCREENS:
        for case in CASES:
            if case.nohup:
                continue  # it takes a terminal away
            marks = [] if case.name in SAMPLE_ON_A_SCREEN else [pytest.mark.stress]
            if case.behaviour == "setuid":
                marks.append(pytest.mark.root)
            made.append(pytest.param(case, 2, screen, id=f"{case.name}-2-{screen}", marks=marks))
    for workers in (2, 64, 512):
        for case in CASES:
            always = workers == 2 or (workers == 64 and case.name in SAMPLE_AT_64)
            marks = [] if always else [pytest.mark.stress]
            if case.behaviour == "setuid":
                marks.append(pytest.mark.root)
            made.append(pytest.param(case, workers, None, id=f"{case.name}-{workers}", marks=marks))
    return made


@pytest.mark.engine
@pytest.mark.linux_5_4
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case, workers, screen", _parameters())
def test_kill_matrix(
    case: Case,
    workers: int,
    screen: str | None,
    testchild: Path,
    tmp_path: Path,
    net: Arena,
    bystanders: Bystanders,
    tally: Tally,
    repeats: int,
    helpers: Helpers,
) -> None:
    faults: list[str] = []
    harm_before = len(bystanders.harm())
    for run in range(repeats):
        directory = tmp_path / str(run)
        line = helpers.line(workers, words(case.behaviour, str(directory), str(testchild)), GRACE_S)
        with running(net.inside(["nohup", *line] if case.nohup else line), directory, screen=screen) as job:
            try:
                wrong, survivors, seconds = _run(case, workers, job)
            except AssertionError as error:
                wrong, survivors, seconds = [str(error)], [str(one) for one in job.left()], float("inf")
        harmed = bystanders.harm()[harm_before:]
        harm_before += len(harmed)
        name = case.name if screen is None else f"{case.name}-{screen}"
        tally.add(name, workers, Run(len(survivors), len(harmed), bool(wrong), seconds))
        faults += [f"run {run}: {text}" for text in [*wrong, *survivors, *harmed]]
    assert not faults, "\n".join(faults[:20])


def _run(case: Case, workers: int, job: Job) -> tuple[list[str], list[str], float]:
    """Start, strike, wait: (wrong codes, survivors, seconds from the strike to the end)."""
    pids = job.ready(announced(case.behaviour, workers), timeout_s=60)
    ranks = [pids[str(rank)] for rank in range(workers)]
    if case.behaviour == "stopped":
        until(lambda: states(ranks) == {"T"})
    victim = {"worker": ranks[1], "agent": job.agent(), "guard": job.guard}[case.victim]
    begin = time.monotonic()
    os.kill(victim, getattr(signal, f"SIG{case.signal}"))
    expected = case.code
    if expected is None:
        _goes_on(job, ranks)
        begin = time.monotonic()
        os.kill(job.guard, signal.SIGTERM)
        expected = 143
    code = job.wait(timeout_s=GRACE_S + (10 if workers < 512 else 40))
    if code == -signal.SIGKILL:  # the guard itself is gone: its agent finishes a moment later
        with contextlib.suppress(AssertionError):
            until(lambda: not job.left(), timeout_s=GRACE_S + 10)
    survivors = [f"pid {one.pid} ({one.name}, state {one.state}) survived" for one in job.left()]
    wrong = [f"exit code {code}, expected {expected}: {job.stderr()[-500:]}"] if code != expected else []
    return wrong, survivors, time.monotonic() - begin


def _goes_on(job: Job, ranks: list[int]) -> None:
    """Every worker is alive after the signal and is still served: a USR1 comes through, once each."""
    os.kill(job.guard, signal.SIGUSR1)
    until(lambda: {one.pid for one in job.caught() if one.signum == signal.SIGUSR1} >= set(ranks))
    assert not states(ranks) & {"gone", "Z"}
