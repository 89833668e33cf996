"""Files that modules read, and paths that they ask for, while they are imported.

An audit hook would see them, too, but nobody can remove it: each worker would call it for ever, also for each
`id`. So the functions of `builtins`, `io` and `os` are replaced meanwhile, as in `hidden`.
"""

from __future__ import annotations

import builtins
import io
import os
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_PATHS = 4096
"""How many are noted."""
# What lies there is the kernel's, and belongs to the state of a process or of the machine.
_OF_THE_KERNEL = ("/proc", "/sys", "/dev")
# They list each folder of the path, and use the names there that a snapshot compares anyway.
_SEARCHERS = frozenset({"importlib.metadata", "importlib_metadata", "pkg_resources", "pkgutil"})
_NOT_READ = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Reads:
    """Paths of files and folders, noted by the functions of `places`."""

    def __init__(self) -> None:
        self.opened: set[str] = set()
        """Files that were opened to read them, also without success."""
        self.asked: set[str] = set()
        """Paths that were looked up, whether or not they exist."""
        self.listed: dict[str, frozenset[str] | None] = {}
        """Folders that were listed, with the names there; None: it could not be listed."""
        self._written: set[str] = set()

    def places(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        """Holder and name of each function to replace, and what makes the replacement from the function."""
        kept: list[tuple[Any, str, Callable[..., None]]] = [
            (io, "open", self._open),
            (os, "stat", self._ask),
            (os, "listdir", self._list),
            (os, "scandir", self._list),
        ]
        functions: list[tuple[Any, str, Callable[..., None]]] = [
            *kept,
            (builtins, "open", self._open),
            (os, "open", self._open_low),
            (os, "access", self._ask),
        ]
        # Before Python 3.11 it keeps these functions in a class.
        if sys.version_info < (3, 11) and "pathlib" in sys.modules:
            accessor = vars(sys.modules["pathlib"])["_NormalAccessor"]
            functions += [(accessor, name, note) for _, name, note in kept]
        return [(holder, name, _noting(note)) for holder, name, note in functions]

    def files(self) -> set[str]:
        """Files that were read, without those that were also written."""
        return self.opened - self._written

    def _open(self, file: Any = None, mode: Any = "r", *_: Any, **__: Any) -> None:
        self._note(file, is_read=isinstance(mode, str) and not set(mode) & set("wax+"))

    def _open_low(self, path: Any = None, flags: Any = 0, *_: Any, dir_fd: Any = None, **__: Any) -> None:
        if dir_fd is None:
            self._note(path, is_read=isinstance(flags, int) and not flags & _NOT_READ)

    def _note(self, path: Any, *, is_read: bool) -> None:
        found = _absolute(path)
        if found and len(self.opened) < MOST_PATHS:
            (self.opened if is_read else self._written).add(found)

    def _ask(self, path: Any = None, *_: Any, dir_fd: Any = None, **__: Any) -> None:
        found = _absolute(path) if dir_fd is None else ""
        if found and len(self.asked) < MOST_PATHS:
            self.asked.add(found)

    def _list(self, path: Any = ".") -> None:
        if sys._getframe(2).f_globals.get("__name__") in _SEARCHERS:  # noqa: SLF001  who has called `_Noting`
            return
        found = _absolute("." if path is None else path)
        if found and found not in self.listed and len(self.listed) < MOST_PATHS:
            self.listed[found] = names_in(found)


def names_in(folder: str) -> frozenset[str] | None:
    """The names in a folder; None if it cannot be listed."""
    try:
        return frozenset(posix.listdir(folder))
    except OSError:
        return None


def _absolute(path: Any) -> str:
    """A path as text; empty for what is none, or what is the kernel's."""
    try:
        text = os.fsdecode(path)  # also of bytes and of objects with a path
        found = text if text.startswith("/") else f"{posix.getcwd()}/{text}"
    except (TypeError, OSError):
        return ""
    return "" if f"{found}/".startswith(tuple([f"{one}/" for one in _OF_THE_KERNEL])) else found


def _noting(note: Callable[..., None]) -> Callable[[Any], Any]:
    return lambda first: _Noting(first, note)


class _Noting:
    """A function that notes its arguments first. Modules take it for the function itself.

    An object, because a function in a class would become a method there, and functions of C do not.
    """

    def __init__(self, first: Any, note: Callable[..., None]) -> None:
        self._first, self._note = first, note
        self.__doc__, self.__module__ = first.__doc__, first.__module__

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:  # noqa: SIM105  without an import
            self._note(*args, **named)
        except Exception:  # noqa: BLE001, S110  the function itself complains
            pass
        return self._first(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    @property
    def __class__(self) -> Any:
        return type(self._first)

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self._first == other)

    def __hash__(self) -> int:
        return hash(self._first)
