"""Imports modules before the first fork."""

from __future__ import annotations

import os
import sys

from dsl.forkserver import guess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# Folders of what is installed. What lies elsewhere is the user's own: it may read its rank when it is
# imported, and it may be edited between two attempts, so each worker imports it itself.
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD = os.path.dirname(os.__file__) + "/"
# They act when they are imported.
_NEVER = frozenset({"__main__", "antigravity", "this", "idlelib", "turtledemo", "test"})
_MOST_TEXTS = 500
_MOST_BYTES = 1 << 20


def guess_modules(program: Sequence[str], harmful: Iterable[str]) -> tuple[str, ...]:
    """Modules to import for a program: ``(script,)`` or ``("-m", module)``, as far as its text names them.

    Modules of the user's own are not imported but read: what they import the program imports. A text that
    cannot be read or parsed names nothing. ``harmful``: modules that never are among them.
    """
    never = {*_NEVER, *harmful}
    texts = _Texts()
    if program[:1] == ("-m",):
        texts.add_module(program[1])
    elif program:
        texts.add(program[0], "")
    found: list[str] = []
    while (text := texts.next()) is not None:
        path, package = text
        for one in _imports_in(path):
            for name in _names(one, package):
                if _is_installed(guess.package_of(name)):
                    found.append(name)
                else:
                    texts.add_module(name)
    wanted = [name for name in found if guess.package_of(name) not in never and name not in never]
    return guess.with_later_imports(wanted)


def import_modules(
    names: Iterable[str], begin: Callable[[str], object], *, are_guessed: bool = False
) -> str | None:
    """Import what can be imported. Return what failed first, as a clause: workers meet it themselves.

    ``begin`` is called with each name before it is imported. ``are_guessed``: of those that a program may
    never import, only one counts that has failed half-way, because a worker would not meet the same.
    """
    failure = None
    for name in names:
        if name in sys.modules or _is_attribute(name):
            continue
        begin(name)
        before = set(sys.modules)
        try:
            __import__(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code
            if failure is None and (not are_guessed or _has_left_parts(before)):
                text = " ".join(str(error).split())
                failure = f"cannot import {name}: {type(error).__name__}: {text}"
    return failure


def _has_left_parts(before: set[str]) -> bool:
    """Whether there are modules of a package that is not there: its text would run a second time among them.

    That of torch then says so, and not what has failed.
    """
    parents = {name.rpartition(".")[0] for name in set(sys.modules) - before}
    return any(parent and parent not in sys.modules for parent in parents)


def _is_attribute(name: str) -> bool:
    """Whether it names something in a module that is no module: ``from package import function``."""
    parent, _, last = name.rpartition(".")
    module = sys.modules.get(parent)
    return module is not None and last in vars(module)


class _Texts:
    """Source files to read, each once."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, str]] = []
        self._seen: set[str] = set()

    def add(self, path: str, package: str) -> None:
        if path not in self._seen and len(self._seen) < _MOST_TEXTS:
            self._seen.add(path)
            self._waiting.append((path, package))

    def next(self) -> tuple[str, str] | None:
        return self._waiting.pop(0) if self._waiting else None

    def add_module(self, name: str) -> None:
        """Add what lies between the package and the module, nothing of it imported."""
        where = None
        spec = None
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            spec = _find(".".join(parts[:count]), where)
            if spec is None:
                return
            where = spec.submodule_search_locations
            package = spec.name if where is not None else spec.name.rpartition(".")[0]
            if spec.has_location and spec.origin and spec.origin.endswith(".py"):
                self.add(spec.origin, package)
        if where is not None and spec is not None and (main := _find(f"{name}.__main__", where)):
            self.add(main.origin or "", name)


def _imports_in(path: str) -> tuple[guess.Import, ...]:
    try:
        # Of a pipe, only one reads the text: the worker.
        if not os.path.isfile(path) or os.stat(path).st_size > _MOST_BYTES:
            return ()
        with open(path, "rb") as file:
            return guess.worth_preloading(guess.find_imports(file.read()))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _names(one: guess.Import, package: str) -> list[str]:
    base = one.module
    if one.level:
        parts = package.split(".")
        if not package or one.level > len(parts):
            return []
        base = ".".join([*parts[: len(parts) - one.level + 1], *([base] if base else [])])
    return [base, *[f"{base}.{name}" for name in one.names]]


def _is_installed(package: str) -> bool:
    if package in sys.builtin_module_names:
        return True
    spec = _find(package, None)
    if spec is None:
        return False
    if spec.origin == "frozen":
        return True
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return bool(places) and all(
        place is not None and (place.startswith(_STANDARD) or any(mark in place for mark in _INSTALLED))
        for place in places
    )


def _find(name: str, where: Iterable[str] | None) -> ModuleSpec | None:
    """What an import would find, found without it."""
    if where is None and (module := sys.modules.get(name)) is not None:
        return _spec_of(module)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, list(where) if where is not None else None)
        except Exception:  # noqa: BLE001, S112  finders are anybody's code
            continue
        if spec is not None:
            return spec
    return None


def _spec_of(module: ModuleType) -> ModuleSpec | None:
    return getattr(module, "__spec__", None)
