"""Whether a program can be executed."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from dsl.errors import (
    DslError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
    ScriptError,
    ScriptSyntaxError,
)
from dsl.machine.check import LARGEST_SCRIPT, check_program
from dsl.model.request import Program
from dsl.plan.worker import DEEPSPEED, TORCH


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
    for name, target in (("loop.py", "back.py"), ("back.py", "loop.py"), ("lost.py", "gone.py")):
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "request_",
    [
        Program("script", "train.py"),
        Program("script", "package"),
        Program("module", "json.tool"),
        Program("module", "package"),
        Program("program", "./run.sh"),
        Program("program", "tool"),
    ],
    ids=lambda request: request.script,
)
def test_what_can_run_passes(folder: Path, request_: Program) -> None:
    check_program(request_, DEEPSPEED, {"PATH": f"/nonexistent:{folder}/bin"})


NO_SCRIPTS = {
    "nope.py": "does not exist, check the path and the working directory",
    "help": "does not exist, did you mean dsl --help?",
    "package/../tarin.py": "does not exist, did you mean 'package/../train.py'?",
    "/no/pe.py": "does not exist, check the path",
    "sh": "does not exist, to run a program that is not Python give --no_python",
    "-x": "does not exist, options of dsl come before the script",
    "bin": "is a directory without a __main__.py, name the script in it",
    "loop.py": "leads through a loop of symbolic links, name the file itself",
    "loop.py/train.py": "leads through a loop of symbolic links, name the file itself",
    "lost.py": "is a link to 'gone.py', which does not exist",
}


@pytest.mark.guarantee("G2", "G8")
@pytest.mark.parametrize("name, why", NO_SCRIPTS.items(), ids=NO_SCRIPTS)
def test_what_is_no_script_is_refused_before_anything_starts(folder: Path, name: str, why: str) -> None:
    with pytest.raises(ScriptError) as caught:
        check_program(Program("script", name), DEEPSPEED, {"PATH": f"{folder}/bin"})
    assert str(caught.value) == f"script {name!r} {why}"


NO_PROGRAMS = {
    "run.sh": (ProgramNotFoundError, "is not on PATH, did you mean ./run.sh?"),
    "./nope": (ProgramNotFoundError, "does not exist, check the path"),
    "nope": (ProgramNotFoundError, "is not on PATH"),
    "./loop.py": (ProgramNotFoundError, "leads through a loop of symbolic links, name the file itself"),
    "./lost.py": (ProgramNotFoundError, "is a link to 'gone.py', which does not exist"),
    "./train.py": (
        ProgramNotExecutableError,
        "is not executable, mark it with chmod +x or leave out --no_python",
    ),
    "./bin": (ProgramNotExecutableError, "is a directory"),
}


@pytest.mark.guarantee("G2", "G8")
@pytest.mark.parametrize("name", NO_PROGRAMS)
def test_what_is_no_program_is_refused_before_anything_starts(folder: Path, name: str) -> None:
    kind, why = NO_PROGRAMS[name]
    with pytest.raises(kind) as caught:
        check_program(Program("program", name), DEEPSPEED, {"PATH": f"{folder}/bin"})
    assert str(caught.value) == f"program {name!r} {why}"


ADVICE = {
    ("script", "sh"): "does not exist, to run a program that is not Python give --no-python",
    ("script", "python3.11", "train.py"): "does not exist: leave it out, dslrun starts scripts itself",
    ("script", "torchrun", "train.py"): "does not exist: leave it out, dslrun starts scripts itself",
    ("script", "bin/python"): "is no script: leave it out, dslrun starts scripts itself",
    ("script", "deep/model.ipynb"): "is a notebook, make it a script: jupyter nbconvert --to script",
    ("script", "-x"): "does not exist, options of dslrun come before the script",
    ("program", "./train.py"): "is not executable, mark it with chmod +x or leave out --no-python",
}


@pytest.mark.parametrize("words", ADVICE, ids="-".join)
def test_advice_is_in_the_words_of_the_command_at_hand(folder: Path, words: tuple[str, ...]) -> None:
    kind, name, *arguments = words
    (folder / "bin/python").write_bytes(b"\x7fELF\2\1\1\0")
    with pytest.raises(DslError) as caught:
        check_program(Program(kind, name, tuple(arguments)), TORCH, {"PATH": f"{folder}/bin"})  # type: ignore[arg-type]
    assert str(caught.value) == f"{kind} {name!r} {ADVICE[words]}"


def test_the_name_of_a_tool_is_no_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bin" / "dsl-top").touch(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin", prepend=os.pathsep)
    with pytest.raises(
        ScriptError, match=r"^script 'top' does not exist, did you mean the command dsl-top\?$"
    ):
        check_program(Program("script", "top"), DEEPSPEED, {})


def test_a_program_on_path_that_may_not_be_executed(folder: Path) -> None:
    with pytest.raises(ProgramNotExecutableError, match="bin/data' is not executable"):
        check_program(Program("program", "data"), DEEPSPEED, {"PATH": f"{folder}/bin"})


def test_a_script_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may read everything, so the permission bits alone prove nothing here.
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.R_OK)
    with pytest.raises(ScriptError, match=r"'train\.py' cannot be read by this user"):
        check_program(Program("script", "train.py"), DEEPSPEED, {})


FOREIGN = {
    "run.sh": (
        b"#!/bin/sh\nset -e\nexec ./train\n",
        "is for sh, not Python: to run it give --no_python ./run.sh",
    ),
    "job": (
        b"#! /usr/bin/env -S bash -e\nif true; then\n echo; fi\n" + b"# long\n" * 2000,
        "is for bash, not Python: to run it give --no_python ./job, and mark it with chmod +x",
    ),
    "bin/elf": (
        b"\x7fELF\2\1\1\0" + b"\0" * 9000,
        "is a program, not Python: to run it give --no_python bin/elf, and mark it with chmod +x",
    ),
}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("name", FOREIGN)
def test_a_script_that_is_not_python_is_refused_with_the_command_that_runs_it(
    folder: Path, name: str
) -> None:
    text, message = FOREIGN[name]
    (folder / name).write_bytes(text)
    with pytest.raises(ScriptError) as caught:
        check_program(Program("script", name), DEEPSPEED, {})
    assert str(caught.value) == f"script {name!r} {message}"
    assert caught.value.exit_code == 2


@pytest.mark.guarantee("G2", "G8")
@pytest.mark.parametrize(
    "text, message",
    [
        (b"import os\nprint('a'\n", "t.py:2: SyntaxError: '(' was never closed: \"print('a'\""),
        (b"def f():\npass\n", "t.py:2: IndentationError: expected an indented block after function"),
        (b"if 1:\n\tx\n        y\n", "t.py:3: TabError: inconsistent use of tabs"),
        (b"return 1\n", "t.py:1: SyntaxError: 'return' outside function"),
        (b"x = '\x1b[2J\xe9'\n", "t.py:1: SyntaxError: (unicode error)"),
        (b"# coding: none-such\n", "t.py: SyntaxError: "),
        (b"#!/usr/bin/env python3\nx = = 1\n", "t.py:2: SyntaxError: invalid syntax: 'x = = 1'"),
    ],
)
def test_a_mistake_in_a_small_script_is_one_line_and_the_code_of_python(
    folder: Path, text: bytes, message: str
) -> None:
    (folder / "t.py").write_bytes(text)
    with pytest.raises(ScriptSyntaxError) as caught:
        check_program(Program("script", "t.py"), TORCH, {})
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 1


BAD = b"x = = 1\n"


@pytest.mark.parametrize(
    "text",
    [
        b"#!/bin/sh\n'''exec' python3 \"$0\" \"$@\"\n' '''\nimport os\n",  # as pip writes for a long path
        b"#!/usr/bin/env python3\nPK\3\4\0 an archive",
        BAD + b"\0",
        BAD + b"#" * LARGEST_SCRIPT,
        b"x = '\\d'\nassert (x, 'always')\n",
        b"x = " + b"(" * 3000,
        b"",
    ],
    ids=range(7),
)
def test_what_may_be_python_is_left_to_python(
    folder: Path, text: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "t.py").write_bytes(text)
    if text.startswith(b"x = ("):  # too deep for some, never closed for others
        with contextlib.suppress(ScriptSyntaxError):
            check_program(Program("script", "t.py"), TORCH, {})
    else:
        check_program(Program("script", "t.py"), TORCH, {})
    assert capfd.readouterr() == ("", "")


def test_a_script_is_not_judged_for_another_interpreter(folder: Path) -> None:
    (folder / "t.py").write_bytes(BAD)
    check_program(Program("script", "t.py"), TORCH, {"PYTHON_EXEC": "/opt/python2"})
    check_program(Program("module", "no.such"), TORCH, {"PYTHON_EXEC": "/opt/python2"})
    for same in ("", sys.executable):
        with pytest.raises(ScriptSyntaxError):
            check_program(Program("script", "t.py"), TORCH, {"PYTHON_EXEC": same})


def test_a_pipe_is_not_read(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    check_program(Program("script", "pipe"), TORCH, {})


@pytest.fixture
def modules(folder: Path) -> Path:
    """Packages and modules of many kinds. To import one of them is a failure."""
    for name in ("pkg", "pkg/inner", "moves", "lib/far"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    (folder / "moves" / "__init__.py").write_text("__path__.append('elsewhere')\n", encoding="utf-8")
    (folder / "open" / "deep").mkdir(parents=True)
    (folder / "open" / "deep" / "one.py").touch()
    for name in ("pkg/train.py", "pkg/inner/__main__.py", "open/one.py", "alone.py", "lib/far/one.py"):
        (folder / name).write_text("raise SystemExit('imported')\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "pkg.train",
        "pkg.inner",
        "moves.x",
        "open.one",
        "open.deep.one",
        "alone",
        "alone.x",
        "far.one",
        "sys.x",
    ],
)
def test_a_module_that_is_there_is_found_without_importing_it(modules: Path, name: str) -> None:
    check_program(Program("module", name), DEEPSPEED, {"PYTHONPATH": f"nowhere:{modules}/lib"})
    check_program(Program("module", name), DEEPSPEED, {"PYTHONPATH": "lib"}, str(modules))


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "name, message",
    [
        ("nope", "check the name and the working directory"),
        ("pkg.trian", "check the name and the working directory"),
        ("nope.train", "(there is no 'nope'), check the name and"),
        ("pkg", "(there is no 'pkg.__main__'), check the name and"),
        ("pkg/train.py", "(there is no 'pkg/train'), leave out --module to"),
        (".train", "check the name"),
    ],
)
def test_a_module_that_does_not_exist_is_refused(modules: Path, name: str, message: str) -> None:
    with pytest.raises(ScriptError) as caught:
        check_program(Program("module", name), DEEPSPEED, {})
    said = str(caught.value).replace("exist, ", "exist ")
    assert said.startswith(f"module {name!r} does not exist {message}")
    assert caught.value.exit_code == 2
