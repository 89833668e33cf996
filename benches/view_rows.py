"""What a live view of a large job costs: processor time of the agents, and time to draw the screen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benches.measure import Row
from benches.programs import Programs
from tests.kit import processes
from tests.kit.waiting import until

from dsl._core import vitals
from dsl.view.jobs import RunningJob, running_jobs
from dsl.view.tools import REFRESH_S
from dsl.view.top_screen import TopApp

LIMIT_S = 180.0
PORT = 29611


def top(programs: Programs, nodes: int, workers: int, looks: int) -> list[Row]:
    """`nodes` agents on this machine, each with so many sleeping workers that all have said a line."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _job(programs, nodes, workers, Path(folder)) as (job, agents),
    ):
        share = _agents_share(job, agents, looks)
        draws_ms = asyncio.run(_draws_ms(job, 20))
        job.close()
    name = f"dsl-top of {nodes * workers} ranks on {nodes} hosts"
    each = f"{looks} looks, one in {REFRESH_S:g} s"
    return [
        Row(f"{name}, CPU of all agents", share * 100, "%", 2, True, each),
        Row(
            f"{name}, redraw",
            statistics.median(draws_ms),
            "ms",
            100,
            True,
            f"200x60, slowest {max(draws_ms):.0f} ms",
        ),
    ]


@contextlib.contextmanager
def _job(
    programs: Programs, nodes: int, workers: int, folder: Path
) -> Iterator[tuple[RunningJob, list[int]]]:
    ready = folder / "ready"
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    started = []
    try:
        for rank in range(nodes):
            options = f"--nnodes={nodes} --node-rank={rank} --nproc-per-node={workers} --no-python"
            where = f"--master-addr=127.0.0.1 --master-port={PORT} --tag-output=always"
            words = ["say", "epoch 3 step 1200 loss 1.2345", "note", str(ready), "%r", "pause"]
            command = [programs.dslrun, *options.split(), *where.split(), programs.testchild, *words]
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        until(lambda: ready.exists() and len(ready.read_bytes().splitlines()) == nodes * workers, LIMIT_S)
        agents = [child for one in started for child in processes.children(one.pid)]
        (job,) = [one for one in running_jobs() if one.view.is_whole]
        yield job, agents
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait(LIMIT_S)
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


def _agents_share(job: RunningJob, agents: list[int], looks: int) -> float:
    job.look("status")  # imports, and the first lines
    time.sleep(REFRESH_S)
    before_s, begin = _cpu_s(agents), time.monotonic()
    for _ in range(looks):
        nodes, missing = job.look("status")
        assert not missing
        assert nodes
        time.sleep(REFRESH_S)
    return (_cpu_s(agents) - before_s) / (time.monotonic() - begin)


def _cpu_s(pids: list[int]) -> float:
    """Processor time of these processes, with that of threads that have ended."""
    return sum(found[1] for found in vitals(pids) if found is not None) / 1000


async def _draws_ms(job: RunningJob, times: int) -> list[float]:
    if not os.isatty(0):
        os.dup2(os.openpty()[1], 0)  # the screen keeps the settings of its terminal
    app = TopApp(REFRESH_S, job)
    found = []
    async with app.run_test(size=(200, 60)) as pilot:
        await pilot.pause(2 * REFRESH_S)
        for _ in range(times):
            begin = time.monotonic()
            app.draw()
            await pilot.pause(0)
            found.append((time.monotonic() - begin) * 1000)
    return found
