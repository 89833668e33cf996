"""`--bind auto` on real workers of both commands, and dry runs, which start nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.jobs import running

from dsl.binding.placement import NodeGroup, place
from dsl.facts import this_machine
from dsl.lists import format_ranges
from dsl.model.request import PlacementRequest

pytestmark = pytest.mark.engine

ALLOWED = sorted(os.sched_getaffinity(0))
MPOL_PREFERRED = 1  # linux/mempolicy.h
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}
RESTRICT = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
COMMANDS = ("dsl", "dslrun")


def _line(dsl: Path, command: str, workers: int, options: Sequence[str], *program: object) -> list[str]:
    own = ["--no_python", "--no_local_rank", "--num_gpus", str(workers)]
    if command == "dslrun":
        own = ["--no-python", f"--nproc-per-node={workers}"]
    return [str(dsl.with_name(command)), *own, *options, *map(str, program)]


@pytest.mark.parametrize("command", COMMANDS)
def test_workers_have_the_cpus_the_memory_and_the_threads_of_the_plan(
    command: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    workers = min(2, len(ALLOWED))
    child = [testchild, "dump", tmp_path / "dump.%r", "exit", "0"]
    with running(
        _line(dsl_command, command, workers, ["--bind", "auto"], *child), tmp_path, environ=NO_DEVICES
    ) as job:
        assert job.wait() == 0, job.stderr()
    dumps = [json.loads((tmp_path / f"dump.{rank}").read_text()) for rank in range(workers)]
    planned = place(PlacementRequest(bind="auto"), NodeGroup(workers, {}), this_machine()).bindings
    assert [dump["Cpus_allowed_list"] for dump in dumps] == [format_ranges(one.cpus) for one in planned]
    for dump, binding in zip(dumps, planned, strict=True):
        assert dump["memory_policy"] == (
            [MPOL_PREFERRED, *binding.mempolicy[1]] if binding.mempolicy else [0]
        )


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("command", COMMANDS)
def test_too_many_workers_share_with_a_warning_or_are_refused(
    command: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Refused in one line, and nothing has been started."""
    own = str(ALLOWED[-1])
    for options, code in ((["--bind=auto"], 0), (["--bind=auto", "--bind-strict"], 2)):
        folder = tmp_path / str(code)
        folder.mkdir()
        line = _line(dsl_command, command, 2, options, testchild, "touch", folder / "started")
        with running([sys.executable, "-c", RESTRICT, own, *line], folder, environ=NO_DEVICES) as job:
            assert job.wait() == code
        assert (folder / "started").exists() == (code == 0)
        assert "--bind auto: 2 workers share cores, 1 may be used" in job.stderr()
        assert code == 0 or len(job.stderr().splitlines()) == 1


@pytest.mark.parametrize(
    "command, other", [("dsl", "--bind_cores_to_rank"), ("dslrun", "--numa-binding=node")]
)
def test_two_bindings_are_one_line(
    command: str, other: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    line = _line(dsl_command, command, 1, ["--bind=auto", other], testchild, "exit", "0")
    with running(line, tmp_path, environ=NO_DEVICES) as job:
        assert job.wait() == 2
    (said,) = job.stderr().splitlines()
    assert f"--bind auto cannot be used with {other.partition('=')[0]}" in said


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
    (said,) = job.stderr().splitlines()
    assert "--dry-run cannot ask the plug-in of --logs-specs" in said
