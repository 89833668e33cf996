"""The facts of how an attempt ended, and what mends it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.events import A_JOB, MS, a_plan, a_report, an_attempt, an_exit, end

from dsl._record import replace
from dsl.conductor.judge import Context, judge_alone
from dsl.evidence.reports import Death, hints, report_of, seen_on_screen
from dsl.machine import kernel
from dsl.machine.kernel import Room
from dsl.model.request import Policy
from dsl.plan.worker import DEEPSPEED

pytestmark = pytest.mark.guarantee("G3")

QUOTED = ("Traceback:", "  f()", "ValueError: 3")
SHOWN = b"".join(f"\x1b[36m[rank 5]\x1b[0m {line}\n".encode() for line in QUOTED)
OTHER = b"[rank 0] step 7\n"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _fd: os.terminal_size((80, 24)))


@pytest.mark.usefixtures("screen")
@pytest.mark.parametrize(
    "recent, is_seen",
    [
        (SHOWN, True),
        (OTHER * 90 + SHOWN + OTHER * 17, True),
        (OTHER * 90 + SHOWN + OTHER * 18, False),
        (SHOWN.replace(b"\n", b"\n" + OTHER), True),
        (SHOWN.replace(b"3", b"4"), False),
        (b"", False),
    ],
)
def test_a_head_sees_what_its_terminal_still_shows(recent: bytes, is_seen: bool) -> None:  # noqa: FBT001
    judgement = judge_alone(a_report(0, 1, rank=5, lines=QUOTED), Context())
    first = seen_on_screen(judgement, recent).causes[0]
    assert first.evidence.is_on_screen == is_seen
    assert first.evidence.lines == QUOTED


def test_without_a_terminal_nothing_is_seen() -> None:
    judgement = judge_alone(a_report(0, 1, rank=5, lines=QUOTED), Context())
    assert seen_on_screen(judgement, SHOWN) == judgement


@pytest.mark.usefixtures("screen")
def test_a_cause_without_lines_is_not_seen() -> None:
    judgement = judge_alone(a_report(0, 1, rank=5), Context())
    assert seen_on_screen(judgement, SHOWN) == judgement


PYTHON = ("/opt/base/bin/python3.11", "-u", "train.py")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 MB of shared memory, 48 of them in use, and a control group of 4096 MB."""
    shm = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: shm)
    monkeypatch.setattr(kernel, "room_left", lambda: Room(memory_limit="/g/memory.max (4096 MB)"))


def _hints(*lines: str, argv: Sequence[str] = PYTHON, command: str = "dslrun", **known: Any) -> str:
    flavour = replace(DEEPSPEED, command=command)
    plan = a_plan(1, job=replace(A_JOB, flavour=flavour))
    worker = replace(plan.workers[0], argv=tuple(argv), env=known.pop("env", {}))
    return "\n".join(hints(Death(plan, worker, lines=lines, **known)))


def test_memory_that_ran_out_names_the_limit_of_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _hints(signum=9, is_out_of_memory=True).startswith(
        "/g/memory.max (4096 MB) limits the memory of this"
    )
    assert _hints(signum=9) == ""
    monkeypatch.setattr(kernel, "room_left", Room)
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
        ({"VIRTUAL_ENV": "/u/venv"}, "VIRTUAL_ENV is /u/venv, but the workers run /opt/base/bin/python3.11"),
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


DASH = "--local-rank-arg dash passes --local-rank=N"
UNDERSCORE = "--local-rank-arg underscore passes --local_rank=N"
LEFT_OUT = "--no_local_rank leaves out the option, for scripts that read LOCAL_RANK"


@pytest.mark.parametrize(
    "command, line, told, said",
    [
        ("dslrun", REFUSED, "--local-rank", UNDERSCORE + ", and --use-env leaves"),
        ("dslrun", REFUSED, "--local_rank", DASH + ", and --use-env leaves out"),
        ("dsl", REFUSED, "--local_rank", LEFT_OUT),
        ("dslrun", NEEDED, "--local_rank", UNDERSCORE),
        ("dslrun", NEEDED, "--local-rank", DASH),
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


AT_MS = 60_000
EXCEPTION = b"Traceback (most recent call last):\n  ...\nImportError: x\n"


@pytest.mark.parametrize(
    "spoke_ms, tail, is_silent",
    [
        (0, b"", True),
        (AT_MS - 1, b"step 1\n", False),
        (AT_MS + 1, b"step 1\n", False),
        (AT_MS - 1, EXCEPTION, True),
        (AT_MS + 1, b"\n[rank0]: " + EXCEPTION, True),
        (AT_MS - 1, b'  File "t.py", line 1\nSyntaxError: y\n', True),
        (AT_MS - 1, b"step 1\n" + EXCEPTION, False),
        (AT_MS - 5000, EXCEPTION, False),
        (AT_MS - 1, b"", False),
    ],
)
def test_an_exception_that_ends_the_script_is_no_output(
    spoke_ms: int, tail: bytes, *, is_silent: bool
) -> None:
    failed = an_exit(0, code=1, at_ms=AT_MS)
    plan = a_plan(1, job=replace(A_JOB, policy=Policy(restart_on=(1,))))
    attempt = an_attempt(plan, [failed], end(failed, tail=tail), spoke_ns=spoke_ms * MS)
    assert report_of(attempt).is_silent == is_silent
    assert not report_of(replace(attempt, plan=a_plan(1))).is_silent  # nobody listens


def test_a_node_that_was_stopped_is_silent_if_it_had_no_output_at_all() -> None:
    stopped = an_exit(0, signal=15, by_us=True, at_ms=AT_MS)
    plan = a_plan(1, job=replace(A_JOB, policy=Policy(restart_on=(1,))))
    found = [
        report_of(an_attempt(plan, [stopped], end(), spoke_ns=spoke)).is_silent for spoke in (0, AT_MS * MS)
    ]
    assert found == [True, False]
