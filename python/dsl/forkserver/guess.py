"""Modules that a program's own text imports. Text in, names out."""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

# As in `ast.PyCF_ONLY_AST`: `ast` itself would stay in the workers as a module that they have not imported.
_ONLY_TREE = 0x400
_FUNCTIONS = frozenset({"FunctionDef", "AsyncFunctionDef", "Lambda"})

# What a first training step imports by itself (torch 2.15: sys.modules before and after a step of DDP over
# gloo; `torch._dynamo` brings 850 of those 908 modules). A name that a version does not have is skipped.
IMPORTED_LATER = {
    "torch": (
        "torch.distributed",
        "torch.nn.parallel",
        "torch._dynamo",
        "torch.onnx",
        "torch.utils.data",
        "torch.utils.serialization",
        "multiprocessing.queues",
        "multiprocessing.synchronize",
        "multiprocessing.popen_fork",
    )
}


@record
class Import:
    """One import statement, for one module."""

    module: str
    """Dotted name; empty for ``from . import name``."""
    names: tuple[str, ...] = ()
    """What ``from module import`` names: each may be a module, too. Empty for ``import module``."""
    level: int = 0
    """Leading dots: 0 is absolute."""


@record
class Imports:
    """All imports of a text, each in its order, the same one once."""

    top: tuple[Import, ...]
    """Those that run when the text runs: also below ``if``, ``try``, ``with`` and in classes."""
    inner: tuple[Import, ...]
    """Those inside functions, which may never run."""


def find_imports(text: str | bytes) -> Imports:
    """Imports that a text names, but for those that only a type checker sees.

    Raises SyntaxError or ValueError for a text that is no Python, RecursionError for one that is too deep.
    """
    tree = compile(text, "<text>", "exec", _ONLY_TREE, dont_inherit=True)
    top: list[Import] = []
    inner: list[Import] = []
    waiting: list[tuple[Any, bool]] = [(tree, False)]
    while waiting:
        node, is_inner = waiting.pop()
        (inner if is_inner else top).extend(_imports_of(node))
        is_inner = is_inner or type(node).__name__ in _FUNCTIONS
        waiting += [(child, is_inner) for child in reversed(list(_children(node)))]
    return Imports(tuple(dict.fromkeys(top)), tuple(dict.fromkeys(inner)))


def imported_modules(text: str | bytes) -> tuple[str, ...]:
    """Dotted names of the modules that a text imports absolutely, those inside functions last.

    Raises what `find_imports` raises.
    """
    found = find_imports(text)
    return tuple(dict.fromkeys(one.module for one in (*found.top, *found.inner) if not one.level))


def worth_preloading(found: Imports) -> tuple[Import, ...]:
    """What a program will most likely import.

    Of the imports inside functions those of packages that it also imports at its top, and torch. A function
    that is never called often imports what is heavy, or not even installed.
    """
    packages = {package_of(one.module) for one in found.top if not one.level}
    inner = [one for one in found.inner if not one.level and package_of(one.module) in {*packages, "torch"}]
    return (*found.top, *inner)


def with_later_imports(modules: Iterable[str]) -> tuple[str, ...]:
    """The modules, and behind them what their packages import later on."""
    names = list(dict.fromkeys(modules))
    packages = dict.fromkeys(package_of(name) for name in names)
    later = [name for package in packages for name in IMPORTED_LATER.get(package, ())]
    return tuple(dict.fromkeys((*names, *later)))


def package_of(module: str) -> str:
    """First part of a dotted name."""
    return module.partition(".")[0]


def _imports_of(node: Any) -> Iterator[Import]:
    kind = type(node).__name__
    if kind == "Import":
        for alias in node.names:
            yield Import(alias.name)
    elif kind == "ImportFrom" and node.module != "__future__":
        names = tuple(alias.name for alias in node.names if alias.name != "*")
        yield Import(node.module or "", names, node.level)


def _children(node: Any) -> Iterator[Any]:
    fields = node._fields
    if type(node).__name__ == "If" and _is_for_type_checkers(node.test):
        fields = ("orelse",)
    for field in fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else (value,):
            if hasattr(child, "_fields"):
                yield child


def _is_for_type_checkers(test: Any) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))
