"""Modules that a program's own text imports. Text in, names out."""

from __future__ import annotations

from dsl._record import Record, replace

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
        "tabulate",  # at the end of each process, once torch._dynamo is there
        "torch.onnx",
        "torch.utils.data",
        "torch.utils.serialization",
        "multiprocessing.queues",
        "multiprocessing.synchronize",
        "multiprocessing.popen_fork",
    )
}

TORCH_PACKAGES = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "torchtext", "deepspeed", "lightning", "pytorch_lightning"),
        *("accelerate", "transformers", "diffusers", "timm", "fairscale", "monai"),
    }
)
"""torch, and packages that import torch."""

OTHER_MODULES = 1
"""The text has changed where modules are found, or a variable: it may get other modules than we do."""
OTHER_LIBRARIES = 2
"""The text has also changed, or may have changed, what torch and numpy read when they are imported."""

# Prefixes of variables that torch, numpy or one of their libraries reads when it is loaded.
_READ_BY_LIBRARIES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH", "PYTORCH", "NCCL_", "GLOO_", "MALLOC_"),
)
# Methods that count as a change. Methods that add to the end of `sys.path` do not: they hide no module.
_CHANGES = {
    "sys.path": ("insert", "remove", "pop", "clear", "reverse", "sort"),
    "sys.modules": ("pop", "popitem", "clear", "update", "setdefault"),
    "os.environ": ("pop", "popitem", "clear", "update", "setdefault"),
    "os": ("putenv", "unsetenv"),
}


class Import(Record):
    """One import statement, for one module."""

    module: str
    """Dotted name; empty for ``from . import name``."""
    names: tuple[str, ...] = ()
    """The names behind ``from module import``: each may be a module, too. Empty for ``import module``."""
    level: int = 0
    """Leading dots: 0 is absolute."""
    behind: int = 0
    """What the text may have changed before it: 0 for nothing, `OTHER_MODULES` or `OTHER_LIBRARIES`."""
    is_inner: bool = False
    """It stands inside a function, which may never run; else it runs when the text runs."""


def find_imports(text: str | bytes, *, is_program: bool = False) -> tuple[Import, ...]:
    """The imports of a text, each once, without those that only a type checker sees.

    Those that run when the text runs come first, then those inside functions. ``is_program``: the text is run
    as the main program; otherwise imports for the main program alone are left out, too. Raises SyntaxError or
    ValueError if the text is not Python, RecursionError or MemoryError if it nests too deep.
    """
    tree = compile(text, "<text>", "exec", _ONLY_TREE, dont_inherit=True)
    found: list[Import] = []
    behind = 0
    waiting: list[tuple[Any, bool]] = [(tree, False)]
    while waiting:
        node, is_inner = waiting.pop()
        found.extend(_imports_of(node, behind, is_inner=is_inner))
        is_inner = is_inner or type(node).__name__ in _FUNCTIONS
        if not is_inner:
            behind = max(behind, _change_of(node))
        waiting += [(child, is_inner) for child in reversed(list(_children(node, is_program=is_program)))]
    top = [one for one in found if not one.is_inner]
    # A function may run when all of the text has run.
    inner = [replace(one, behind=behind) for one in found if one.is_inner]
    return tuple(dict.fromkeys([*top, *inner]))


def worth_preloading(found: Iterable[Import]) -> tuple[Import, ...]:
    """What a program will most likely import.

    All imports at the top are worth it. Imports inside functions are worth it only if they are of torch, or
    of a package that is also imported at the top: a function that is never called often imports a package
    that is heavy, or not even installed.
    """
    packages = {package_of(one.module) for one in found if not one.is_inner and not one.level} | {"torch"}
    return tuple(
        [one for one in found if not one.is_inner or (not one.level and package_of(one.module) in packages)]
    )


def with_later_imports(modules: Iterable[str]) -> tuple[str, ...]:
    """The modules, followed by those that their packages import later on."""
    names = list(dict.fromkeys(modules))
    packages = dict.fromkeys(package_of(name) for name in names)
    later = [name for package in packages for name in IMPORTED_LATER.get(package, ())]
    return tuple(dict.fromkeys((*names, *later)))


def package_of(module: str) -> str:
    """First part of a dotted name, also of ``module:name``."""
    return module.partition(":")[0].partition(".")[0]


def _imports_of(node: Any, behind: int, *, is_inner: bool) -> Iterator[Import]:
    kind = type(node).__name__
    if kind == "Import":
        for alias in node.names:
            yield Import(alias.name, behind=behind, is_inner=is_inner)
    elif kind == "ImportFrom" and node.module != "__future__":
        names = tuple(alias.name for alias in node.names if alias.name != "*")
        yield Import(node.module or "", names, node.level, behind, is_inner)


def _children(node: Any, *, is_program: bool) -> Iterator[Any]:
    fields = node._fields
    if type(node).__name__ == "If" and (
        _is_for_type_checkers(node.test) or (not is_program and _is_for_main(node.test))
    ):
        fields = ("orelse",)
    for field in fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else (value,):
            if hasattr(child, "_fields"):
                yield child


def _is_for_type_checkers(test: Any) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _is_for_main(test: Any) -> bool:
    """Whether a test is ``__name__ == "__main__"``, in either order."""
    if type(test).__name__ != "Compare" or [type(one).__name__ for one in test.ops] != ["Eq"]:
        return False
    sides = (test.left, *test.comparators)
    return "__name__" in [getattr(one, "id", None) for one in sides] and "__main__" in [
        getattr(one, "value", None) for one in sides
    ]


def _change_of(node: Any) -> int:
    """What a node changes for the imports after it, as in `Import.behind`."""
    kind = type(node).__name__
    if kind == "Call" and hasattr(node.func, "attr"):
        what, method = _dotted(node.func.value), node.func.attr
        return _weight(what, _variables_of(node, method)) if method in _CHANGES.get(what, ()) else 0
    if kind in ("Assign", "Delete"):
        targets = list(node.targets)
    elif kind == "AnnAssign" or (kind == "AugAssign" and _dotted(node.target) != "sys.path"):
        targets = [node.target]
    else:
        return 0
    change = 0
    while targets:
        target = targets.pop()
        targets += getattr(target, "elts", ())
        is_part = type(target).__name__ == "Subscript"
        what = _dotted(target.value if is_part else target)
        if what in _CHANGES and what != "os":
            change = max(change, _weight(what, [getattr(target.slice, "value", None) if is_part else None]))
    return change


def _weight(what: str, variables: Iterable[object]) -> int:
    """``variables``: names of the changed variables; None for a name that the text does not tell."""
    if what in ("sys.path", "sys.modules"):
        return OTHER_MODULES
    is_told = all(isinstance(one, str) and not one.startswith(_READ_BY_LIBRARIES) for one in variables)
    return OTHER_MODULES if is_told else OTHER_LIBRARIES


def _variables_of(call: Any, method: str) -> list[object]:
    first = call.args[:1]
    if method != "update":
        return [getattr(one, "value", None) for one in first] or [None]
    keys = [key for one in first for key in getattr(one, "keys", None) or [None]]
    return [*[getattr(key, "value", None) for key in keys], *[one.arg for one in call.keywords]]


def _dotted(node: Any) -> str:
    """``sys.path`` and the like as text; ``environ`` alone is ``os.environ``."""
    name = getattr(node, "id", "")
    if name:
        return "os.environ" if name == "environ" else name
    base = getattr(getattr(node, "value", None), "id", "")
    return f"{base}.{getattr(node, 'attr', '')}"
