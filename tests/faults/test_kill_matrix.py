"""Whoever is killed, however the workers behave, nothing of the job is left and nobody else is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from tests.faults.matrix import CASES, SAMPLE_AT_64, SAMPLE_ON_A_SCREEN, Case, announced, words
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import SCREENS, Job, running
from tests.support.tally import Run, Tally

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.mark import ParameterSet
    from tests.support.arena import Arena
    from tests.support.bystanders import Bystanders

pytestmark = pytest.mark.guarantee("G1", "G2")

GRACE_S = 0.4


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
    dsl_command: Path,
    testchild: Path,
    tmp_path: Path,
    net: Arena,
    bystanders: Bystanders,
    tally: Tally,
    repeats: int,
) -> None:
    faults: list[str] = []
    harm_before = len(bystanders.harm())
    for run in range(repeats):
        directory = tmp_path / str(run)
        line = dsl_line(
            dsl_command,
            workers,
            [str(testchild), *words(case.behaviour, str(directory), str(testchild))],
            GRACE_S,
        )
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
        until(lambda: all(_state(pid) == "T" for pid in ranks))
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
    assert all(_state(pid) not in (None, "Z") for pid in ranks)


def _state(pid: int) -> str | None:
    process = processes.find(pid)
    return process and process.state
