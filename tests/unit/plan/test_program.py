"""What a worker executes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dsl.errors import DslError, ProgramNotExecutableError, ProgramNotFoundError, ScriptError
from dsl.model import Request
from dsl.plan.program import check_program, worker_command

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
        Request("train.py"),
        Request("package"),
        Request("no.such.module", module=True),
        Request("./run.sh", no_python=True),
        Request("tool", no_python=True),
    ],
    ids=lambda request: request.script,
)
def test_what_can_run_passes(folder: Path, request_: Request) -> None:
    check_program(request_, {"PATH": f"/nonexistent:{folder}/bin"})


@pytest.mark.parametrize(
    "request_, kind, message",
    [
        (
            Request("nope.py"),
            ScriptError,
            "script 'nope.py' does not exist, check the path and the working directory",
        ),
        (Request("/no/pe.py"), ScriptError, "script '/no/pe.py' does not exist, check the path"),
        (
            Request("sh"),
            ScriptError,
            "script 'sh' does not exist, to run a program that is not Python give --no_python",
        ),
        (Request("-x"), ScriptError, "script '-x' does not exist, options of dsl come before the script"),
        (
            Request("bin"),
            ScriptError,
            "script 'bin' is a directory without a __main__.py, name the script in it",
        ),
        (
            Request("run.sh", no_python=True),
            ProgramNotFoundError,
            "program 'run.sh' is not on PATH, did you mean ./run.sh?",
        ),
        (
            Request("./nope", no_python=True),
            ProgramNotFoundError,
            "program './nope' does not exist, check the path",
        ),
        (Request("nope", no_python=True), ProgramNotFoundError, "program 'nope' is not on PATH"),
        (
            Request("./train.py", no_python=True),
            ProgramNotExecutableError,
            "program './train.py' is not executable, mark it with chmod +x or leave out --no_python",
        ),
        (Request("./bin", no_python=True), ProgramNotExecutableError, "program './bin' is a directory"),
    ],
    ids=lambda value: value.script if isinstance(value, Request) else "",
)
def test_what_cannot_run_is_refused_before_anything_starts(
    folder: Path, request_: Request, kind: type[DslError], message: str
) -> None:
    """G2, G8."""
    with pytest.raises(kind) as caught:
        check_program(request_, {"PATH": f"{folder}/bin"})
    assert str(caught.value) == message


def test_a_program_on_path_that_may_not_be_executed(folder: Path) -> None:
    with pytest.raises(ProgramNotExecutableError, match="bin/data' is not executable"):
        check_program(Request("data", no_python=True), {"PATH": f"{folder}/bin"})


def test_a_script_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may read everything, so the permission bits alone prove nothing here.
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.R_OK)
    with pytest.raises(ScriptError, match=r"'train\.py' cannot be read by this user"):
        check_program(Request("train.py"), {})


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request("t.py"), ("/opt/python", "-u", "t.py")),
        (Request("pkg.mod", module=True), ("/opt/python", "-u", "-m", "pkg.mod")),
        (Request("./t.sh", no_python=True), ("./t.sh",)),
    ],
)
def test_the_command_of_a_worker(request_: Request, words: tuple[str, ...]) -> None:
    assert worker_command(request_, "/opt/python") == words
