"""Whether a program can be executed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dsl.errors import DslError, ProgramNotExecutableError, ProgramNotFoundError, ScriptError
from dsl.machine.check import check_program
from dsl.model.job import Program
from dsl.plan.flavours import DEEPSPEED, TORCH

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, a program, a plain file and two directories."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    for name in ("train.py", "run.sh", "bin/tool", "bin/data"):
        (tmp_path / name).touch()
    for name in ("run.sh", "bin/tool"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "request_",
    [
        Program("script", "train.py"),
        Program("script", "package"),
        Program("module", "no.such.module"),
        Program("program", "./run.sh"),
        Program("program", "tool"),
    ],
    ids=lambda request: request.script,
)
def test_what_can_run_passes(folder: Path, request_: Program) -> None:
    check_program(request_, DEEPSPEED, {"PATH": f"/nonexistent:{folder}/bin"})


@pytest.mark.parametrize(
    "request_, kind, message",
    [
        (
            Program("script", "nope.py"),
            ScriptError,
            "script 'nope.py' does not exist, check the path and the working directory",
        ),
        (Program("script", "/no/pe.py"), ScriptError, "script '/no/pe.py' does not exist, check the path"),
        (
            Program("script", "sh"),
            ScriptError,
            "script 'sh' does not exist, to run a program that is not Python give --no_python",
        ),
        (
            Program("script", "-x"),
            ScriptError,
            "script '-x' does not exist, options of dsl come before the script",
        ),
        (
            Program("script", "bin"),
            ScriptError,
            "script 'bin' is a directory without a __main__.py, name the script in it",
        ),
        (
            Program("program", "run.sh"),
            ProgramNotFoundError,
            "program 'run.sh' is not on PATH, did you mean ./run.sh?",
        ),
        (
            Program("program", "./nope"),
            ProgramNotFoundError,
            "program './nope' does not exist, check the path",
        ),
        (Program("program", "nope"), ProgramNotFoundError, "program 'nope' is not on PATH"),
        (
            Program("program", "./train.py"),
            ProgramNotExecutableError,
            "program './train.py' is not executable, mark it with chmod +x or leave out --no_python",
        ),
        (
            Program("program", "./bin"),
            ProgramNotExecutableError,
            "program './bin' is a directory",
        ),
    ],
    ids=lambda value: value.script if isinstance(value, Program) else "",
)
def test_what_cannot_run_is_refused_before_anything_starts(
    folder: Path, request_: Program, kind: type[DslError], message: str
) -> None:
    """G2, G8."""
    with pytest.raises(kind) as caught:
        check_program(request_, DEEPSPEED, {"PATH": f"{folder}/bin"})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "request_, message",
    [
        (
            Program("script", "sh"),
            "script 'sh' does not exist, to run a program that is not Python give --no-python",
        ),
        (Program("script", "-x"), "script '-x' does not exist, options of dslrun come before the script"),
        (
            Program("program", "./train.py"),
            "program './train.py' is not executable, mark it with chmod +x or leave out --no-python",
        ),
    ],
    ids=lambda value: value.script if isinstance(value, Program) else "",
)
def test_advice_is_in_the_words_of_the_command_at_hand(folder: Path, request_: Program, message: str) -> None:
    with pytest.raises(DslError) as caught:
        check_program(request_, TORCH, {"PATH": f"{folder}/bin"})
    assert str(caught.value) == message


def test_a_program_on_path_that_may_not_be_executed(folder: Path) -> None:
    with pytest.raises(ProgramNotExecutableError, match="bin/data' is not executable"):
        check_program(Program("program", "data"), DEEPSPEED, {"PATH": f"{folder}/bin"})


def test_a_script_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may read everything, so the permission bits alone prove nothing here.
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.R_OK)
    with pytest.raises(ScriptError, match=r"'train\.py' cannot be read by this user"):
        check_program(Program("script", "train.py"), DEEPSPEED, {})
