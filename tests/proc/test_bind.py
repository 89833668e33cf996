"""Workers that are bound to cores and memory, by each of the ways to ask for it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import dsl_line
from tests.support.jobs import Job, running

from dsl.binding import NodeGroup, place
from dsl.binding.rules import MODES
from dsl.facts import this_machine
from dsl.model.request import PlacementRequest
from dsl.words import format_ranges

pytestmark = pytest.mark.engine

ALLOWED = sorted(os.sched_getaffinity(0))
MPOL_PREFERRED = 1  # linux/mempolicy.h
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}
RESTRICT = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
COMMANDS = ("dsl", "dslrun")


def _line(dsl: Path, command: str, workers: int, options: Sequence[str], *program: object) -> list[str]:
    return dsl_line(dsl.with_name(command), workers, program, None, *options)


def _restricted(cpu: int, line: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", RESTRICT, str(cpu), *line]


def _dumps(line: Sequence[str], testchild: Path, directory: Path, workers: int) -> list[dict[str, Any]]:
    """What each worker of the line saw, with nothing on PATH: torchrun would ask the numactl program."""
    (directory / "empty").mkdir()
    line = [*line, str(testchild), "dump", str(directory / "dump.%r"), "exit", "0"]
    environ = {**NO_DEVICES, "PATH": str(directory / "empty")}
    with running(line, directory, environ=environ) as job:
        assert job.wait() == 0, job.stderr()
    return [json.loads((directory / f"dump.{rank}").read_text()) for rank in range(workers)]


def only_line(job: Job) -> str:
    """The only line that the command has said. Lines of others on its stderr do not count."""
    text = job.stderr()
    said = [line for line in text.splitlines() if line.startswith("dslrun: ")]
    assert len(said) == 1, text
    assert "Traceback" not in text, text
    return said[0]


@pytest.mark.parametrize(
    "command, wish",
    [
        *((command, PlacementRequest(bind="auto")) for command in COMMANDS),
        *(("dslrun", PlacementRequest(numa_binding=mode)) for mode in MODES),
    ],
)
def test_workers_have_the_cpus_and_the_memory_of_the_plan(
    command: str, wish: PlacementRequest, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    workers = min(2, len(ALLOWED))
    options = [f"--numa-binding={wish.numa_binding}"] if wish.numa_binding else [f"--bind={wish.bind}"]
    dumps = _dumps(_line(dsl_command, command, workers, options), testchild, tmp_path, workers)
    planned = place(wish, NodeGroup(workers, NO_DEVICES), this_machine()).bindings
    assert [dump["Cpus_allowed_list"] for dump in dumps] == [format_ranges(one.cpus) for one in planned]
    for dump, binding in zip(dumps, planned, strict=True):
        expected = [MPOL_PREFERRED, *binding.mempolicy[1]] if binding.mempolicy else [0]
        assert dump["memory_policy"] == expected


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("command", COMMANDS)
def test_too_many_workers_share_with_a_warning_or_are_refused(
    command: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Refused in one line, and nothing has been started."""
    for options, code in ((["--bind=auto"], 0), (["--bind=auto", "--bind-strict"], 2)):
        folder = tmp_path / str(code)
        folder.mkdir()
        line = _line(dsl_command, command, 2, options, testchild, "touch", folder / "started")
        with running(_restricted(ALLOWED[-1], line), folder, environ=NO_DEVICES) as job:
            assert job.wait() == code
        assert (folder / "started").exists() == (code == 0)
        assert "--bind auto: 2 workers share cores, 1 may be used" in job.stderr()
        assert code == 0 or len(job.stderr().splitlines()) == 1


@pytest.mark.parametrize("form", ["--dry-run", "--dry-run-json"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_dry_run_starts_nothing_and_leaves_nothing(
    command: str, form: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    logs = tmp_path / "logs"
    options = [form, "--tee=3", f"--log-dir={logs}", "--bind=auto"]
    line = _line(dsl_command, command, 1, options, testchild, "touch", tmp_path / "started")
    environ = {**NO_DEVICES, "TMPDIR": str(temporary)}
    with running(line, tmp_path / "job", environ=environ) as job:
        assert job.wait() == 0, job.stderr()
    assert not (tmp_path / "started").exists()
    assert not logs.exists()
    assert list(temporary.iterdir()) == []
    shown = job.stdout()
    if form == "--dry-run-json":
        (worker,) = json.loads(shown)["workers"]
        assert worker["command"][-2:] == ["touch", str(tmp_path / "started")]
        assert worker["cores"] == ALLOWED
    else:
        assert f"cores: {format_ranges(ALLOWED)}" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_bindings_are_reported_before_the_workers_start(
    command: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    line = _line(dsl_command, command, 1, ["--report-bindings", "--bind=auto"], testchild, "exit", "0")
    with running(line, tmp_path, environ=NO_DEVICES) as job:
        assert job.wait() == 0, job.stderr()
    head, row = [line for line in job.stderr().splitlines() if "  " in line][:2]
    assert "cores" in head
    assert format_ranges(ALLOWED) in row


def test_a_dry_run_does_not_ask_a_plug_in(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    options = ["--dry-run", "--logs-specs=default"]
    with running(_line(dsl_command, "dslrun", 1, options, testchild, "exit", "0"), tmp_path) as job:
        assert job.wait() == 2
    assert "--dry-run cannot ask the plug-in of --logs-specs" in only_line(job)


def _cpus(text: str) -> Collection[int]:
    ends = [part.split("-") for part in text.split(",")]
    return {cpu for part in ends for cpu in range(int(part[0]), int(part[-1]) + 1)}


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs several CPUs")
def test_exclusive_workers_share_no_cpu(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    line = _line(dsl_command, "dslrun", 2, ["--numa-binding=exclusive"])
    first, second = [_cpus(dump["Cpus_allowed_list"]) for dump in _dumps(line, testchild, tmp_path, 2)]
    assert first
    assert second
    assert not set(first) & set(second)


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_leaves_the_inherited_mask(
    mode: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    own = ALLOWED[-1]
    line = _restricted(own, _line(dsl_command, "dslrun", 1, [f"--numa-binding={mode}"]))
    (dump,) = _dumps(line, testchild, tmp_path, 1)
    assert dump["Cpus_allowed_list"] == str(own)


@pytest.mark.guarantee("G8")
def test_what_cannot_be_bound_is_one_line_and_nothing_starts(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    line = _line(dsl_command, "dslrun", 2, ["--numa-binding=exclusive"], testchild, "touch", started)
    with running(_restricted(ALLOWED[0], line), tmp_path / "job", environ=NO_DEVICES) as job:
        assert job.wait() == 2
    said = only_line(job)
    assert said.startswith("dslrun: error: --numa-binding exclusive: local rank 0 is one of 2 at NUMA node ")
    assert not started.exists()


def test_workers_that_are_started_again_are_bound_again(dsl_command: Path, tmp_path: Path) -> None:
    script = 'while read name value; do case $name in Cpus_all*t:) echo "$value";; esac; done < /proc/self/status; exit 3'
    options = ["--numa-binding=exclusive", "--max-restarts=1"]
    own = ALLOWED[-1]
    line = _restricted(own, _line(dsl_command, "dslrun", 1, options, "/bin/sh", "-c", script))
    with running(line, tmp_path, environ=NO_DEVICES) as job:
        assert job.wait() == 3
        assert job.stdout().split() == [str(own)] * 2
