"""A program below `--stand-in` gets our folder in its environment, and workers do not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.outcome import error_of

from dsl import stand_in
from dsl.cli import deepspeed, torchrun
from dsl.errors import OptionError
from dsl.facts import own_environ, this_machine

FRONT_ENDS = pytest.mark.parametrize("front_end", [deepspeed, torchrun])
PLACES = {"PATH": "/opt/bin:/bin", "PYTHONPATH": "/opt/lib", "HOME": "/h"}


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this process would have become: the file, the words and the environment."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *args: calls.extend(args))
    monkeypatch.setattr(signal, "signal", lambda *args: calls.append(args))
    return calls


@FRONT_ENDS
@pytest.mark.parametrize("option", ["--stand-in --", "--stand_in --", "--stand-in"])
def test_the_command_becomes_the_program(
    front_end: ModuleType, option: str, became: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):  # a process that has become another does not come back
        front_end.main([*option.split(), "sh", "-c", "--", "exit 3"])
    *signals, file, words, environ = became
    assert signals == [(signal.SIGPIPE, signal.SIG_DFL), (signal.SIGXFSZ, signal.SIG_DFL)]
    assert (file, words) == ("sh", ["sh", "-c", "--", "exit 3"])
    assert environ["PATH"].split(":")[0] == stand_in.FOLDER
    assert environ["DSL_STAND_IN_PYTHON"] == sys.executable


@FRONT_ENDS
@pytest.mark.parametrize(
    "words, said",
    [
        ("--stand-in", "--stand-in stands alone, as in {} --stand-in -- yolo train"),
        ("--stand-in --", "--stand-in stands alone"),
        ("--stand-in -x yolo", "--stand-in stands alone"),
        ("--stand-in=yolo", "argument --stand-in: ignored explicit argument 'yolo'"),
        ("--log-level error --stand-in -- yolo", "--stand-in stands alone"),
        ("--make-links", "argument --make-links: expected one argument"),
        ("--make-links=", "argument --make-links: expected a directory, but it is empty"),
        ("--make-links a b", "--make-links stands alone, as in {} --make-links a"),
    ],
)
def test_a_slip_is_told(
    front_end: ModuleType, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        front_end.main(words.split())
    assert caught.value.code == 2
    assert said.format(front_end.COMMAND.name) in capsys.readouterr().err


@pytest.mark.parametrize("word, code", [("no-such-program", 127), ("./plain", 126), ("./gone", 127)])
def test_a_program_that_cannot_be_executed_is_one_line(
    word: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain").touch()
    assert torchrun.main(["--stand-in", "--", word]) == code
    said = capfd.readouterr().err
    assert said.startswith("dslrun: error: program '")
    assert said.count("\n") == 1


def test_a_program_that_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(8, "Exec format error")

    monkeypatch.setattr(os, "execvpe", refuse)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert torchrun.main(["--stand-in", "--", "sh"]) == 126
    assert capfd.readouterr().err == "dslrun: error: program 'sh': Exec format error\n"


def test_a_command_of_others_that_lost_its_mode_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else the program would find torch's own, and nobody would notice."""
    (tmp_path / "torchrun").touch()
    monkeypatch.setattr(stand_in, "FOLDER", str(tmp_path))
    assert torchrun.main(["--stand-in", "--", "sh"]) == 126
    assert f"{tmp_path}/torchrun is not executable, mark it with chmod +x" in capfd.readouterr().err


def test_our_commands_lie_in_the_folder_and_can_be_executed() -> None:
    assert all(os.access(os.path.join(stand_in.FOLDER, name), os.X_OK) for name in stand_in.COMMANDS)


@pytest.mark.parametrize("gone", [(), ("PYTHONPATH",), ("PYTHONPATH", "PATH")])
def test_workers_inherit_what_the_program_was_given(
    gone: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: value for name, value in PLACES.items() if name not in gone}
    inner = stand_in.environment(given)
    assert inner["PATH"] == f"{stand_in.FOLDER}:{given.get('PATH', os.defpath)}"
    assert inner["PYTHONPATH"].split(":")[0] == stand_in.FOLDER
    assert "" not in inner["PYTHONPATH"].split(":"), "an empty part is the working directory"
    monkeypatch.setattr(os, "environ", inner)
    assert {"PATH": os.defpath, **given} == this_machine().environ


def test_what_the_program_adds_to_the_paths_reaches_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = stand_in.environment(PLACES)
    inner["PYTHONPATH"] = f"/repo:{inner['PYTHONPATH']}:"
    monkeypatch.setattr(os, "environ", inner)
    assert own_environ() == {**PLACES, "PYTHONPATH": "/repo:/opt/lib:"}
    monkeypatch.setattr(os, "environ", stand_in.environment(own_environ()))
    assert own_environ()["PYTHONPATH"] == "/repo:/opt/lib:"


def test_without_a_stand_in_the_environment_is_that_of_the_process() -> None:
    assert own_environ() is os.environ


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with our two commands. Only one of them runs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("dsl", "dslrun"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(folder / "dslrun")])
    return folder


@pytest.mark.parametrize("words", [["--make-links", "new/links"], ["--make_links=new/links"]])
def test_links_to_our_commands_are_made_once(
    words: list[str], ours: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ours.parent)
    for _ in range(2):
        assert torchrun.main(words) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"new/links/torchrun -> {ours}/dslrun",
            f"new/links/deepspeed -> {ours}/dsl",
        ]
    assert {one.name: os.readlink(one) for one in Path("new/links").iterdir()} == {
        "torchrun": f"{ours}/dslrun",
        "deepspeed": f"{ours}/dsl",
    }


def test_no_file_of_others_is_replaced_by_a_link(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").write_text("theirs")
    said = error_of(OptionError, stand_in.make_links, str(tmp_path))
    assert said == (f"--make-links: {tmp_path}/deepspeed exists already, remove it or name another directory")
    assert not (tmp_path / "torchrun").exists()


def test_links_need_our_commands_and_a_directory(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert error_of(OptionError, stand_in.make_links, f"{file}/in") == (
        f"--make-links {file}/in: Not a directory, name another directory"
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (ours / "dsl").unlink()
    assert error_of(OptionError, stand_in.make_links, str(tmp_path)) == (
        f"--make-links: there is no command dsl in {ours} or {tmp_path}"
    )
