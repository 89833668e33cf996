"""Modules that a text imports."""

from __future__ import annotations

import pytest

from dsl.forkserver.guess import (
    Import,
    find_imports,
    imported_modules,
    with_later_imports,
    worth_preloading,
)


@pytest.mark.parametrize(
    "text, top, inner",
    [
        ("import a, b.c", ["a", "b.c"], []),
        ("import a as b\nimport a", ["a"], []),
        ("if x:\n    import a\nelse:\n    import b", ["a", "b"], []),
        (
            "try:\n    import a\nexcept ImportError:\n    import b\nfinally:\n    import c",
            ["a", "b", "c"],
            [],
        ),
        ("class A:\n    import a\n    def f(self):\n        import b", ["a"], ["b"]),
        ("def f():\n    import a\n    class B:\n        import b", [], ["a", "b"]),
        ("async def f():\n    import a", [], ["a"]),
        ("if __name__ == '__main__':\n    import a", ["a"], []),
        (
            "with x as y:\n    import a\nfor i in z:\n    import b\nwhile 1:\n    import c",
            ["a", "b", "c"],
            [],
        ),
        ("match x:\n    case 1:\n        import a", ["a"], []),
        ("from __future__ import annotations\nimport a", ["a"], []),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nelse:\n    import b",
            ["typing", "b"],
            [],
        ),
        ("import typing\nif typing.TYPE_CHECKING:\n    import a", ["typing"], []),
        ("", [], []),
        (b"# coding: latin-1\nx = '\xe9'\nimport a", ["a"], []),
    ],
)
def test_imports_are_found_where_they_run(text: str | bytes, top: list[str], inner: list[str]) -> None:
    found = find_imports(text)
    assert [one.module for one in found.top] == top
    assert [one.module for one in found.inner] == inner


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
    assert find_imports(text).top == (expected,)


def test_names_without_dots_before_them_are_told() -> None:
    text = "import a\nfrom b.c import d\nfrom . import e\ndef f():\n    import g, a\n"
    assert imported_modules(text) == ("a", "b.c", "g")


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
