"""`dsl-stacks --for`: which rank holds the others up, in real trainings that torch connects."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.jobs import running
from tests.support.uneven import TRAIN

from dsl.model.observation import Look, RankStacks, RankStatus
from dsl.view.lookout import take_stacks

BUSY = """
import os, sys, threading, time
def beside():
    time.sleep(1000)
def rest():
    time.sleep(0.05)
def compute():
    end = time.monotonic() + 0.01
    while time.monotonic() < end:
        pass
threading.Thread(target=beside, daemon=True).start()
if os.fork() == 0:
    beside()
open(sys.argv[1], "w").close()
while True:
    rest()
    compute()
"""


def sampled(pid: int, for_s: int = 1) -> RankStacks:
    (found,) = take_stacks(Look(1, "samples", for_s=for_s), [RankStatus(3, 1, pid)])
    return found


@pytest.mark.needs_package("py-spy")
def test_samples_count_the_stacks_of_main_threads_alone(tmp_path: Path) -> None:
    script, ready = tmp_path / "train.py", tmp_path / "ready"
    script.write_text(BUSY)
    with subprocess.Popen([sys.executable, str(script), str(ready)], start_new_session=True) as process:
        try:
            until(ready.exists, 20)
            found = sampled(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert (found.rank, found.problem) == (3, "")
    assert found.sampled is not None
    counts = {(one.frames[0].function, one.frames[0].line): one.count for one in found.sampled.samples}
    assert counts[("rest", 6)] > 1
    children = [one.frames[0].function for one in found.sampled.samples if one.is_child]
    assert children == ["beside"]
    assert {one.frames[-1].function for one in found.sampled.samples} == {"<module>"}
    assert 0.2 < found.sampled.sleeps < 1


LATE = """#!/bin/sh
for word; do
    test "$last" != --output || file=$word
    last=$word
done
trap 'echo "thread (0x1): MainThread;work (/train.py:3) 7" >"$file"; exit 0' INT
while :; do sleep 0.1; done
"""


def test_a_py_spy_that_is_late_tells_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(LATE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            found = sampled(process.pid)
        finally:
            process.kill()
    assert found.sampled is not None, found.problem
    assert [(one.frames[0].function, one.count) for one in found.sampled.samples] == [("work", 7)]


def test_a_program_without_python_has_no_samples() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        found = sampled(process.pid)
        process.kill()
    assert (found.sampled, found.problem) == (None, "it is no Python process")


def looked(dslrun: Path, folder: Path, slow: str) -> tuple[dict[str, object], str, str]:
    """What `dsl-stacks` tells of a job of four ranks, the file for flame graphs, and the table of `dsl-top`."""
    script, flames = folder / "train.py", folder / "flames"
    script.write_text(TRAIN)
    line = [str(dslrun), "--nproc-per-node", "4", str(script), str(folder / "ready"), slow]
    with running(line, folder / "job", environ={"OMP_NUM_THREADS": "1"}) as job:
        until(lambda: job.process.poll() is not None or len([*folder.glob("ready-*")]) == 4, 90)
        words = ["--for", "4", "--json", "--flame-graph", flames, job.guard]
        told = json.loads(ran([dslrun.with_name("dsl-stacks"), *words], check=True).stdout)
        top = ran([dslrun.with_name("dsl-top"), "--once", job.guard], check=True).stdout
    return told, flames.read_text(), top


@pytest.mark.torch
@pytest.mark.needs_package("py-spy")
@pytest.mark.timeout(180)
def test_a_rank_with_a_slow_loader_is_named_with_the_line(dsl_command: Path, tmp_path: Path) -> None:
    told, flames, top = looked(dsl_command.with_name("dslrun"), tmp_path, "2")
    assert re.fullmatch(
        r"rank 2 holds the others up: \d+ % in Images.__getitem__ \(train.py:8\); "
        r"the others wait \d+ % in all_reduce \(train.py:13\)",
        str(told["explanation"]),
    )
    ranks = told["ranks"]
    assert isinstance(ranks, list)
    assert {one["rank"] for one in ranks} == {0, 1, 2, 3}
    assert (ranks[0]["rank"], ranks[0]["data"] > 0.5) == (2, True)
    assert re.search(
        r"^rank 2 \(host .*\);<module> .*;Images.__getitem__ \(.*train.py:8\) \d+$", flames, re.MULTILINE
    )
    assert "WAIT%" in top


@pytest.mark.torch
@pytest.mark.needs_package("py-spy")
@pytest.mark.timeout(180)
def test_nobody_is_named_where_all_ranks_are_alike(dsl_command: Path, tmp_path: Path) -> None:
    told, _, _ = looked(dsl_command.with_name("dslrun"), tmp_path, "none")
    assert str(told["explanation"]).startswith("no rank holds the others up: they wait ")
