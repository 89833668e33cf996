"""What a fork server imports of what a program names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl.forkserver.preload import (
    OTHER_LIBRARIES,
    OTHER_MODULES,
    PLACE_VARIABLES,
    Import,
    find_imports,
    guess_modules,
    import_modules,
    with_later_imports,
    worth_preloading,
)
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


def test_every_variable_of_a_place_is_known() -> None:
    of_flavours = {
        name
        for flavour in (DEEPSPEED, ELASTIC, TORCH, FUNCTIONS)
        for name, _ in (*flavour.group_variables, *flavour.worker_variables)
    }
    # Those of torchelastic tell of a job, and so does this one.
    others = {name for name in of_flavours if name.startswith("TORCHELASTIC_")} | {"ROLE_NAME"}
    assert of_flavours - others == PLACE_VARIABLES


@pytest.mark.parametrize(
    "text, top, inner",
    [
        ("import a, b.c", ["a", "b.c"], []),
        ("import a as b\nimport a", ["a"], []),
        ("if x:\n    import a\nelse:\n    import b", ["a", "b"], []),
        ("try:\n    import a\nexcept E:\n    import b\nfinally:\n    import c", ["a", "b", "c"], []),
        ("class A:\n    import a\n    def f(self):\n        import b", ["a"], ["b"]),
        ("def f():\n    import a\n    class B:\n        import b", [], ["a", "b"]),
        ("async def f():\n    import a", [], ["a"]),
        ("if __name__ == '__main__':\n    import a", ["a"], []),
        ("with x:\n    import a\nfor i in z:\n    import b\nwhile 1:\n    import c", ["a", "b", "c"], []),
        ("match x:\n    case 1:\n        import a", ["a"], []),
        ("from __future__ import annotations\nimport a", ["a"], []),
        ("import typing as t\nif t.TYPE_CHECKING:\n    import a\nelse:\n    import b", ["typing", "b"], []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a", ["typing"], []),
        ("", [], []),
        (b"# coding: latin-1\nx = '\xe9'\nimport a", ["a"], []),
    ],
)
def test_imports_are_found_where_they_run(text: str | bytes, top: list[str], inner: list[str]) -> None:
    found = find_imports(text, is_program=True)
    assert [one.module for one in found if not one.is_inner] == top
    assert [one.module for one in found if one.is_inner] == inner


@pytest.mark.parametrize(
    "test, top",
    [
        ("__name__ == '__main__'", ["b"]),
        ("'__main__' == __name__", ["b"]),
        ("__name__ != '__main__'", ["a", "b"]),
        ("name == '__main__'", ["a", "b"]),
        ("__name__ == 'worker'", ["a", "b"]),
    ],
)
def test_what_a_module_imports_as_a_main_program_does_not_count_elsewhere(test: str, top: list[str]) -> None:
    text = f"if {test}:\n    import a\nelse:\n    import b\n"
    assert [one.module for one in find_imports(text)] == top
    assert [one.module for one in find_imports(text, is_program=True)] == ["a", "b"]


CHANGES: dict[int, list[str]] = {
    0: [
        "pass",
        "sys.path.append('/a')",
        "sys.path.extend(['/a'])",
        "sys.path += ['/a']",
        "sys.path.index('/a')",
        "x = os.environ['OMP_NUM_THREADS']",
        "path = sys.path",
        "os = 3",
        "def f():\n    sys.path.insert(0, '/a')",
        "f = lambda: os.environ.clear()",
    ],
    OTHER_MODULES: [
        "sys.path.insert(0, '/a')",
        "sys.path = ['/a']",
        "sys.path[0] = '/a'",
        "del sys.path[0]",
        "x, sys.path[:] = 1, []",
        "sys.modules['a'] = None",
        "sys.modules.pop('a')",
        "os.environ['HF_HOME'] = '/a'",
        "environ['HF_HOME'] = '/a'",
        "os.environ.setdefault('HF_HOME', '/a')",
        "os.environ.update({'HF_HOME': '/a'}, B='1')",
        "os.putenv('HF_HOME', '/a')",
        "del os.environ['HF_HOME']",
        "if x:\n    os.environ['HF_HOME'] = '/a'",
    ],
    OTHER_LIBRARIES: [
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = ''",
        "os.environ[name] = '1'",
        "os.environ.update(all_of_them)",
        "os.environ.update({'A': '1', **others})",
        "os.environ.update(A='1', MKL_NUM_THREADS='1')",
        "os.environ.clear()",
        "os.environ |= others",
        "os.environ['HF_HOME'] = '/a'\nos.environ['NCCL_DEBUG'] = 'INFO'",
    ],
}


@pytest.mark.parametrize("line, behind", [(line, kind) for kind, lines in CHANGES.items() for line in lines])
def test_imports_behind_a_change_are_known(line: str, behind: int) -> None:
    found = find_imports(f"import a\n{line}\nimport b\ndef g():\n    import c\n")
    assert found == (Import("a"), Import("b", behind=behind), Import("c", behind=behind, is_inner=True))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("from a.b import c, d as e", Import("a.b", ("c", "d"))),
        ("from a import *", Import("a")),
        ("from . import a", Import("", ("a",), 1)),
        ("from ..a import b", Import("a", ("b",), 2)),
    ],
)
def test_what_is_imported_from_a_module_may_be_one(text: str, expected: Import) -> None:
    assert find_imports(text) == (expected,)


@pytest.mark.parametrize("text", ["x = (", "\0", "import"])
def test_a_text_that_is_no_python_is_refused(text: str) -> None:
    with pytest.raises((SyntaxError, ValueError)):
        find_imports(text)


def test_what_a_function_imports_counts_if_its_package_is_imported_anyway() -> None:
    text = "import a\ndef f():\n    import a.b, c, torch.nn\n    from . import own\n"
    assert [one.module for one in worth_preloading(find_imports(text))] == ["a", "a.b", "torch.nn"]


def test_what_torch_imports_at_a_first_step_follows_it() -> None:
    names = with_later_imports(["json", "torch.nn", "json"])
    assert names[:2] == ("json", "torch.nn")
    assert "torch._dynamo" in names
    assert with_later_imports(["json"]) == ("json",)
