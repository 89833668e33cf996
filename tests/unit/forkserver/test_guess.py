"""Modules that a text imports."""

from __future__ import annotations

import pytest

from dsl.forkserver.guess import (
    OTHER_LIBRARIES,
    OTHER_MODULES,
    Import,
    find_imports,
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


@pytest.mark.parametrize(
    "line, behind",
    [
        *[
            (line, 0)
            for line in (
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
            )
        ],
        *[
            (line, OTHER_MODULES)
            for line in (
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
            )
        ],
        *[
            (line, OTHER_LIBRARIES)
            for line in (
                "os.environ['OMP_NUM_THREADS'] = '1'",
                "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = ''",
                "os.environ[name] = '1'",
                "os.environ.update(all_of_them)",
                "os.environ.update({'A': '1', **others})",
                "os.environ.update(A='1', MKL_NUM_THREADS='1')",
                "os.environ.clear()",
                "os.environ |= others",
                "os.environ['HF_HOME'] = '/a'\nos.environ['NCCL_DEBUG'] = 'INFO'",
            )
        ],
    ],
)
def test_imports_behind_a_change_are_known(line: str, behind: int) -> None:
    found = find_imports(f"import a\n{line}\nimport b\ndef g():\n    import c\n")
    assert found == (
        Import("a"),
        Import("b", behind=behind),
        Import("c", behind=behind, is_inner=True),
    )


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
