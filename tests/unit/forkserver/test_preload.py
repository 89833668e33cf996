"""What a fork server imports of what a program names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl.forkserver.preload import PLACE_VARIABLES, guess_modules, import_modules
from dsl.plan.worker import DEEPSPEED, ELASTIC, FUNCTIONS, TORCH


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
    (installed / "asks.py").write_text("import os\nrank = os.environ.get('LOCAL_RANK')\n")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        del sys.modules[name]


LAZY = """
def __getattr__(name):
    if name != "solve":
        raise AttributeError(name)
    from importlib import import_module
    globals()["solve"] = import_module("lazy.solve").solve
    return solve
"""


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
    assert names == ("pack", "pack:part", "pack:value", "single_one", "single_one:thing")
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


def test_a_name_that_a_package_gives_late_is_not_taken_for_a_submodule(place: Path) -> None:
    (place.parent / "lib" / "site-packages" / "lazy").mkdir()
    (place.parent / "lib" / "site-packages" / "lazy" / "__init__.py").write_text(LAZY)
    (place.parent / "lib" / "site-packages" / "lazy" / "solve.py").write_text("def solve(): pass\n")
    begun: list[str] = []
    import_modules(guessed(place, "from lazy import solve\n"), begun.append, are_guessed=True)
    assert begun == ["lazy", "lazy.solve"]
    assert callable(sys.modules["lazy"].solve)


def test_what_harms_is_also_left_out_where_it_is_imported_from_its_package(place: Path) -> None:
    for text, expected in {
        "from pack import part, value": ("pack", "pack:value"),
        "from pack.part import inner": (),
        "import pack.parts": ("pack.parts",),
    }.items():
        assert guessed(place, text, harmful=("pack.part",)) == expected


def test_what_a_module_imports_as_a_main_program_is_not_guessed(place: Path) -> None:
    text = "if __name__ == '__main__':\n    import single_one\n"
    (place / "own").mkdir()
    for name in ("own/__init__", "own/other", "own/__main__"):
        (place / f"{name}.py").write_text(text)
    assert guessed(place, text) == ("single_one",)
    assert guessed(place, "import own, own.other") == ()
    assert guess_modules(("-m", "own.other"), ()) == guess_modules(("-m", "own"), ()) == ("single_one",)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("sys.path.insert(0, 'src')", ("pack", "decimal", "numpy")),
        ("os.environ['HF_HOME'] = '/a'", ("pack", "decimal", "numpy")),
        ("os.environ['OMP_NUM_THREADS'] = '1'", ("pack", "decimal")),
        ("sys.path.append('src')", ("pack", "single_one", "decimal", "numpy")),
    ],
)
def test_what_a_program_changes_first_counts_for_what_it_imports_then(
    place: Path, line: str, expected: tuple[str, ...]
) -> None:
    for name in ("numpy", "own"):
        (place.parent / "lib" / "site-packages" / f"{name}.py").write_text("")
    (place / "own.py").write_text("import single_one, decimal, numpy")
    assert guessed(place, f"import pack\n{line}\nimport single_one, decimal, numpy") == expected
    assert set(guessed(place, f"import pack\n{line}\nimport own")) == set(expected)


@pytest.mark.parametrize(
    "line, expected", [("sys.path.insert(0, 'src')", ("torch",)), ("os.environ['OMP_NUM_THREADS'] = '1'", ())]
)
def test_behind_a_change_torch_is_imported_in_place_of_what_needs_it(
    place: Path, line: str, expected: tuple[str, ...]
) -> None:
    for name in ("torch", "transformers"):
        (place.parent / "lib" / "site-packages" / f"{name}.py").write_text("")
    assert guessed(place, f"{line}\nfrom transformers import Trainer")[:1] == expected


def test_what_goes_by_its_place_is_not_guessed_but_what_it_needs(place: Path) -> None:
    for name in ("torch", "lightning", "torchmetrics"):
        (place.parent / "lib" / "site-packages" / f"{name}.py").write_text("")
    names = guessed(place, "from lightning.pytorch import Trainer\nimport torchmetrics, decimal")
    assert names[:2] == ("torch", "decimal")
    assert not [name for name in names if name.startswith(("lightning", "torchmetrics"))]


def test_a_guess_that_asks_for_its_place_is_a_reason_to_refuse(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    get = os.environ.__class__.__getitem__
    said = "asks reads LOCAL_RANK when it is imported: name what to import with --preload"
    assert import_modules(["decimal", "asks"], lambda _: None, are_guessed=True) == said
    assert os.environ.__class__.__getitem__ is get
    del sys.modules["asks"]
    assert import_modules(["asks"], lambda _: None) is None


def test_every_variable_of_a_place_is_known() -> None:
    of_flavours = {
        name
        for flavour in (DEEPSPEED, ELASTIC, TORCH, FUNCTIONS)
        for name, _ in (*flavour.group_variables, *flavour.worker_variables)
    }
    # Those of torchelastic tell of a job, and so does this one.
    others = {name for name in of_flavours if name.startswith("TORCHELASTIC_")} | {"ROLE_NAME"}
    assert of_flavours - others == PLACE_VARIABLES
