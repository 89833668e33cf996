"""What a worker sees of the imports of its server."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsl.forkserver.hidden import Hidden, Notes
from dsl.forkserver.preload import import_modules

Hide = Callable[..., Hidden]


@pytest.fixture(params=["walked in the worker", "walked in the server"])
def hide(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hide]:
    """Write modules, import some of them, and hide them."""
    first = vars(importlib._bootstrap)["_find_and_load"]
    start = frozenset(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("SET_BY_ONE", "READ_BY_ONE"):
        monkeypatch.delenv(name, raising=False)

    def write(*names: str, **texts: str) -> Hidden:
        for name, text in texts.items():
            path = tmp_path.joinpath(*name.split("__"))
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".py").write_text(text)
        notes = Notes()
        assert import_modules(names, lambda _: None, notes=notes) is None
        return Hidden(start, notes, names if request.param == "walked in the server" else ())

    yield write
    vars(importlib._bootstrap)["_find_and_load"] = first
    os.environ.pop("SET_BY_ONE", None)
    for name in set(sys.modules) - start:
        del sys.modules[name]


def seen(*names: str) -> list[str]:
    return [name for name in names if name in sys.modules]


def test_an_import_shows_what_it_has_imported_and_no_more(hide: Hide) -> None:
    texts = {"one": "import two\nwhole = []", "two": "from four import part", "three": "import two"}
    hide("one", "three", **texts, four____init__="", four__part="", four__other="")
    names = ("one", "two", "three", "four", "four.part")
    assert seen(*names) == []
    one = importlib.import_module("one")
    assert seen(*names) == ["one", "two", "four", "four.part"]
    assert one.whole is importlib.import_module("one").whole


def test_what_is_left_of_an_import_is_shown_in_its_order(hide: Hide) -> None:
    names = ("one", "two", "three", "four", "five")
    hide("one", one="import two, three, five", two="", three="import four", four="", five="")
    importlib.import_module("three")
    importlib.import_module("one")
    assert [name for name in sys.modules if name in names] == ["three", "four", "one", "two", "five"]


def test_a_part_is_no_name_in_its_package_before_it_is_imported(hide: Hide) -> None:
    hide("four.part", four____init__="", four__part="value = 3")
    four = importlib.import_module("four")
    assert not hasattr(four, "part")
    importlib.import_module("four.part")
    assert four.part.value == 3


@pytest.mark.parametrize("text", ["", "from four import part"])
def test_a_module_in_the_place_of_a_package_has_no_parts(hide: Hide, text: str) -> None:
    hide("four.part", four____init__=text, four__part="")
    sys.modules["four"] = type(sys)("four")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("four.part")


SETS = "import os\nvalue = os.environ.get('READ_BY_ONE')\nos.environ['SET_BY_ONE'] = f'because of {value}'"


def test_variables_come_with_the_module_that_sets_them(hide: Hide) -> None:
    hide("one", one=SETS)
    assert "SET_BY_ONE" not in os.environ
    importlib.import_module("one")
    assert os.environ["SET_BY_ONE"] == "because of None"


@pytest.mark.parametrize("name", ["READ_BY_ONE", "SET_BY_ONE"])
def test_a_variable_is_not_set_where_it_would_get_another_value(
    hide: Hide, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hide("one", one=SETS)
    monkeypatch.setenv(name, "of the script")
    importlib.import_module("one")
    assert os.environ.get("SET_BY_ONE") == ("of the script" if name == "SET_BY_ONE" else None)


def test_a_function_of_another_module_is_replaced_when_the_replacing_module_is_imported(hide: Hide) -> None:
    texts = {"one": "def one(): return 'first'", "two": "import one\none.one = lambda: 'second'"}
    hide("one", "two", **texts)
    one = importlib.import_module("one")
    assert one.one() == "first"
    importlib.import_module("two")
    assert one.one() == "second"


def test_settings_run_again_where_a_variable_has_changed(hide: Hide, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (
        "import os, sys\nclass ConfigModule(type(sys)):\n    def __setattr__(self, name, value):\n"
        "        raise AttributeError(name)\n"
        "value = os.environ.get('READ_BY_ONE')\n"
        "object.__setattr__(sys.modules[__name__], '__class__', ConfigModule)"
    )
    hide("two", one=settings, two="import one\nold = one.value")
    monkeypatch.setenv("READ_BY_ONE", "of the script")
    two = importlib.import_module("two")
    assert (two.old, two.one.value) == (None, "of the script")
    assert two.one is sys.modules["one"]


def test_nothing_is_left_of_the_notes(hide: Hide) -> None:
    first = __import__
    hide(
        "one",
        one="import builtins, os\nkept = builtins.__import__\nimporting = os.environ.__class__.__getitem__",
    )
    one = importlib.import_module("one")
    assert one.kept is first
    assert one.importing is os.environ.__class__.__getitem__
