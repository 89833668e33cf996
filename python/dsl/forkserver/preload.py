"""Imports modules before the first fork."""

from __future__ import annotations

import os
import sys

from dsl._record import record
from dsl.forkserver import guess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Folders of what is installed. What lies elsewhere is the user's own: it may read its rank when it is
# imported, and it may be edited between two attempts, so each worker imports it itself.
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD = os.path.dirname(os.__file__) + "/"
# They act when they are imported.
_NEVER = frozenset({"__main__", "antigravity", "this", "idlelib", "turtledemo", "test"})
# They note the rank when they are imported, and go by that. They need torch, which does not.
_READ_THEIR_PLACE = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"})
# What a text may import behind a change of where modules are found, or of variables that these do not read.
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


def guess_modules(program: Sequence[str], harmful: Iterable[str]) -> tuple[str, ...]:
    """Modules to import for a program: ``(script,)`` or ``("-m", module)``, as far as its text names them.

    Modules of the user's own are not imported but read: what they import the program imports. A text that
    cannot be read or parsed names nothing. ``harmful``: modules that never are among them.
    """
    never = {*_NEVER, *harmful}
    texts = _Texts()
    if program[:1] == ("-m",):
        texts.add_module(program[1], is_program=True)
    elif program:
        texts.add(_Text(program[0], "", is_program=True))
    found: list[str] = []
    while (text := texts.next()) is not None:
        for one in _imports_in(text):
            behind = max(one.behind, text.behind)
            for name in _names(one, text.package):
                if not _is_installed(guess.package_of(name)):
                    texts.add_module(name.replace(":", "."), behind=behind)
                    continue
                if (sure := _sure(name, behind)) is not None:
                    found.append(sure)
    inside = tuple(f"{name}." for name in never)
    wanted = [name for name in found if not f"{name}.".replace(":", ".").startswith(inside)]
    return guess.with_later_imports(wanted)


def _sure(name: str, behind: int) -> str | None:
    """What is imported for a name, though the text has changed something before: as a worker will get it."""
    package = guess.package_of(name)
    if package in sys.stdlib_module_names:
        return name
    is_same = not behind or (package in _ALWAYS_THE_SAME and behind < guess.OTHER_LIBRARIES)
    if is_same and package not in _READ_THEIR_PLACE:
        return name
    needs_torch = package in guess.TORCH_PACKAGES or package in _READ_THEIR_PLACE
    return "torch" if needs_torch and behind < guess.OTHER_LIBRARIES else None


def import_modules(
    names: Iterable[str], begin: Callable[[str], object], *, are_guessed: bool = False
) -> str | None:
    """Import what can be imported. Return what failed first, as a clause: workers meet it themselves.

    ``names``: of modules, or ``module:name`` for what ``from module import name`` does. ``begin`` is called
    with each, as a dotted name, before it is imported. ``are_guessed``: of those that a program may never
    import, only one counts that has failed half-way, because a worker would not meet the same, or that has
    asked for its place.
    """
    failure = None
    for name in names:
        if _is_there(name):
            continue
        shown = name.replace(":", ".")
        begin(shown)
        before = set(sys.modules)
        with _Watch() as watch:
            try:
                _import(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code
                if failure is None and (not are_guessed or _has_left_parts(before)):
                    text = " ".join(str(error).split())
                    failure = f"cannot import {shown}: {type(error).__name__}: {text}"
        if are_guessed and failure is None and watch.asked_for:
            failure = (
                f"{shown} reads {watch.asked_for} when it is imported: name what to import with --preload"
            )
    return failure


def _import(name: str) -> None:
    """As the statement does: a submodule is looked for only where its package gives nothing of that name."""
    module, _, part = name.partition(":")
    __import__(module, fromlist=[part] if part else ())


class _Watch:
    """Notes in a ``with`` block the first variable that tells a worker its place and is asked for."""

    def __init__(self) -> None:
        self.asked_for = ""

    def __enter__(self) -> _Watch:  # noqa: PYI034  typing.Self needs 3.11
        # Not in `os.environ` itself: whoever holds that, or what it holds, goes on holding it.
        of_variables = os._Environ  # noqa: SLF001  its instances have no place for a method
        self._get = get = of_variables.__getitem__

        def get_and_note(variables: Any, name: Any) -> Any:
            try:
                return get(variables, name)
            except KeyError:
                text = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
                if text in PLACE_VARIABLES:
                    self.asked_for = self.asked_for or text
                raise

        self._noting = get_and_note
        of_variables.__getitem__ = get_and_note  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        of_variables = os._Environ  # noqa: SLF001  as above
        if of_variables.__getitem__ is self._noting:
            of_variables.__getitem__ = self._get  # type: ignore[method-assign]


def _has_left_parts(before: set[str]) -> bool:
    """Whether there are modules of a package that is not there: its text would run a second time among them.

    That of torch then says so, and not what has failed.
    """
    parents = {name.rpartition(".")[0] for name in set(sys.modules) - before}
    return any(parent and parent not in sys.modules for parent in parents)


def _is_there(name: str) -> bool:
    """Whether there is nothing to import, also because the name is that of a function in a module."""
    if name in sys.modules:
        return True
    parent, _, last = name.replace(":", ".").rpartition(".")
    module = sys.modules.get(parent)
    return module is not None and last in vars(module)


@record
class _Text:
    """A source file to read."""

    path: str
    """Of the file."""
    package: str
    """In which its module is, for imports with leading dots."""
    is_program: bool = False
    """Whether it is run as the main program."""
    behind: int = 0
    """As `guess.Import.behind`, of the first import that leads here."""


class _Texts:
    """Source files to read, each once."""

    def __init__(self) -> None:
        self._waiting: list[_Text] = []
        self._seen: set[str] = set()

    def add(self, text: _Text) -> None:
        if text.path not in self._seen and len(self._seen) < _MOST_TEXTS:
            self._seen.add(text.path)
            self._waiting.append(text)

    def next(self) -> _Text | None:
        return self._waiting.pop(0) if self._waiting else None

    def add_module(self, name: str, *, is_program: bool = False, behind: int = 0) -> None:
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
                self.add(_Text(spec.origin, package, is_program and where is None, behind))
        if is_program and where is not None and (main := _find(f"{name}.__main__", where)):
            self.add(_Text(main.origin or "", name, is_program, behind))


def _imports_in(text: _Text) -> tuple[guess.Import, ...]:
    try:
        # Of a pipe, only one reads the text: the worker.
        if not os.path.isfile(text.path) or os.stat(text.path).st_size > _MOST_BYTES:
            return ()
        with open(text.path, "rb") as file:
            return guess.worth_preloading(guess.find_imports(file.read(), is_program=text.is_program))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _names(one: guess.Import, package: str) -> list[str]:
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
