"""What modules read while they are imported is noted, and nothing shows that to them."""

from __future__ import annotations

import builtins
import glob
import inspect
import os
import pathlib
import types
from pathlib import Path
from typing import Any

import pytest

from dsl.forkserver import hidden
from dsl.forkserver.freshness import Reads


def _noted(act: object) -> Reads:
    reads = Reads()
    with hidden.Notes(reads.places()):
        act()  # type: ignore[operator]
    return reads


def test_files_that_are_read_are_told_from_those_that_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "three", "both"):
        (tmp_path / name).touch()

    def act() -> None:
        open("one").close()
        open(b"two", mode="rb").close()
        pathlib.Path("three").read_text()
        open("both").close()
        open("both", "a").close()
        open(file="new", mode="w").close()
        os.close(os.open("low", os.O_RDWR | os.O_CREAT))
        os.close(os.open(tmp_path / "one", os.O_RDONLY | os.O_CLOEXEC))
        open(os.open("/dev/null", os.O_RDONLY)).close()
        open("/proc/self/stat").close()
        with pytest.raises(FileNotFoundError):
            open("missing")  # noqa: SIM115
        with pytest.raises(TypeError):
            open()  # type: ignore[call-overload]  # noqa: SIM115

    names = ("one", "two", "three", "missing")
    assert _noted(act).files() == {str(tmp_path / name) for name in names}


def test_questions_and_lists_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").touch()

    def act() -> None:
        assert not os.path.exists("settings")
        assert pathlib.Path("folder").is_dir()
        assert os.access(tmp_path / "other", os.R_OK) is False
        assert glob.glob("folder/*.txt") == ["folder/a.txt"]
        with pytest.raises(FileNotFoundError):
            os.listdir("gone")

    reads = _noted(act)
    assert {str(tmp_path / name) for name in ("settings", "folder", "other")} <= reads.asked
    listed = {name.rstrip("/"): names for name, names in reads.listed.items()}
    assert listed[str(tmp_path / "folder")] == frozenset({"a.txt"})
    assert listed[str(tmp_path / "gone")] is None


def test_a_module_takes_a_function_that_notes_for_the_function_itself() -> None:
    first, low = open, os.open
    found: dict[str, object] = {}

    def act() -> None:
        found["same"] = builtins.open is not first and open == first and hash(open) == hash(first)
        # As `shutil` asks.
        found["set"] = {os.open, os.stat} <= os.supports_dir_fd and os.listdir in os.supports_fd
        found["kind"] = isinstance(os.open, types.BuiltinFunctionType)
        found["about"] = (os.open.__name__, os.open.__module__, os.open.__doc__)
        found["signature"] = inspect.signature(os.open)

        class Holder:
            opener: Any = os.stat

        found["attribute"] = Holder().opener("/")

    _noted(act)
    assert found["same"]
    assert found["set"]
    assert found["kind"]
    assert found["about"] == (low.__name__, low.__module__, low.__doc__)
    assert found["signature"] == inspect.signature(low)
    assert found["attribute"] == os.stat("/")
    assert builtins.open is first
    assert os.open is low
