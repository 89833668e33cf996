"""What is read into the page cache before workers start: found by paths, read in order, within limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsl.machine import prewarm
from dsl.machine.prewarm import library_files

MIB = 1 << 20


def put(path: Path, size: int = 16) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return str(path)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An interpreter with its libraries."""
    base = tmp_path / "base"
    put(base / "bin" / "python3.11")
    (base / "bin" / "python3.11").chmod(0o755)
    put(base / "lib" / "libpython3.11.so.1.0")
    put(base / "lib" / "python3.11" / "lib-dynload" / "_json.so")
    return base


def torch_in(folder: Path) -> list[str]:
    return [
        put(folder / "torch" / "lib" / "libtorch.so"),
        put(folder / "torch" / "_C.so"),
        put(folder / "nvidia" / "cublas" / "lib" / "libcublas.so.12"),
    ]


def test_the_interpreter_its_libraries_and_those_of_torch(base: Path) -> None:
    packages = base / "lib" / "python3.11" / "site-packages"
    libraries = torch_in(packages)
    put(packages / "other" / "lib" / "libother.so")
    put(packages / "torch" / "__init__.py")
    found = library_files(str(base / "bin" / "python3.11"), {})
    own = [
        base / "bin/python3.11",
        base / "lib/libpython3.11.so.1.0",
        base / "lib/python3.11/lib-dynload/_json.so",
    ]
    assert found == [*map(str, own), *libraries]


def test_of_a_virtual_environment_its_own_torch_and_the_interpreter_behind_it(
    tmp_path: Path, base: Path
) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(base / "bin" / "python3.11")
    (venv / "pyvenv.cfg").write_text(f"home = {base}/bin\n")
    libraries = torch_in(venv / "lib" / "python3.11" / "site-packages")
    torch_in(base / "lib" / "python3.11" / "site-packages")
    found = library_files(str(venv / "bin" / "python"), {})
    assert found[0] == str(base / "bin" / "python3.11")
    assert set(libraries) < set(found)
    assert not any("base/lib/python3.11/site-packages" in one for one in found)


def test_a_name_is_looked_up_and_a_path_for_modules_comes_first(tmp_path: Path, base: Path) -> None:
    libraries = torch_in(tmp_path / "mine")
    environ = {"PATH": str(base / "bin"), "PYTHONPATH": f"/nowhere:{tmp_path}/mine"}
    assert set(libraries) < set(library_files("python3.11", environ))
    assert library_files("python3.12", environ) == []


def test_each_file_is_read_once_whatever_links_lead_to_it(base: Path) -> None:
    torch_in(base / "lib" / "python3.11" / "site-packages")
    (base / "lib" / "libpython3.so").symlink_to(base / "lib" / "libpython3.11.so.1.0")
    found = library_files(str(base / "bin" / "python3.11"), {})
    assert len(found) == len(set(map(os.path.realpath, found)))


def test_what_was_read_is_counted(base: Path) -> None:
    put(base / "lib" / "libpython3.11.so.1.0", 9 * MIB)
    told = prewarm.prewarm(str(base / "bin" / "python3.11"), {}, lambda: True)
    assert (told.files, told.file_bytes, told.is_whole) == (3, 9 * MIB + 32, True)
    assert 0 <= told.read_bytes <= told.file_bytes
    # What was written just now is in memory.
    assert told.read_bytes == 0 or not hasattr(os, "RWF_NOWAIT")


def test_what_is_not_in_memory_is_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prewarm, "is_cached", lambda _fd, _start, _stop: False)
    put(base / "lib" / "libpython3.11.so.1.0", 9 * MIB)
    told = prewarm.prewarm(str(base / "bin" / "python3.11"), {}, lambda: True)
    assert told.read_bytes == told.file_bytes == 9 * MIB + 32


def test_an_event_ends_it(base: Path) -> None:
    answers = iter([True, False])
    told = prewarm.prewarm(str(base / "bin" / "python3.11"), {}, lambda: next(answers))
    assert (told.files, told.is_whole) == (2, False)


@pytest.mark.parametrize("limit", ["LONGEST_S", "memory"])
def test_a_limit_ends_it(limit: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit == "memory":
        monkeypatch.setattr(prewarm, "free_memory", lambda: 8)
    else:
        monkeypatch.setattr(prewarm, limit, 0.0)
    told = prewarm.prewarm(str(base / "bin" / "python3.11"), {}, lambda: True)
    assert (told.read_bytes, told.is_whole) == (0, False)


def test_a_file_that_cannot_be_read_is_left_to_the_workers(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = str(base / "lib" / "gone.so")
    files = library_files(str(base / "bin" / "python3.11"), {})
    monkeypatch.setattr(prewarm, "library_files", lambda _path, _environ: [gone, *files])
    assert prewarm.prewarm("python", {}, lambda: True).files == 3


def test_nothing_is_found_for_what_is_no_interpreter(tmp_path: Path) -> None:
    told = prewarm.prewarm(str(tmp_path / "missing"), {}, lambda: True)
    assert (told.files, told.read_bytes, told.is_whole) == (0, 0, True)
