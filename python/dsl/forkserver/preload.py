"""Imports modules before the first fork."""

from __future__ import annotations

import os
import sys

from dsl._record import Record
from dsl.forkserver import guess, hidden

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec

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
    never = {*_NEVER, *harmful}
    texts = _Texts()
    if program[:1] == ("-m",):
        texts.add_module(program[1], is_program=True)
    elif program:
        texts.add(_Text(program[0], "", is_program=True))
    found: list[str | None] = []
    for text in texts:
        for one in _imports_in(text):
            behind = max(one.behind, text.behind)
            for name in _names(one, text.package):
                if not _is_installed(guess.package_of(name)):
                    texts.add_module(name.replace(":", "."), behind=behind)
                    continue
                found.append(_sure(name, behind))
    if read is not None:
        read.update(texts.seen)
    inside = tuple(f"{name}." for name in never)
    wanted = [name for name in found if name and not f"{name}.".replace(":", ".").startswith(inside)]
    return guess.with_later_imports(wanted)


def _sure(name: str, behind: int) -> str | None:
    """What to import for a name, although the text has made changes before: only what workers get as well."""
    package = guess.package_of(name)
    if package in sys.stdlib_module_names:
        return name
    is_same = not behind or (package in _ALWAYS_THE_SAME and behind < guess.OTHER_LIBRARIES)
    if is_same and package not in _READ_THEIR_PLACE:
        return name
    needs_torch = package in guess.TORCH_PACKAGES or package in _READ_THEIR_PLACE
    return "torch" if needs_torch and behind < guess.OTHER_LIBRARIES else None


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
    """As `guess.Import.behind`, for the first import that leads to this file."""


class _Texts:
    """Source files to read, each once."""

    def __init__(self) -> None:
        self._waiting: list[_Text] = []
        self.seen: set[str] = set()

    def __iter__(self) -> Iterator[_Text]:
        """Each text, also those that are added meanwhile."""
        while self._waiting:
            yield self._waiting.pop(0)

    def add(self, text: _Text) -> None:
        if text.path not in self.seen and len(self.seen) < _MOST_TEXTS:
            self.seen.add(text.path)
            self._waiting.append(text)

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


def _imports_in(text: _Text) -> tuple[guess.Import, ...]:
    try:
        # The text of a pipe can be read only once, and the worker has to read it.
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
