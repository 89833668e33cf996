"""Whether an interpreter that starts now would read what this one has read.

A file is known by its `FileMarks`, a folder by the names there that matter: those that an import or the
loader of libraries could find, or all if a module has listed it.
"""

from __future__ import annotations

import builtins
import io
import os
import posix
import sys

from dsl._core import FileMarks
from dsl.forkserver.hidden import namespace_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import Any

    Names = frozenset[str] | None

MOST_PATHS = 4096
"""How many paths that modules read or ask for are noted."""

# Times of files come from a clock that may be so late.
_CLOCK_NS = 50_000_000
_OF_A_PACKAGE = ("METADATA", "PKG-INFO", "RECORD", "entry_points.txt", "direct_url.json")
_OF_THE_SYSTEM = ("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/locale.alias")
_LAST_PARTS = (".pth", ".dist-info", ".egg-info", ".egg-link")
# Folders below one of the loader's that are for newer processors.
_NEWER = ("", *[f"/glibc-hwcaps/x86-64-v{level}" for level in (2, 3, 4) if os.uname().machine == "x86_64"])
_LOADED, _DYNAMIC = 1, 2
_STRINGS, _RPATH, _RUNPATH = 5, 15, 29
# What lies there is the kernel's, and belongs to the state of a process or of the machine.
_OF_THE_KERNEL = ("/proc", "/sys", "/dev")
# They list each folder of the path, and use the names there that a snapshot compares anyway.
_SEARCHERS = frozenset({"importlib.metadata", "importlib_metadata", "pkg_resources", "pkgutil"})
_NOT_READ = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Snapshot:
    """What this process has read, and where it has looked.

    ``texts``: files that name imports; ``begin_ns``: CLOCK_REALTIME before the first file was read;
    ``reads``: what modules have read themselves.
    """

    def __init__(self, texts: Collection[str], begin_ns: int, reads: Reads) -> None:
        folders, archives = _divided(_searched_folders())
        files = {*_files(folders), *archives, *reads.files()}
        self._files = FileMarks(sorted(files.difference(texts)))
        self.doubtful = self._files.since(begin_ns - _CLOCK_NS)
        """Files that may have changed after they were read, but before they were marked."""
        asked = reads.asked.union(_missing()).difference(files, texts)
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
        path = namespace_of(module).get("__file__")
        if isinstance(path, str):
            yield _archive_of(path)
    yield from _mapped_files()
    yield from _OF_THE_SYSTEM
    yield from _settings()
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


def _searched_folders() -> Iterator[str]:
    """Folders and archives in which modules and libraries are searched."""
    yield from [path or "." for path in sys.path]
    for path, finder in list(sys.path_importer_cache.items()):
        # An interpreter asks whether the script is an archive, and keeps the answer here.
        if finder is not None or not os.path.isfile(path):
            yield path
    yield from _site_folders()
    for folder in _loader_folders():
        yield from [f"{folder}{newer}" for newer in _NEWER]


def _settings() -> Iterator[str]:
    """The interpreter, and files beside it that say where its modules are."""
    name = sys.orig_argv[0]
    if "/" not in name:
        yield from [os.path.join(one, name) for one in os.environ.get("PATH", os.defpath).split(":")]
    if sys.executable:
        yield sys.executable
        folder = os.path.dirname(sys.executable)
        yield from [f"{one}/pyvenv.cfg" for one in (folder, os.path.dirname(folder), sys.prefix)]


def _missing() -> Iterator[str]:
    """Folders that would be searched, too, if they were there."""
    for folder in _site_folders():
        for name in names_in(folder) or ():
            if name.endswith(".pth"):
                yield from [os.path.join(folder, line) for line in folders_of_pth(os.path.join(folder, name))]
    for name, module in list(sys.modules.items()):
        path = namespace_of(module).get("__path__")
        if path is not None and not isinstance(path, list):  # of a namespace package
            parent, _, last = name.rpartition(".")
            above = namespace_of(sys.modules.get(parent)).get("__path__", ()) if parent else sys.path
            yield from [os.path.join(folder, last) for folder in above]


def _mapped_files() -> Iterator[str]:
    """Files that are in the memory of this process, such as libraries."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            path = line.rstrip("\n").partition("/")[2]
            if path and not path.startswith(("dev/", "memfd:")):
                yield f"/{path}"


def _site_folders() -> list[str]:
    """Folders of installed packages that `site` adds if they are there."""
    site: Any = sys.modules.get("site")
    if site is None:
        return []
    user = site.USER_SITE if site.ENABLE_USER_SITE else None
    return [*site.getsitepackages(), *([user] if user else ())]


def folders_of_pth(path: str) -> list[str]:
    """The lines of a ``.pth`` file that are no code."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip() for line in file.read().removeprefix("\ufeff").splitlines()]
    except OSError:
        return []
    return [line for line in lines if line and not line.startswith(("#", "import ", "import\t"))]


def _loader_folders() -> list[str]:
    named = os.environ.get("LD_LIBRARY_PATH", "")
    found = dict.fromkeys([one or "." for one in named.replace(";", ":").split(":")] if named else ())
    for path in dict.fromkeys(_mapped_files()):
        found.update(dict.fromkeys(run_paths(path)))
    return list(found)


def run_paths(path: str) -> list[str]:
    """The folders in which a library wants those that it needs to be searched.

    https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if head[:5] != b"\x7fELF\2":
                return []
            order: Any = "little" if head[5] == 1 else "big"

            def number(text: bytes, place: int, size: int) -> int:
                return int.from_bytes(text[place : place + size], order)

            def read(place: int, size: int) -> bytes:
                file.seek(place)
                return file.read(size)

            size, count = number(head, 54, 2), number(head, 56, 2)
            table = read(number(head, 32, 8), size * count)
            # Type, place in the file, address, and size.
            parts = [
                (number(table, at, 4), *[number(table, at + place, 8) for place in (8, 16, 32)])
                for at in range(0, size * count, size)
            ]
            entries = {}
            for kind, place, _, length in parts:
                if kind == _DYNAMIC:
                    text = read(place, length)
                    entries = {number(text, at, 8): number(text, at + 8, 8) for at in range(0, length, 16)}
            named = entries.get(_RUNPATH, entries.get(_RPATH))
            strings = entries.get(_STRINGS, 0)
            for kind, place, address, length in parts:
                if named is not None and kind == _LOADED and address <= strings < address + length:
                    text = read(strings - address + place + named, 1 << 14).partition(b"\0")[0]
                    return _expanded(os.fsdecode(text), os.path.dirname(path))
    except (OSError, ValueError):
        pass
    return []


def _expanded(named: str, origin: str) -> list[str]:
    folders = named.replace("${ORIGIN}", origin).replace("$ORIGIN", origin).split(":")
    return [os.path.normpath(one) for one in folders if one and "$" not in one]


class Reads:
    """Files that modules read, and paths that they ask for, while they are imported; noted by `places`.

    An audit hook would see them, too, but nobody can remove it: each worker would call it for ever, also for
    each `id`. So the functions of `builtins`, `io` and `os` are replaced meanwhile, as in `hidden`.
    """

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
