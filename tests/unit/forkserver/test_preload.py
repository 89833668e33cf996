"""What a fork server imports of what a program names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from dsl.forkserver.preload import guess_modules, import_modules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder first in sys.path, as a script's is, with some modules installed beside it."""
    folder = tmp_path / "mine"
    installed = tmp_path / "lib" / "site-packages"
    for path in (folder, installed, installed / "pack"):
        path.mkdir(parents=True)
    (installed / "single_one.py").write_text("done = True\ndef thing(): pass\n")
    (installed / "broken_one.py").write_text("1 / 0\n")
    (installed / "pack" / "__init__.py").write_text("value = 1\n")
    (installed / "pack" / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        del sys.modules[name]


def guessed(folder: Path, text: str, *, harmful: tuple[str, ...] = ()) -> tuple[str, ...]:
    (folder / "train.py").write_text(text)
    return guess_modules((str(folder / "train.py"),), harmful)


def test_only_what_is_installed_is_guessed(place: Path) -> None:
    (place / "own.py").write_text("")
    assert guessed(place, "import single_one, own, decimal, no_such_one, sys") == (
        "single_one",
        "decimal",
        "sys",
    )


def test_a_module_beside_the_script_hides_an_installed_one(place: Path) -> None:
    (place / "single_one.py").write_text("")
    assert guessed(place, "import single_one") == ()


def test_own_modules_are_read_for_what_they_import(place: Path) -> None:
    (place / "own").mkdir()
    (place / "own" / "__init__.py").write_text("from . import deep\nfrom .. import nothing")
    (place / "own" / "deep.py").write_text("import single_one\nimport own\nraise SystemExit")
    (place / "data").mkdir()
    assert set(guessed(place, "import own, data")) == {"single_one"}
    assert "own" not in sys.modules


def test_a_program_that_is_a_module_is_found(place: Path) -> None:
    (place / "own").mkdir()
    (place / "own" / "__init__.py").write_text("")
    (place / "own" / "__main__.py").write_text("import single_one")
    (place / "own" / "train.py").write_text("import decimal")
    assert guess_modules(("-m", "own"), ()) == ("single_one",)
    assert guess_modules(("-m", "own.train"), ()) == ("decimal",)
    assert guess_modules(("-m", "no_such_one.at_all"), ()) == ()


def test_what_acts_or_harms_when_imported_is_left_out(place: Path) -> None:
    assert guessed(place, "import antigravity, this, pack.part, single_one", harmful=("single_one",)) == (
        "pack.part",
    )


@pytest.mark.parametrize("text", ["x = (", "\0", "import " + "a." * 3000 + "a"])
def test_a_text_that_cannot_be_parsed_names_nothing(place: Path, text: str) -> None:
    assert guessed(place, text) == ()


def test_no_program_and_no_file_name_nothing(place: Path) -> None:
    assert guess_modules((), ()) == ()
    assert guess_modules((str(place / "none.py"),), ()) == ()


def test_names_of_functions_are_not_taken_for_modules(place: Path) -> None:
    names = guessed(place, "from pack import part, value\nfrom single_one import thing")
    assert names == ("pack", "pack.part", "pack.value", "single_one", "single_one.thing")
    import_modules(names, lambda _: None)
    assert {"pack.part", "single_one"} <= set(sys.modules)
    assert not {"pack.value", "single_one.thing"} & set(sys.modules)


def test_what_fails_is_left_to_the_worker(place: Path) -> None:
    begun: list[str] = []
    names = ["pack", "broken_one", "no_such_one", "single_one.thing.inner", "decimal"]
    failure = import_modules(names, begun.append)
    assert begun == [name for name in names if name != "decimal" or "decimal" in begun]
    assert failure == "cannot import broken_one: ZeroDivisionError: division by zero"
    assert "decimal" in sys.modules
    assert "pack" in sys.modules
    assert "broken_one" not in sys.modules


def test_what_is_only_guessed_may_fail_but_not_half_way(place: Path) -> None:
    for name, text in {
        "half": "import half.part\nimport half.missing",
        "whole": "import pack.part\nimport no_such_one",
        "user": "import half",
    }.items():
        (place / name).mkdir()
        (place / name / "__init__.py").write_text(text)
    (place / "half" / "part.py").write_text("")
    said = "ModuleNotFoundError: No module named 'half.missing'"
    for name, failure in {
        "no_such_one": None,
        "broken_one": None,
        "pack.no_such_one": None,
        "whole": None,
        "half": f"cannot import half: {said}",
        "user": f"cannot import user: {said}",
    }.items():
        known = set(sys.modules)
        assert import_modules([name, "decimal"], lambda _: None, are_guessed=True) == failure
        for left in set(sys.modules) - known:
            del sys.modules[left]
