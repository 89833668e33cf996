"""Whether an interpreter that starts now would read what this one has read.

A file is known by its `FileMarks`, a folder by the names there that matter: those that an import or the
loader of libraries could find, or all if a module has listed it.
"""

from __future__ import annotations

import os
import sys

from dsl._core import FileMarks
from dsl.forkserver import searched
from dsl.forkserver.reads import names_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dsl.forkserver.reads import Reads

    Names = frozenset[str] | None

# Times of files come from a clock that may be so late.
_CLOCK_NS = 50_000_000
_OF_A_PACKAGE = ("METADATA", "PKG-INFO", "RECORD", "entry_points.txt", "direct_url.json")
_OF_THE_SYSTEM = ("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/locale.alias")
_LAST_PARTS = (".pth", ".dist-info", ".egg-info", ".egg-link")


class Snapshot:
    """What this process has read, and where it has looked.

    ``texts``: files that name imports; ``begin_ns``: CLOCK_REALTIME before the first file was read;
    ``reads``: what modules have read themselves.
    """

    def __init__(self, texts: Collection[str], begin_ns: int, reads: Reads) -> None:
        folders, archives = _divided(searched.folders())
        files = {*_files(folders), *archives, *reads.files()}
        self._files = FileMarks(sorted(files.difference(texts)))
        self.doubtful = self._files.since(begin_ns - _CLOCK_NS)
        """Files that may have changed after they were read, but before they were marked."""
        asked = reads.asked.union(searched.missing()).difference(files, texts)
        self._kinds = FileMarks(sorted(asked), kinds_only=True)
        self._folders = FileMarks([*folders, *reads.listed])
        self._names: list[tuple[Callable[[str], Names], dict[str, Names]]] = [
            (_names, {path: _names(path) for path in folders}),
            (names_in, dict(reads.listed)),
        ]
        # `gc.freeze` keeps such a circle for ever: to free it each worker would write to all of its pages.
        self._kept = self, reads
        self.take_texts(texts, begin_ns)

    def changed(self) -> str:
        """The first path that is not what it was; empty if all are."""
        changed = self._files.changed() or self._kinds.changed()
        if changed:
            return changed[0]
        touched = self._folders.changed()
        for names_of, known in self._names:
            for path in touched:
                if path in known and names_of(path) != known[path]:
                    return path
        self._folders.renew(touched)
        return ""

    def has_new_texts(self) -> bool:
        """Whether a text that names imports is not what it was."""
        return self._has_doubts or bool(self._texts.changed())

    def take_texts(self, texts: Iterable[str], begin_ns: int) -> None:
        """Note the texts as they are. They were read again, the first one after ``begin_ns``."""
        self._texts = FileMarks([*texts])
        self._has_doubts = bool(self._texts.since(begin_ns - _CLOCK_NS))


def _divided(paths: Iterable[str]) -> tuple[list[str], set[str]]:
    """The paths that lead to folders or to nothing, and the archives that the other ones lead into."""
    found: dict[str, None] = {}
    archives = set()
    for path in paths:
        if os.path.isdir(path):
            found[path] = None
        elif (archive := _archive_of(path)) != path or os.path.isfile(path):
            archives.add(archive)
        else:
            found[path] = None
    return list(found), archives


def _archive_of(path: str) -> str:
    """The file that has this path inside, such as a zip archive; the path itself if there is none."""
    above = path
    while above and not os.path.exists(above):
        above = above.rpartition("/")[0]
    return above if above != path and os.path.isfile(above) else path


def _files(folders: Iterable[str]) -> Iterator[str]:
    main = sys.modules["__main__"]
    for module in list(sys.modules.values()):
        if module is main:
            continue  # each worker reads the program itself
        # Not by `getattr`, which would import a lazy module.
        space = object.__getattribute__(module, "__dict__") if isinstance(module, type(sys)) else {}
        path = space.get("__file__")
        if isinstance(path, str):
            yield _archive_of(path)
    yield from searched.mapped_files()
    yield from _OF_THE_SYSTEM
    yield from searched.settings()
    for folder in folders:
        for name in names_in(folder) or ():
            if name.endswith(".pth"):
                yield os.path.join(folder, name)
            elif name.endswith((".dist-info", ".egg-info")):
                yield from [os.path.join(folder, name, one) for one in _OF_A_PACKAGE]


def _names(folder: str) -> Names:
    """Names that an import or the loader could find, or that name packages; None: it is not there."""
    found = names_in(folder)
    if found is None:
        return None
    return frozenset([name for name in found if _counts(folder, name)])


def _counts(folder: str, name: str) -> bool:
    stem, _, suffix = name.partition(".")
    if stem.isidentifier() and suffix in ("py", "pyc"):
        return True
    if not suffix:
        return stem.isidentifier() and os.path.exists(os.path.join(folder, name, "__init__.py"))
    return name.endswith(_LAST_PARTS) or ".so" in name
