"""What mends a failure whose cause is known: each row, and its neighbours that are no such failure."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.events import a_plan

from dsl._record import replace
from dsl.evidence import reports as module
from dsl.evidence.reports import Death, hints
from dsl.machine.cgroups import Room

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.guarantee("G3")

PYTHON = ("/opt/base/bin/python3.11", "-u", "train.py")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 MB of shared memory, 48 of them in use, and a control group of 4096 MB."""
    shm = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: shm)
    monkeypatch.setattr(module, "room_left", lambda: Room(memory_limit="/g/memory.max (4096 MB)"))


def _hints(*lines: str, argv: Sequence[str] = PYTHON, command: str = "dslrun", **known: Any) -> str:
    plan = a_plan(1)
    worker = replace(plan.workers[0], argv=tuple(argv), env=known.pop("env", {}))
    return "\n".join(hints(Death(replace(plan, command=command), worker, lines=lines, **known)))


def test_memory_that_ran_out_names_the_limit_of_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _hints(signum=9, is_out_of_memory=True).startswith(
        "/g/memory.max (4096 MB) limits the memory of this"
    )
    assert _hints(signum=9) == ""
    monkeypatch.setattr(module, "room_left", Room)
    assert _hints(signum=9, is_out_of_memory=True) == ""


@pytest.mark.parametrize(
    "line",
    [
        "Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise",
        "RuntimeError: unable to write to file </torch_7_9_0>: No space left on device (28)",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "Last error: Error while creating shared memory segment /dev/shm/nccl-9 (size 9637888)",
    ],
)
def test_shared_memory_that_was_full_is_told_with_its_size(line: str) -> None:
    assert "/dev/shm is the usual reason: it has 64 MB, 48 MB are in use now; start" in _hints(line)
    assert "--shm-size" in _hints(signum=7)
    assert _hints("RuntimeError: shared memory", signum=11) == ""


def test_without_shared_memory_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: str) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os, "statvfs", fail)
    assert _hints(signum=7) == ""


LACKS = "ModuleNotFoundError: No module named 'einops'"


@pytest.mark.parametrize(
    "env, said",
    [
        (
            {"VIRTUAL_ENV": "/home/u/venv"},
            "VIRTUAL_ENV is /home/u/venv, but the workers run /opt/base/bin/python3.11",
        ),
        ({"CONDA_PREFIX": "/opt/base/envs/ml"}, "CONDA_PREFIX is /opt/base/envs/ml, but the workers run"),
        ({"VIRTUAL_ENV": "/home/u/venv", "CONDA_PREFIX": "/opt/base"}, ""),
        ({"VIRTUAL_ENV": "/opt/base", "CONDA_PREFIX": "/opt"}, ""),
        ({"VIRTUAL_ENV": ""}, ""),
        ({}, ""),
    ],
)
def test_an_import_that_fails_beside_another_environment(env: dict[str, str], said: str) -> None:
    assert _hints("Traceback:", LACKS, env=env).startswith(said)
    assert bool(_hints(LACKS, env=env)) is bool(said)
    assert _hints("ValueError: No module named 'x'", env=env) == ""
    assert _hints(LACKS, env=env, argv=("./run",)) == ""


def test_the_interpreter_of_an_environment_is_a_link_to_another_ones(tmp_path: Path) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to("/opt/base/bin/python3.11")
    (tmp_path / "link").symlink_to("venv")
    argv = (f"{tmp_path}/venv/bin/python", "train.py")
    assert _hints(LACKS, argv=argv, env={"VIRTUAL_ENV": f"{tmp_path}/link/"}) == ""


@pytest.mark.parametrize(
    "command, mend", [("dslrun", "PYTHON_EXEC=/v/bin/python"), ("dsl", "install dsl there")]
)
def test_how_the_workers_get_the_other_interpreter(command: str, mend: str) -> None:
    assert _hints(LACKS, command=command, env={"VIRTUAL_ENV": "/v"}).endswith(mend)


REFUSED = "train.py: error: unrecognized arguments: {}=3"
NEEDED = "train.py: error: the following arguments are required: --lr, {}"


@pytest.mark.parametrize(
    "command, line, told, said",
    [
        (
            "dslrun",
            REFUSED,
            "--local-rank",
            "--local-rank-arg underscore passes --local_rank=N, and --use-env leaves",
        ),
        (
            "dslrun",
            REFUSED,
            "--local_rank",
            "--local-rank-arg dash passes --local-rank=N, and --use-env leaves out",
        ),
        (
            "dsl",
            REFUSED,
            "--local_rank",
            "--no_local_rank leaves out the option, for scripts that read LOCAL_RANK",
        ),
        ("dslrun", NEEDED, "--local_rank", "--local-rank-arg underscore passes --local_rank=N"),
        ("dslrun", NEEDED, "--local-rank", "--local-rank-arg dash passes --local-rank=N"),
        ("dsl", NEEDED, "--local-rank", ""),
        ("dslrun", "train.py: error: unrecognized arguments: --lr=3", "--local-rank", ""),
        ("dslrun", "it is an error: {}=3", "--local-rank", ""),
    ],
)
def test_the_option_for_the_local_rank(command: str, line: str, told: str, said: str) -> None:
    argv = (*PYTHON, f"{told}=3") if line is REFUSED else PYTHON
    found = _hints("usage: train.py", line.format(told), argv=argv, command=command)
    assert found.startswith(said)
    assert bool(found) is bool(said)


def test_an_option_of_the_local_rank_that_the_user_has_misspelled_is_not_ours() -> None:
    assert _hints(REFUSED.format("--local_rank"), argv=PYTHON) == ""
