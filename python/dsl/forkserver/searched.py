"""Where a start of this interpreter, an import and the loader of libraries look, also if nothing is there."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

# Folders below one of the loader's that are for newer processors.
_NEWER = ("", *[f"/glibc-hwcaps/x86-64-v{level}" for level in (2, 3, 4) if os.uname().machine == "x86_64"])
_LOADED, _DYNAMIC = 1, 2
_STRINGS, _RPATH, _RUNPATH = 5, 15, 29


def folders() -> Iterator[str]:
    """Folders and archives in which modules and libraries are searched."""
    yield from [path or "." for path in sys.path]
    for path, finder in list(sys.path_importer_cache.items()):
        # An interpreter asks whether the script is an archive, and keeps the answer here.
        if finder is not None or not os.path.isfile(path):
            yield path
    yield from _site_folders()
    for folder in _loader_folders():
        yield from [f"{folder}{newer}" for newer in _NEWER]


def settings() -> Iterator[str]:
    """The interpreter, and files beside it that say where its modules are."""
    name = sys.orig_argv[0]
    if "/" not in name:
        yield from [os.path.join(one, name) for one in os.environ.get("PATH", os.defpath).split(":")]
    if sys.executable:
        yield sys.executable
        folder = os.path.dirname(sys.executable)
        yield from [f"{one}/pyvenv.cfg" for one in (folder, os.path.dirname(folder), sys.prefix)]


def missing() -> Iterator[str]:
    """Folders that would be searched, too, if they were there."""
    for folder in _site_folders():
        for name in _listed(folder):
            if name.endswith(".pth"):
                yield from [os.path.join(folder, line) for line in folders_of_pth(os.path.join(folder, name))]
    for name, module in list(sys.modules.items()):
        path = _space(module).get("__path__")
        if path is not None and not isinstance(path, list):  # of a namespace package
            parent, _, last = name.rpartition(".")
            above = _space(sys.modules.get(parent)).get("__path__", ()) if parent else sys.path
            yield from [os.path.join(folder, last) for folder in above]


def mapped_files() -> Iterator[str]:
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
    for path in dict.fromkeys(mapped_files()):
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


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _space(module: ModuleType | None) -> dict[str, Any]:
    """The namespace of a module, not by `vars`, which would import a lazy module."""
    return object.__getattribute__(module, "__dict__") if isinstance(module, type(sys)) else {}
