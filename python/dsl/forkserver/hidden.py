"""Imports that a worker does not see until it makes them itself.

A server imports what its workers will import, long before they do. `Notes` are taken meanwhile. `Hidden` then
removes the modules from `sys.modules`. When a worker imports one of them, it gets that module, those that the
module has imported, and the variables that they have set: what it would have, had it executed their files.
"""

from __future__ import annotations

import _frozen_importlib  # `importlib._bootstrap`, which need not be imported
import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import ModuleType
    from typing import Any

    Namespaces = dict[str, dict[str, Any]]

# Modules whose functions have the default process group of the moment of their import as a default argument.
# A server has none. In a worker they keep the group alive: gloo's threads may wait for the interpreter's lock
# while the group ends, and some versions of torch hold that lock meanwhile.
_RUN_AGAIN = frozenset({"torch.distributed.nn", "torch.distributed.nn.functional"})
# The class of torch's modules of settings, which read variables.
_SETTINGS = "ConfigModule"
_MOST_MODULES = 4096
_bootstrap: Any = vars(_frozen_importlib)
_function: Any = type(lambda: None)
_module: Any = type(sys)


def _as_of_import(function: Any) -> Any:
    """Make tracebacks, warnings and `inspect` take a function for a part of Python's import."""
    function.__code__ = function.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    return function


class Notes:
    """What modules do when they are imported, noted in a ``with`` block.

    At its end variables are as they were before. ``more``: further functions to replace meanwhile: holder,
    name, and what makes the replacement from the function.
    """

    def __init__(self, more: Collection[tuple[Any, str, Callable[[Any], Any]]] = ()) -> None:
        self._more = more
        self.asked: dict[str, dict[str, None]] = {}
        """Of each module, the modules that it has imported, in their order."""
        self.read: dict[str, dict[str, str | None]] = {}
        """Of each module, the variables that it has read, with their values; None: not set."""
        self.variables: dict[str, list[tuple[str, str | None, str | None]]] = {}
        """Of each module, the variables that it has changed: name, value before and after."""
        self.replaced: dict[str, list[tuple[dict[str, Any], str, Any, Any]]] = {}
        """Of each module that was imported by name, the functions of other modules that were replaced
        meanwhile: namespace, name, function before and after."""
        self._running = [""]

    def __enter__(self) -> Notes:  # noqa: PYI034  typing.Self needs 3.11
        self._known = set(sys.modules)
        # Side by side in memory: a worker that counts a reference to each copies few pages.
        self._blank = [_module("") for _ in range(_MOST_MODULES)]
        # We change the class, not `os.environ` itself: modules may hold that object, or what it holds.
        of_variables = vars(os)["_Environ"]
        places = [
            (builtins, "__import__", self._importing),
            (_frozen_importlib, "_gcd_import", self._importing_by_name),
            (_frozen_importlib, "_load_unlocked", self._loading),
            (_frozen_importlib, "_new_module", self._making),
            (of_variables, "__getitem__", self._reading),
            (of_variables, "__setitem__", self._changing),
            (of_variables, "__delitem__", self._changing),
            *self._more,
        ]
        self._places = []
        for holder, name, wrap in places:
            first = getattr(holder, name)
            ours = wrap(first)
            setattr(holder, name, ours)
            self._places.append((holder, name, first, ours))
        return self

    def __exit__(self, *_: object) -> None:
        self._blank.clear()
        for holder, name, first, ours in self._places:
            if getattr(holder, name) is ours:
                setattr(holder, name, first)
        firsts = {id(ours): first for _, _, first, ours in self._places}
        for space in namespaces().values():
            for name, value in list(space.items()):
                if id(value) in firsts:
                    space[name] = firsts[id(value)]
        for changes in reversed(list(self.variables.values())):
            for name, before, after in reversed(changes):
                _change(name, after, before)

    def missed(self, names: Collection[str]) -> str:
        """The first of these variables that a module has read and that was not set; or empty."""
        return next(
            (name for read in self.read.values() for name in read if name in names and read[name] is None), ""
        )

    def note_replaced(self, name: str, before: Namespaces) -> None:
        """Note which functions the import of ``name`` has replaced in the namespaces as they were before."""
        spaces = namespaces()
        for place, old in before.items():
            space = spaces.get(place, {})
            for key, value in space.items():
                first = old.get(key, value)
                if first is not value and isinstance(first, _function) and callable(value):
                    self.replaced.setdefault(name, []).append((space, key, first, value))

    def _note_asked(self, name: str) -> None:
        self.asked.setdefault(self._running[-1], {}).setdefault(name)

    def _importing(self, first: Callable[..., Any]) -> Any:
        @_as_of_import
        def importing(
            name: str,
            globals: Any = None,  # noqa: A002  callers may name it
            locals: Any = None,  # noqa: A002  as above
            fromlist: Any = (),
            level: int = 0,
        ) -> Any:
            found = first(name, globals, locals, fromlist, level)
            if level:
                name = _bootstrap["_resolve_name"](name, _bootstrap["_calc___package__"](globals), level)
            self._note_asked(name)
            for part in getattr(found, "__all__", ()) if fromlist == ("*",) else fromlist or ():
                if f"{name}.{part}" in sys.modules:
                    self._note_asked(f"{name}.{part}")
            return found

        return importing

    def _importing_by_name(self, first: Callable[..., Any]) -> Any:
        @_as_of_import
        def _gcd_import(name: str, package: Any = None, level: int = 0) -> Any:
            found = first(name, package, level)
            self._note_asked(_bootstrap["_resolve_name"](name, package, level) if level else name)
            return found

        return _gcd_import

    def _loading(self, first: Callable[..., Any]) -> Any:
        @_as_of_import
        def _load_unlocked(spec: Any) -> Any:
            self._note_asked(spec.name)
            self._running.append(spec.name)
            self._known.add(spec.name)
            try:
                return first(spec)
            finally:
                if len(self._known) != len(sys.modules):
                    # Modules that a module has put there by itself belong to it.
                    for name in sys.modules.keys() - self._known:
                        self._note_asked(name)
                    self._known = set(sys.modules)
                self._running.pop()

        return _load_unlocked

    def _making(self, first: Callable[..., Any]) -> Any:
        @_as_of_import
        def _new_module(name: str) -> Any:
            if not self._blank:
                return first(name)
            module = self._blank.pop()
            module.__init__(name)
            return module

        return _new_module

    def _reading(self, first: Callable[..., Any]) -> Callable[..., Any]:
        def read(variables: Any, name: Any) -> Any:
            value = None
            try:
                value = first(variables, name)
            finally:
                text = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
                self.read.setdefault(self._running[-1], {}).setdefault(text, value)
            return value

        return read

    def _changing(self, first: Callable[..., Any]) -> Callable[..., Any]:
        def change(variables: Any, name: Any, *values: Any) -> None:
            before = _value_of(name)
            first(variables, name, *values)
            after = values[0] if values else None
            self.variables.setdefault(self._running[-1], []).append((name, before, after))

        return change


class Hidden:
    """Modules that were imported since ``start``, out of sight until they are imported again."""

    def __init__(self, start: Collection[str], notes: Notes, roots: Collection[str] = ()) -> None:
        """``roots``: modules that workers will import. How, is found out here, where it copies no pages."""
        # As in `boot`, codecs stay.
        found = [
            (name, module)
            for name, module in sys.modules.items()
            if name not in start and not name.startswith("encodings.")
        ]
        # Copies, side by side in memory as the modules are.
        names = {name: f"{name} "[:-1] for name, _ in found}
        self._notes = notes
        self._order = {name: number for number, name in enumerate(sys.modules)}
        self._asked = {
            names[name]: tuple([names[one] for one in _asked(name, notes) if one in names])
            for name, _ in found
        }
        self._bound = self._unbind(dict(found))
        self.modules = {names[name]: module for name, module in found}
        """By name, what is still out of sight."""
        self._settings = {
            name for name, one in found if any(kind.__name__ == _SETTINGS for kind in type(one).__mro__)
        }
        self._acts = self._settings | _RUN_AGAIN | notes.variables.keys() | notes.replaced.keys()
        self._walks = {names[root]: self._walk(names[root]) for root in roots if root in names}
        for name in self.modules:
            del sys.modules[name]
        for replaced in reversed(list(notes.replaced.values())):
            for space, key, before, after in reversed(replaced):
                if space.get(key) is after:
                    space[key] = before
        if (tempfile := self.modules.get("tempfile")) is not None:
            vars(tempfile)["tempdir"] = None  # found anew from the variables of the worker
        self._find_and_load = _bootstrap["_find_and_load"]
        _bootstrap["_find_and_load"] = self.find_and_load

    def _unbind(self, modules: Mapping[str, ModuleType]) -> dict[str, tuple[dict[str, Any], str]]:
        """Take modules out of the packages that can be seen without them: namespace and name of each."""
        bound = {}
        comes_with: dict[str, set[str]] = {}
        for name, module in modules.items():
            parent, _, last = name.rpartition(".")
            space = namespace_of(sys.modules.get(parent))
            if space.get(last) is not module:
                continue
            if parent not in comes_with:
                comes_with[parent] = self._seen_with(parent)
            if name not in comes_with[parent]:
                bound[name] = space, last
                del space[last]
        return bound

    def _seen_with(self, name: str) -> set[str]:
        """What the import of a module shows."""
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += self._asked.get(name, ())
        return seen

    @_as_of_import
    def find_and_load(self, name: str, import_: Callable[[str], Any]) -> Any:
        """As `importlib._bootstrap._find_and_load`, which is called for a module that is not there."""
        if name not in self.modules:
            return self._find_and_load(name, import_)
        parent = name.rpartition(".")[0]
        if parent and parent not in sys.modules:
            import_(parent)
        if name not in sys.modules:
            is_bound = name in self._bound
            if parent in self.modules or (
                is_bound and namespace_of(sys.modules[parent]) is not self._bound[name][0]
            ):
                return self._find_and_load(name, import_)  # of another package of the same name
            self._show(name)
        return sys.modules[name]

    def _walk(self, name: str) -> tuple[str, ...]:
        """What the import of a module shows of the modules that are out of sight, in this order."""
        found: dict[str, None] = {}
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in self.modules and name not in found:
                found[name] = None
                waiting += self._asked[name]
        return tuple(found)

    def _show(self, name: str) -> None:
        # What was shown since a walk was made was shown with all that it asks for: the rest keeps its order.
        walk = self._walks.get(name) or self._walk(name)
        modules = {one: self.modules[one] for one in walk if one in self.modules and one not in sys.modules}
        # First of all, because another thread may import them meanwhile.
        sys.modules.update(modules)
        for one, module in modules.items():
            if one in self._bound:
                space, last = self._bound[one]
                space[last] = module
        for one in walk:
            self.modules.pop(one, None)
        acting = [one for one in modules if one in self._acts]
        notes = self._notes
        for one in sorted(acting, key=self._order.__getitem__):
            reads_another = self._reads_another(one)
            if one in _RUN_AGAIN or (reads_another and one in self._settings):
                _run_again(sys.modules[one])
            # What a module has set may be made of what it has read.
            for variable, before, after in () if reads_another else notes.variables.get(one, ()):
                _change(variable, before, after)
            for space, key, before, after in notes.replaced.get(one, ()):
                if space.get(key) is before:
                    space[key] = after

    def _reads_another(self, name: str) -> bool:
        """Whether a variable that a module has read has another value now, but not by the module itself."""
        own = {variable for variable, *_ in self._notes.variables.get(name, ())}
        read = self._notes.read.get(name, {})
        return any(_value_of(variable) != value for variable, value in read.items() if variable not in own)


def _asked(name: str, notes: Notes) -> list[str]:
    """What a module has imported, the first one last, and behind it the package of the module."""
    return [*reversed(notes.asked.get(name, {})), name.rpartition(".")[0]]


def namespaces() -> Namespaces:
    """Of each module its namespace."""
    return {name: namespace_of(one) for name, one in list(sys.modules.items())}


def namespace_of(module: object) -> dict[str, Any]:
    """The names of a module, not by `vars`, which would import a lazy module."""
    return object.__getattribute__(module, "__dict__") if isinstance(module, _module) else {}


def _value_of(variable: str) -> str | None:
    variables: Mapping[Any, Any] = vars(os.environ)["_data"]
    value = variables.get(os.fsencode(variable))
    return None if value is None else os.fsdecode(value)


def _change(variable: str, before: str | None, after: str | None) -> None:
    """Set or delete a variable that still has its value from before."""
    if _value_of(variable) != before:
        return
    if after is not None:
        os.environ[variable] = after
    else:
        os.environ.pop(variable, None)


def _run_again(module: ModuleType) -> None:
    """Execute a module's file anew, in the module that others hold."""
    space = namespace_of(module)
    for name, value in list(space.items()):
        if not name.startswith("__") and sys.modules.get(f"{module.__name__}.{name}") is not value:
            del space[name]
    object.__setattr__(module, "__class__", _module)
    space["__loader__"].exec_module(module)
