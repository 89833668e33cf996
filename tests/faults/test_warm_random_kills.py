"""Processes of a warm job are struck at random moments, several at once: nothing is left, or the command says so."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.kit import processes
from tests.support.arena import Arena
from tests.support.bystanders import Bystanders
from tests.support.warm import Place
from tests.support.warm_jobs import HOPS, PAUSES, Job, gone, running, warmed, write_worker

pytestmark = pytest.mark.guarantee("G1")

STRIKES = (
    *("kill agent", "kill guard", "kill agent guard", "kill branch", "kill agent branch", "kill server"),
    *(
        "kill branch server",
        "kill agent branch server",
        "kill guard branch server",
        "stop branch, kill agent",
    ),
    *(
        "stop server, kill branch",
        "stop server branch, kill agent",
        "stop branch, kill server",
        "stop branch server",
    ),
)
"""What is done to which processes of a warm job, all at once. Guard and agent together tell nothing more."""


def _strike(strikes: str, place: Place, job: Job) -> list[int]:
    """Returns the pids of those that were stopped."""
    servers = place.servers()
    pids = [one.pid for one in servers]
    branches = [one.pid for one in servers if one.ppid in pids]
    struck = {
        "agent": processes.children(job.guard)[:1],
        "guard": [job.guard],
        "branch": branches,
        "server": [pid for pid in pids if pid not in branches],
    }
    stopped = []
    for strike in strikes.split(", "):
        verb, *names = strike.split()
        for pid in [pid for name in names for pid in struck[name]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if verb == "stop" else signal.SIGKILL)
            stopped += [pid] if verb == "stop" else []
    return stopped


def _end(job: Job, strikes: str, stopped: list[int]) -> str:
    """``gone``, ``said`` if something may be left and the command says so, else a fault."""
    (job.folder / f"go.{job.cookie}").touch()
    code = job.process.wait(60)
    try:
        gone(job)
    except AssertionError:
        if "may be left" in job.said() and "branch" in strikes and "server" in strikes and code:
            return "said"
        return f"code {code}, stopped {stopped}, left {job.left()}, held {job.is_held()}: {job.said()}"
    return "gone"


@pytest.mark.parametrize("runs", [14, pytest.param(200, marks=pytest.mark.stress)])
@pytest.mark.timeout(7200)
def test_kills_at_random_moments_leave_nobody_or_say_so(
    tmp_path: Path, testchild: Path, net: Arena, bystanders: Bystanders, runs: int
) -> None:
    """No control group helps, and each worker has a daemon that changes its pid all the time."""
    write_worker(tmp_path, testchild, PAUSES, HOPS)
    with Place() as place:
        warmed(place, tmp_path, net)
        found, faults = _campaign(place, tmp_path, net, runs)
    for (strikes, end), count in sorted(found.items()):
        print(f"{strikes:32} {end:5} {count}")
    faults += bystanders.harm()
    assert not faults, "\n".join(faults)


def _campaign(
    place: Place, folder: Path, net: Arena, runs: int
) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """How often each strike ended in which way, and the faults."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    faults = []
    for run in range(runs):
        dice = random.Random(run)
        strikes = STRIKES[run % len(STRIKES)]
        with running(place, folder, net) as job:
            if dice.random() < 0.7:
                with contextlib.suppress(AssertionError):
                    job.ready()
            time.sleep(dice.random() * 0.2)  # the moment is what is tried
            stopped = _strike(strikes, place, job)
            end = _end(job, strikes, stopped)
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        found[strikes, end if end in ("gone", "said") else "fault"] += 1
        if end not in ("gone", "said"):
            faults.append(f"run {run}: {strikes}: {end}")
    return found, faults
