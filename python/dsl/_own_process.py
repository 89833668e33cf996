"""Speeds up a process that runs dsl alone. The commands call `claim` first; the library never does.

A launch imports some sixty of our modules. For each one Python looks several times into every folder of its
path, which takes as long as loading the modules. The finder here goes straight to the files of our modules,
and leaves anything unusual to Python's own finders. It can also keep the code of modules in memory, so that
they can be imported when the package is gone from the disk.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the built-in module behind `signal`, which has no stub
import gc
import os
import sys
from marshal import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType, ModuleType
    from typing import Any

PACKAGE = "dsl"
HEADER = 16  # bytes of a compiled file before its code

START = "import sys; sys.path[:1] = sys.path[:1] if sys.path[0] else []; import dsl_launcher; "
"""First statements of ``python -c``: no module comes from the working directory, and ours come first."""

_claimed: list[object] = []
_sharers: list[str] = []


def enter() -> None:
    """Begin a command: claim the process, unless somebody else needs it, too, and to its normal end."""
    if is_followed() or _is_traced() or _is_called():
        _sharers.append("a tool")
    else:
        claim()


def is_shared() -> bool:
    """Whether a debugger, a profiler or another program needs the process of this command, too."""
    return bool(_sharers)


def is_followed() -> bool:
    """Whether a tool has replaced a function that starts processes, so that it can follow them."""
    subprocess: Any = sys.modules.get("subprocess")
    functions = [vars(os)[name] for name in ("fork", "posix_spawn")]
    if subprocess is not None:
        first = subprocess.Popen.__init__
        if type(first) is not type(claim) or first.__globals__ is not vars(subprocess):
            return True
        functions += [sys.modules["_posixsubprocess"].fork_exec, getattr(subprocess, "_fork_exec", len)]
    return any(type(one) is not type(len) for one in functions)


def _is_traced() -> bool:
    monitoring = getattr(sys, "monitoring", None)
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


def _is_called() -> bool:
    """Whether other code than the start of this program, such as a profiler, has called the command."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  no other call tells who calls, and this one costs nothing
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        frame = frame.f_back
    program = {} if frame is None else frame.f_globals
    while frame is not None and (frame.f_globals is program or frame.f_code.co_name in _RUNPY):
        frame = frame.f_back
    return frame is not None


_RUNPY = ("_run_code", "_run_module_as_main")
"""Functions of `runpy` by which ``python -m`` calls a program."""


def claim() -> None:
    """Turn off garbage collection, as there is little garbage before the workers start; find modules fast.

    Until there is a guard, SIGINT ends the process without a traceback, as it ends other programs. Closed
    streams lead to /dev/null from now on; Python's objects for them stay None.
    """
    _end_by_interrupt()
    if None in (sys.stdin, sys.stdout, sys.stderr):
        fill_standard_streams()
    if gc.isenabled():
        gc.disable()
        _claimed.append(gc)
    finder = _Finder(sys.modules[PACKAGE])
    if finder.may_help():
        _finders().insert(0, finder)
        _claimed.append(finder)


def _end_by_interrupt() -> None:
    """Let SIGINT end the process, unless it has a handler that is not Python's, or ignores Ctrl-C.

    A script lets what it starts with ``&`` ignore SIGINT. Without a terminal there is no Ctrl-C to ignore.
    """
    handler = _signal.getsignal(_signal.SIGINT)
    is_default = handler in (_signal.default_int_handler, _signal.SIG_DFL)
    if is_default or (handler is _signal.SIG_IGN and not _has_terminal()):
        # The kernel never applies a default action that would end the first process of a container.
        is_first = os.getpid() == 1
        _signal.signal(_signal.SIGINT, _exit_by_interrupt if is_first else _signal.SIG_DFL)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _exit_by_interrupt(_signum: int, _frame: object) -> None:
    raise SystemExit(130)


def fill_standard_streams() -> None:
    """Open /dev/null for closed standard streams: else the next opened file would take the place of one."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # the lowest number that is free is this one
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY if fd else os.O_RDONLY), True)


def restore() -> None:
    """Undo `claim`, except for SIGINT, before code that is not ours runs in this process."""
    for claimed in _claimed:
        if claimed is gc:
            gc.enable()
        elif claimed in _finders():
            _finders().remove(claimed)
    _claimed.clear()


def keep(names: Sequence[str]) -> None:
    """Hold the code of these modules in memory, so that importing them later reads no file.

    This costs some microseconds for each module, and memory for its compiled file. If the process is not
    claimed, or a module has no compiled file that matches its source, the module is imported now. A module
    that is gone or replaced already is left out.
    """
    finder = next((one for one in _claimed if isinstance(one, _Finder)), None)
    for name in names:
        if name not in sys.modules and (finder is None or not finder.keep(name)):
            try:
                __import__(name)
            except Exception:  # noqa: BLE001, S112  it may be code of another version
                continue


def _finders() -> list[Any]:
    """The finders that Python asks for a module, in order."""
    return sys.meta_path


class _Finder:
    """Finds modules of the package by their compiled files, as long as these match the sources."""

    def __init__(self, package: ModuleType) -> None:
        self._package = package
        self._suffix = f".{sys.implementation.cache_tag}.pyc"
        self._kept: dict[str, tuple[str, str, str | None, bytes]] = {}
        self._magic = getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", b"")

    def may_help(self) -> bool:
        """Whether the package lies in plain folders, compiled in the usual way."""
        loader = getattr(self._package.__spec__, "loader", None)
        is_usual = sys.flags.optimize == 0 and sys.pycache_prefix is None and len(self._magic) == 4
        return is_usual and type(loader).__name__ == "SourceFileLoader"

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        """Return the spec of a module; None lets Python ask the next finder."""
        if not name.startswith(PACKAGE + "."):
            return None
        found = self._kept.pop(name, None) or self._find(name)
        if found is None:
            return None
        path, cached, folder, data = found
        # The class `ModuleSpec`, without the cost of importing it by name.
        make: Any = type(self._package.__spec__)
        code: CodeType = loads(memoryview(data)[HEADER:])  # noqa: S302  the interpreter runs the same file
        spec = make(name, _Loader(code), origin=path)
        spec.cached, spec.has_location = cached, True
        spec.submodule_search_locations = None if folder is None else [folder]
        return spec

    def keep(self, name: str) -> bool:
        """Hold the code of a module until it is imported; False if it is not found."""
        found = self._find(name)
        if found is not None:
            self._kept[name] = found
        return found is not None

    def _find(self, name: str) -> tuple[str, str, str | None, bytes] | None:
        """Paths of a module's source and compiled file, its folder if it is a package, and the bytes."""
        stem = f"{self._package.__path__[0]}/{name[len(PACKAGE) + 1 :].replace('.', '/')}"
        for path, folder in ((f"{stem}.py", None), (f"{stem}/__init__.py", stem)):
            head, _, tail = path.rpartition("/")
            cached = f"{head}/__pycache__/{tail[:-3]}{self._suffix}"
            data = self._read(path, cached)
            if data is not None:
                return path, cached, folder, data
        return None

    def _read(self, path: str, cached: str) -> bytes | None:
        """Bytes of the compiled file; None if it does not match the source (PEP 3147, PEP 552)."""
        try:
            source = os.stat(path)
            file = os.open(cached, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            size = os.fstat(file).st_size
            data = os.read(file, size)
        finally:
            os.close(file)
        stamp = (int(source.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little")
        length = (source.st_size & 0xFFFFFFFF).to_bytes(4, "little")
        fits = len(data) == size and data[:HEADER] == self._magic + bytes(4) + stamp + length
        return data if fits else None


class _Loader:
    """Runs the code that the finder has read."""

    def __init__(self, code: CodeType) -> None:
        self._code = code

    def create_module(self, _spec: object) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        exec(self._code, module.__dict__)  # noqa: S102  what Python's own loader does
