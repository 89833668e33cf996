"""The command is struck at a random point between its start and the last worker's."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.processes import Process
from tests.kit.waiting import until
from tests.support.arena import Arena
from tests.support.bystanders import Bystanders
from tests.support.jobs import Helpers, Job, running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.linux_5_4,
    pytest.mark.timeout(3600),
    pytest.mark.guarantee("G1"),
]

GRACE_S = 0.4
RUNS = 8
"""Random points in one run of the tests; multiplied by ``--repeats``."""

SIZES = [16, pytest.param(512, marks=pytest.mark.stress)]


def _words(directory: Path) -> list[str]:
    note = ["note", str(directory / "ready")]
    left = ["daemon", "[", "ignore", "TERM,INT,HUP", *note, "d%p %p", "pause", "]"]
    return ["only", "0,1,2,3", "[", *left, "]", *note, "%r %p", "pause"]


def _noted(directory: Path) -> int:
    path = directory / "ready"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _random_point(job: Job, workers: int, dice: random.Random) -> None:
    """Wait until a random number of workers runs (0: the agent may not exist yet), then up to 5 ms more."""
    wanted = dice.randint(0, workers)
    until(lambda: _noted(job.directory) >= wanted or job.process.poll() is not None)
    time.sleep(dice.random() * (0.1 if wanted == 0 else 0.005))


def _strike_guard(job: Job, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(job.guard, number)


def _strike_agent(job: Job, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, AssertionError):
        os.kill(until(lambda: processes.children(job.guard), 2)[0], number)


def _gone(job: Job) -> Callable[[], bool]:
    return lambda: not job.left()


def _dead(ranks: list[Process]) -> Callable[[], bool]:
    return lambda: not any(map(processes.alive, ranks))


def _as_shell(code: int) -> int:
    return 128 - code if code < 0 else code


Campaign = Callable[[str, Callable[[Job], None], set[int], int], None]


@pytest.fixture
def campaign(tmp_path: Path, net: Arena, bystanders: Bystanders, repeats: int, helpers: Helpers) -> Campaign:
    """Strikes at `RUNS` x ``repeats`` random points of jobs; each failure names the seed that made it."""

    def strike_all(label: str, strike: Callable[[Job], None], expected: set[int], workers: int) -> None:
        faults = []
        harm = len(bystanders.harm())
        for run in range(RUNS * repeats):
            dice = random.Random(f"{label} {workers} {run}")
            place = tmp_path / str(run)
            line = net.inside(helpers.line(workers, _words(place), GRACE_S))
            with running(line, place) as job:
                _random_point(job, workers, dice)
                noted = _noted(place)
                strike(job)
                code = _as_shell(job.wait(timeout_s=30))
                with contextlib.suppress(AssertionError):
                    until(_gone(job), timeout_s=GRACE_S + 10 if code == 137 else 0.0)
                left = job.left()
                if left or code not in expected or "Traceback" in job.stderr():
                    said = f"left {left[:5]}, said {job.stderr()[-300:]}"
                    faults.append(f"run {run} ({noted} ready): code {code}, {said}")
        faults += bystanders.harm()[harm:]
        assert not faults, "\n".join(faults)

    return strike_all


@pytest.mark.parametrize("workers", SIZES)
@pytest.mark.parametrize(
    "target, name, code",
    [
        ("agent", "KILL", 137),
        ("guard", "KILL", 137),
        ("guard", "TERM", 143),
        ("guard", "INT", 130),
        ("agent", "TERM", 143),
    ],
)
def test_a_strike_at_a_random_point_leaves_nobody(
    target: str, name: str, code: int, workers: int, campaign: Campaign
) -> None:
    number = getattr(signal, f"SIG{name}")

    def strike(job: Job) -> None:
        (_strike_agent if target == "agent" else _strike_guard)(job, number)

    campaign(f"{target}-{name}", strike, {code}, workers)


@pytest.mark.parametrize("workers", SIZES)
def test_a_storm_of_signals_leaves_nobody(workers: int, campaign: Campaign) -> None:
    """Every stop signal many times over, then the agent is killed while it stops the group.

    Which of them the command meets first depends on the moment of the strike, so the code of each is right.
    """

    def strike(job: Job) -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) * 20:
            _strike_guard(job, number)
        _strike_agent(job, signal.SIGKILL)

    campaign("storm", strike, {129, 130, 131, 137, 138, 143}, workers)


@pytest.mark.parametrize("workers", SIZES)
def test_both_killed_at_once_still_ends_every_worker(
    workers: int, tmp_path: Path, net: Arena, repeats: int, helpers: Helpers
) -> None:
    """With guard and agent gone nobody is left to look for daemons, but the kernel ends each worker itself."""
    for run in range(3 * repeats):
        place = tmp_path / str(run)
        line = net.inside(helpers.line(workers, _words(place), GRACE_S))
        with running(line, place) as job:
            pids = job.ready(workers + 4, timeout_s=60)
            ranks = [
                process for name, pid in pids.items() if name[0] != "d" and (process := processes.find(pid))
            ]
            assert len(ranks) == workers
            agent = job.agent()
            os.kill(job.guard, signal.SIGKILL)
            os.kill(agent, signal.SIGKILL)
            job.wait()
            until(_dead(ranks), timeout_s=10)


def test_a_second_job_beside_it_is_not_touched(tmp_path: Path, net: Arena, helpers: Helpers) -> None:
    """The same user, the same command: killing one job's agent must not cost the other a worker."""

    def line(place: Path) -> list[str]:
        return net.inside(helpers.line(4, _words(place), GRACE_S))

    with (
        running(line(tmp_path / "a"), tmp_path / "a") as first,
        running(line(tmp_path / "b"), tmp_path / "b") as second,
    ):
        first.ready(8)
        others = [processes.find(pid) for pid in second.ready(8).values()]
        os.kill(first.agent(), signal.SIGKILL)
        assert first.wait() == 137
        assert first.left() == []
        assert all(process and processes.alive(process) for process in others)
        os.kill(second.guard, signal.SIGTERM)
        assert second.wait() == 143
