"""`dslrun --numa-binding`: the planned masks are those of real workers, and no numactl is needed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import running

from dsl.binding.placement import NodeGroup, place
from dsl.binding.rules import MODES
from dsl.facts import this_machine
from dsl.lists import format_ranges
from dsl.model.request import PlacementRequest

pytestmark = pytest.mark.engine

ALLOWED = sorted(os.sched_getaffinity(0))
MPOL_PREFERRED = 1  # linux/mempolicy.h
# So that a machine with devices answers as one without.
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}
RESTRICT = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"


def _line(dsl: Path, mode: str, workers: int, program: Sequence[object], *options: str) -> list[str]:
    own = ["--no-python", "--numa-binding", mode, f"--nproc-per-node={workers}", *options]
    return [str(dsl.with_name("dslrun")), *own, *map(str, program)]


def _dumps(line: Sequence[str], directory: Path, workers: int) -> list[dict[str, Any]]:
    (directory / "empty").mkdir()
    environ = {**NO_DEVICES, "PATH": str(directory / "empty")}
    with running(line, directory, environ=environ) as job:
        assert job.wait() == 0, job.stderr()
    return [json.loads((directory / f"dump.{rank}").read_text()) for rank in range(workers)]


@pytest.mark.parametrize("mode", MODES)
def test_workers_have_the_cpus_and_the_memory_of_the_plan(
    mode: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """With nothing on PATH: torchrun would ask the numactl program."""
    workers = min(2, len(ALLOWED))
    line = _line(dsl_command, mode, workers, [testchild, "dump", tmp_path / "dump.%r", "exit", "0"])
    dumps = _dumps(line, tmp_path, workers)
    wish = PlacementRequest(numa_binding=mode)
    planned = place(wish, NodeGroup(workers, NO_DEVICES), this_machine()).bindings
    assert [dump["Cpus_allowed_list"] for dump in dumps] == [format_ranges(one.cpus) for one in planned]
    for dump, binding in zip(dumps, planned, strict=True):
        expected = [MPOL_PREFERRED, *binding.mempolicy[1]] if binding.mempolicy else [0]
        assert dump["memory_policy"] == expected


def _cpus(text: str) -> Collection[int]:
    ends = [part.split("-") for part in text.split(",")]
    return {cpu for part in ends for cpu in range(int(part[0]), int(part[-1]) + 1)}


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs several CPUs")
def test_exclusive_workers_share_no_cpu(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    line = _line(dsl_command, "exclusive", 2, [testchild, "dump", tmp_path / "dump.%r", "exit", "0"])
    first, second = [_cpus(dump["Cpus_allowed_list"]) for dump in _dumps(line, tmp_path, 2)]
    assert first
    assert second
    assert not set(first) & set(second)


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_leaves_the_inherited_mask(
    mode: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    own = str(ALLOWED[-1])
    line = _line(dsl_command, mode, 1, [testchild, "dump", tmp_path / "dump.%r", "exit", "0"])
    (dump,) = _dumps([sys.executable, "-c", RESTRICT, own, *line], tmp_path, 1)
    assert dump["Cpus_allowed_list"] == own


@pytest.mark.guarantee("G8")
def test_what_cannot_be_bound_is_one_line_and_nothing_starts(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    line = _line(dsl_command, "exclusive", 2, [testchild, "touch", tmp_path / "started"])
    command = [sys.executable, "-c", RESTRICT, str(ALLOWED[0]), *line]
    with running(command, tmp_path / "job", environ=NO_DEVICES) as job:
        assert job.wait() == 2
    (said,) = job.stderr().splitlines()
    assert said.startswith("dslrun: error: --numa-binding exclusive: local rank 0 is one of 2 at NUMA node ")
    assert not (tmp_path / "started").exists()


def test_workers_that_are_started_again_are_bound_again(dsl_command: Path, tmp_path: Path) -> None:
    script = 'while read name value; do case $name in Cpus_all*t:) echo "$value";; esac; done < /proc/self/status; exit 3'
    line = _line(dsl_command, "exclusive", 1, ["/bin/sh", "-c", script], "--max-restarts=1")
    own = str(ALLOWED[-1])
    with running([sys.executable, "-c", RESTRICT, own, *line], tmp_path, environ=NO_DEVICES) as job:
        assert job.wait() == 3
        assert job.stdout().split() == [own, own]
