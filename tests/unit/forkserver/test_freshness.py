"""Where the loader of libraries looks, by what a library says."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsl.forkserver import freshness

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
