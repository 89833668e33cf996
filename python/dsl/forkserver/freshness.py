"""Whether the files that an interpreter has read are still what they were.

A file is known by inode, size, and the times of its last change of content and of state: nobody can set the
latter. A folder in which modules are searched is known by the names there that an import could find.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    Mark: TypeAlias = tuple[int, int, int, int] | None

# Times of files come from a clock that may be so late.
_CLOCK_NS = 50_000_000
_OF_A_PACKAGE = ("METADATA", "PKG-INFO", "RECORD", "entry_points.txt", "direct_url.json")
_OF_THE_SYSTEM = ("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/locale.alias")


def mark_of(path: str) -> Mark:
    """What tells a file from its later versions; None if it cannot be seen."""
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return None
    return (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


class Snapshot:
    """What this process has read. ``begin_ns``: CLOCK_REALTIME before it read the first file."""

    def __init__(self, texts: Iterable[str], begin_ns: int) -> None:
        self._files = {path: mark_of(path) for path in _files()}
        self._folders = {path: (mark_of(path), _names(path)) for path in _folders()}
        self._since_ns = begin_ns - _CLOCK_NS
        self._texts = {path: self._certain(path) for path in texts}
        # `gc.freeze` keeps such a circle for ever: to free it each worker would write to all of its pages.
        self._kept = self
        self.doubtful = [path for path, mark in self._files.items() if self._is_doubtful(mark)]

    def _is_doubtful(self, mark: Mark) -> bool:
        """Whether a file may have changed before it was marked, but after it was read."""
        return mark is not None and mark[3] >= self._since_ns

    def _certain(self, path: str) -> Mark:
        """The mark of a text; one that no file has if it is doubtful, so that it is read again."""
        mark = mark_of(path)
        return (0, 0, 0, 0) if self._is_doubtful(mark) else mark

    def changed(self) -> str:
        """The first path that is not what it was; empty if all are."""
        for path, mark in self._files.items():
            if mark_of(path) != mark:
                return path
        for path, (mark, names) in self._folders.items():
            now = mark_of(path)
            if now == mark:
                continue
            if _names(path) != names:
                return path
            self._folders[path] = (now, names)
        return ""

    def has_new_texts(self) -> bool:
        """Whether a text that names imports is not what it was."""
        return any(mark_of(path) != mark for path, mark in self._texts.items())

    def take_texts(self, texts: Iterable[str], begin_ns: int) -> None:
        """Note the texts as they are. They were read again, the first one after ``begin_ns``."""
        self._since_ns = begin_ns - _CLOCK_NS
        self._texts = {path: self._certain(path) for path in texts}


def _files() -> Iterator[str]:
    main = sys.modules["__main__"]
    for module in list(sys.modules.values()):
        if module is main:
            continue  # each worker reads the program itself
        # Not by `getattr`, which would import a lazy module.
        space = object.__getattribute__(module, "__dict__") if isinstance(module, type(sys)) else {}
        path = space.get("__file__")
        if isinstance(path, str):
            yield path
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            path = line.rstrip("\n").partition("/")[2]
            if path and not path.startswith(("dev/", "memfd:")):
                yield f"/{path}"
    yield from _OF_THE_SYSTEM
    for folder in _folders():
        for name in _listed(folder):
            if name.endswith(".pth"):
                yield os.path.join(folder, name)
            elif name.endswith((".dist-info", ".egg-info")):
                yield from [os.path.join(folder, name, one) for one in _OF_A_PACKAGE]
    yield os.path.join(sys.prefix, "pyvenv.cfg")


def _folders() -> list[str]:
    """Where modules are searched, also what does not exist (yet)."""
    return [path or "." for path in dict.fromkeys(sys.path)]


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _names(folder: str) -> frozenset[str]:
    """Names that an import could find, or that name installed packages."""
    return frozenset(
        name
        for name in _listed(folder)
        if name.endswith((".so", ".pth", ".dist-info", ".egg-info", ".egg-link"))
        or (name.isidentifier() and os.path.exists(os.path.join(folder, name, "__init__.py")))
        or (name.partition(".")[0].isidentifier() and name.partition(".")[2] in ("py", "pyc"))
    )
