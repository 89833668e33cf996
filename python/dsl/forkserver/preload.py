"""Finds what a program imports, by its own text, and imports that before the first fork."""

from __future__ import annotations

import os
import sys

from dsl._record import Record, replace
from dsl.forkserver import hidden

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any

# Folders of installed packages. Modules elsewhere are the user's own: they may read the rank when they are
# imported, and may be edited between two attempts, so each worker imports them itself.
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD = os.path.dirname(os.__file__) + "/"
# Modules that do something as soon as they are imported.
_NEVER = frozenset({"__main__", "antigravity", "this", "idlelib", "turtledemo", "test"})
# Packages that read the rank when they are imported, and keep it. They need torch, which does not do that.
_READ_THEIR_PLACE = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"})
# Packages that we import although the text first changes where modules are found, or variables that these
# packages do not read.
_ALWAYS_THE_SAME = frozenset({"torch", "numpy"})
_MOST_TEXTS = 500
_MOST_BYTES = 1 << 20

PLACE_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CROSS_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("LOCAL_SIZE", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""Variables that tell a worker its place. The fork server has none of them."""


def guess_modules(
    program: Sequence[str], harmful: Iterable[str], read: set[str] | None = None
) -> tuple[str, ...]:
    """Modules to import for a program: ``(script,)`` or ``("-m", module)``, as far as its text names them.

    ``read`` gets the paths of all texts that were looked for.

    The user's own modules are not imported but read: the program imports what they import. A text that cannot
    be read or parsed names nothing. ``harmful`` modules are left out.
    """
    texts = _Texts()
    if program[:1] == ("-m",):
        texts.add_module(program[1], is_program=True)
    elif program:
        texts.add(_Text(program[0], "", is_program=True))
    found: list[str | None] = []
    for text in texts:
        for found_import in _imports_in(text):
            behind = max(found_import.behind, text.behind)
            for name in _names(found_import, text.package):
                if not _is_installed(package_of(name)):
                    texts.add_module(name.replace(":", "."), behind=behind)
                    continue
                found.append(_sure(name, behind))
    if read is not None:
        read.update([text.path for text in texts])
    inside = tuple(f"{name}." for name in (*_NEVER, *harmful))
    wanted = [name for name in found if name and not f"{name}.".replace(":", ".").startswith(inside)]
    return with_later_imports(wanted)


def _sure(name: str, behind: int) -> str | None:
    """What to import for a name, although the text has made changes before: only what workers get as well."""
    package = package_of(name)
    if package in sys.stdlib_module_names:
        return name
    is_same = not behind or (package in _ALWAYS_THE_SAME and behind < OTHER_LIBRARIES)
    if is_same and package not in _READ_THEIR_PLACE:
        return name
    needs_torch = package in TORCH_PACKAGES or package in _READ_THEIR_PLACE
    return "torch" if needs_torch and behind < OTHER_LIBRARIES else None


def import_modules(
    names: Iterable[str],
    begin: Callable[[str], object],
    withheld: Iterable[str] = (),
    *,
    are_guessed: bool = False,
    notes: hidden.Notes | None = None,
) -> str | None:
    """Import what can be imported. Return the first failure as a clause: workers will meet it themselves.

    ``names``: modules, or ``module:name`` for ``from module import name``. ``begin`` is called with each, as
    a dotted name, before it is imported. ``are_guessed``: the program may never import these modules, so only
    two kinds of failures count. Either a module failed half-way, so that a worker would not meet the same
    error, or a module asked for the worker's place. No module may ask for a ``withheld`` variable.
    ``notes`` get what the modules do.
    """
    failure = None
    private = frozenset(withheld)
    with notes or hidden.Notes() as seen:
        for name in names:
            if _is_there(name):
                continue
            shown = name.replace(":", ".")
            begin(shown)
            before = hidden.namespaces()
            copies = {place: dict(space) for place, space in before.items()}
            try:
                _import(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code
                if failure is None and (not are_guessed or _has_left_parts(before)):
                    text = " ".join(str(error).split())
                    failure = f"cannot import {shown}: {type(error).__name__}: {text}"
            seen.note_replaced(name.partition(":")[0], copies)
            if failure is None and (asked := seen.missed(private)):
                failure = f"{shown} reads {asked} when it is imported, which only workers get"
            elif are_guessed and failure is None and (asked := seen.missed(PLACE_VARIABLES)):
                failure = f"{shown} reads {asked} when it is imported: name what to import with --preload"
    return failure


def _import(name: str) -> None:
    """Import as the statement does: a submodule is searched only if its package has nothing of that name."""
    module, _, part = name.partition(":")
    __import__(module, fromlist=[part] if part else ())


def _has_left_parts(before: Collection[str]) -> bool:
    """Whether modules of a package are left although the package is not: its text would run a second time.

    torch then reports that second run, and not what has failed.
    """
    parents = {name.rpartition(".")[0] for name in sys.modules if name not in before}
    return any(parent and parent not in sys.modules for parent in parents)


def _is_there(name: str) -> bool:
    """Whether there is nothing to import, also if the name is that of a function in an imported module."""
    if name in sys.modules:
        return True
    parent, _, last = name.replace(":", ".").rpartition(".")
    module = sys.modules.get(parent)
    return module is not None and last in vars(module)


class _Text(Record):
    """A source file to read."""

    path: str
    """Path of the file."""
    package: str
    """Package of its module, for imports with leading dots."""
    is_program: bool = False
    """Whether it is run as the main program."""
    behind: int = 0
    """As `Import.behind`, for the first import that leads to this file."""


class _Texts(list[_Text]):
    """Source files to read, each once. A loop over them also meets those that are added meanwhile."""

    def add(self, text: _Text) -> None:
        if len(self) < _MOST_TEXTS and all(text.path != known.path for known in self):
            self.append(text)

    def add_module(self, name: str, *, is_program: bool = False, behind: int = 0) -> None:
        """Add the files from the package down to the module, and import none of them."""
        where = None
        parts = name.split(".")
        if is_program:
            parts.append("__main__")  # of a package; a module has none
        for count in range(1, len(parts) + 1):
            spec = _find(".".join(parts[:count]), where)
            if spec is None:
                return
            where = spec.submodule_search_locations
            package = spec.name if where is not None else spec.name.rpartition(".")[0]
            if spec.has_location and spec.origin and spec.origin.endswith(".py"):
                self.add(_Text(spec.origin, package, is_program and where is None, behind))
            if where is None:
                return


def _imports_in(text: _Text) -> tuple[Import, ...]:
    try:
        # The text of a pipe can be read only once, and the worker has to read it.
        if not os.path.isfile(text.path) or os.stat(text.path).st_size > _MOST_BYTES:
            return ()
        with open(text.path, "rb") as file:
            return worth_preloading(find_imports(file.read(), is_program=text.is_program))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _names(one: Import, package: str) -> list[str]:
    base = one.module
    if one.level:
        parts = package.split(".")
        if not package or one.level > len(parts):
            return []
        base = ".".join([*parts[: len(parts) - one.level + 1], *([base] if base else [])])
    return [base, *[f"{base}:{name}" for name in one.names]]


def _is_installed(package: str) -> bool:
    if package in sys.builtin_module_names:
        return True
    spec = _find(package, None)
    if spec is None or spec.origin == "frozen":
        return spec is not None
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return bool(places) and all(
        place is not None and (place.startswith(_STANDARD) or any(mark in place for mark in _INSTALLED))
        for place in places
    )


def _find(name: str, where: Iterable[str] | None) -> ModuleSpec | None:
    """What an import would find, without importing it."""
    if where is None and (module := sys.modules.get(name)) is not None:
        return getattr(module, "__spec__", None)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, list(where) if where is not None else None)
        except Exception:  # noqa: BLE001, S112  finders are anybody's code
            continue
        if spec is not None:
            return spec
    return None


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
