"""What a warm server goes by to know that nothing has changed: libraries, and what imports have read."""

from __future__ import annotations

import builtins
import glob
import inspect
import os
import pathlib
import struct
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsl.forkserver import freshness, hidden
from dsl.forkserver.freshness import Reads

_LOADED, _DYNAMIC = 1, 2


def library(path: Path, entries: Sequence[tuple[int, int]], strings: bytes, order: str = "<") -> Path:
    """Write a library that has nothing but these entries and texts."""
    address, place = 0x10000, 0x200
    table = b"".join(struct.pack(f"{order}QQ", *one) for one in [*entries, (5, address), (0, 0)])
    end = place + len(strings)
    head = b"\x7fELF\2" + (b"\1" if order == "<" else b"\2") + bytes(10)
    head += struct.pack(f"{order}HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    parts = struct.pack(
        f"{order}IIQQQQQQ", _LOADED, 4, place, address, address, len(strings), len(strings), 1
    )
    parts += struct.pack(f"{order}IIQQQQQQ", _DYNAMIC, 4, end, 0x20000, 0, len(table), len(table), 8)
    path.write_bytes((head + parts).ljust(place, b"\0") + strings + table)
    return path


@pytest.mark.parametrize("order", "<>")
def test_the_folders_that_a_library_names_are_searched(tmp_path: Path, order: str) -> None:
    strings = b"\0libc.so\0$ORIGIN/../lib:/opt/${ORIGIN}/x:/opt/$LIB::/opt/a\0/old\0"
    named, old = strings.index(b"$ORIGIN"), strings.index(b"/old")
    expected = [str(tmp_path.parent / "lib"), f"/opt{tmp_path}/x", "/opt/a"]
    for entries, found in (
        ([(1, 1), (29, named)], expected),
        ([(15, old), (29, named)], expected),
        ([(15, old)], ["/old"]),
        ([(1, 1)], []),
    ):
        path = library(tmp_path / "libtest.so", entries, strings, order)
        assert freshness.run_paths(str(path)) == found


@pytest.mark.parametrize("text", [b"", b"\x7fELF", b"\x7fELF\1" + bytes(60), b"\x7fELF\2\1" + b"\xff" * 58])
def test_a_file_that_is_no_library_names_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "other").write_bytes(text)
    assert freshness.run_paths(str(tmp_path / "other")) == []
    assert freshness.run_paths(str(tmp_path / "missing")) == []


def test_folders_of_a_pth_are_its_lines_that_are_no_code(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    path.write_text("\ufeff/opt/first  \n# a\n\nimport os; os.x = 1\nimport\tsys\nrelative/one\n")
    assert freshness.folders_of_pth(str(path)) == ["/opt/first", "relative/one"]
    assert freshness.folders_of_pth(str(tmp_path / "missing.pth")) == []


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
