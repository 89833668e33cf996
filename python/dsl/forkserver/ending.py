"""The standard streams of a forked worker, and how it ends: its own objects end as in any Python.

Those of the server are left alone.
"""

from __future__ import annotations

import _io
import _weakref
import gc
import os
import posix
import sys

from dsl.forkserver.poison import fields_of_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Collection, Mapping
    from types import ModuleType
    from typing import Any

    from dsl._core import ForkOrder
else:
    import _signal

# Modules that report objects as leaks if they still exist at the end. In a worker they do: `gc.freeze` keeps
# the memory of the server shared, so its objects are not collected.
_TELL_LEAKS = ("triton._C.libtriton",)
# Destructors of torch's libraries take most of the time at the end of a worker, and only do what the kernel
# does anyway. Destructors of some other libraries may write files.
_SLOW_TO_END = ("torch",)
_WRITE_AT_END = ("adios2", "h5py", "netCDF4", "openpmd_api", "tables", "tensorflow")
# If one of these variables is set, a tool is loaded that may write its results when the process ends.
_OF_TOOLS = (
    *("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "OMP_TOOL_LIBRARIES"),
    *(
        "HSA_TOOLS_LIB",
        "ROCP_TOOL_LIBRARIES",
        "CPUPROFILE",
        "HEAPPROFILE",
        "LLVM_PROFILE_FILE",
        "GCOV_PREFIX",
    ),
)
# How often we look whether a thread still runs, and seconds between two looks.
_LOOKS, _LOOK_S = 50, 0.001
# The interpreter clears these itself, whatever `sys.modules` holds; the program's main module is not ours.
_NOT_OURS = ("sys", "builtins", "__main__")


def _may_skip_libraries(modules: Collection[str]) -> bool:
    """Whether a worker can skip what the libraries of preloaded modules do at the end of a process."""
    return (
        any(name in modules for name in _SLOW_TO_END)
        and not any(name in modules for name in _WRITE_AT_END)
        and not any(os.fsencode(name) in posix.environ for name in _OF_TOOLS)
    )


class Preloaded:
    """The modules of the server. A worker does not clear them: each reference count written copies a page.

    Made before other code registers exit functions.
    """

    exit_code: int | None = None
    """With what the worker ends; None: not known, or a signal ends it."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}
        """By name. A worker sees in `sys.modules` only those that it has imported."""
        self._exit: Callable[[int], None] | None = None
        # `gc.freeze` keeps such a circle for ever, so no module loses its last reference.
        self._kept: list[object] = [self]
        self._atexit: Any = sys.modules.get("atexit") or __import__("atexit")
        # The function that is registered first is called last.
        self._atexit.register(self._leave)

    def keep(self, *objects: object) -> None:
        """Keep objects for ever."""
        self._kept += objects

    def note(self) -> None:
        """Note what has been imported."""
        self.modules = {name: one for name, one in sys.modules.items() if name not in _NOT_OURS}
        self.keep(sys.path_importer_cache)  # with all names of the folders that were searched
        if any(name in self.modules for name in _TELL_LEAKS):
            self._atexit.unregister(_Those(_is_cleanup_of_nanobind))
        if (weakref := sys.modules.get("weakref")) is not None:
            for finalizer in list(weakref.finalize._registry):  # noqa: SLF001  there is no other list of them
                function = (finalizer.peek() or (None, None))[1]
                if (getattr(function, "__module__", None) or "").partition(".")[0] in _SLOW_TO_END:
                    finalizer.atexit = False

    def forget_unseen(self, unseen: Collection[str]) -> None:
        """Let a worker call no exit function of a module that it has not imported: ``unseen`` at its end."""
        those = _Those(lambda function: str(getattr(function, "__module__", "")) in unseen)
        # Called behind the program's own functions, and before those that the imports have registered.
        self._atexit.register(lambda: self._atexit.unregister(those))

    def enter(self, order: ForkOrder) -> None:
        """Prepare the end of this worker."""
        if _may_skip_libraries(self.modules):
            order.forget_exit_functions()
            self._exit = order.exit

    def _leave(self) -> None:
        """Let the interpreter clear the worker's own modules only. Threads and exit functions have ended."""
        # From here on Ctrl-C changes nothing any more, and must not show a traceback of ours.
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        _let_threads_rest()
        modules = sys.modules
        may_skip = self._may_skip_interpreter()
        mutes = any(name in modules or name in self.modules for name in _TELL_LEAKS)
        # Not over our own, whose names lie anywhere: each would copy a page.
        for name, module in list(modules.items()):
            if self.modules.get(name) is module:
                del modules[name]
        # The interpreter clears modules from the last to the first.
        first = type(sys)("_dsl_first")
        vars(first)["objects"] = _Survivors()
        self._kept.append(first)
        own = {name: modules.pop(name) for name in list(modules) if name not in _NOT_OURS[:2]}
        modules.update({"_dsl_first": first, **own})
        # The interpreter drops this object when all modules are gone, before libraries look for leaks.
        vars(sys)["_dsl_last"] = _Last(self._exit if may_skip else None, self.exit_code or 0, mutes=mutes)

    def _may_skip_interpreter(self) -> bool:
        """Whether the process may end once all modules and objects of the worker are gone.

        The interpreter would then write to each string that it has interned. It would also call exit
        functions of extensions, and report an error if the last lines cannot be written.
        """
        if self.exit_code is None or sys.flags.inspect or b"PYTHONINSPECT" in posix.environ:
            return False
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            is_new = self.modules.get(name) is not module and package not in sys.stdlib_module_names
            if is_new and type(getattr(module, "__loader__", None)).__name__ == "ExtensionFileLoader":
                return False
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
        except Exception:  # noqa: BLE001  a stream may be of any kind; the interpreter tells of it
            return False
        return True


class _Those:
    """Equals each function that fits. `atexit.unregister` forgets all functions that equal its argument."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, fits: Callable[[object], bool]) -> None:
        self._fits = fits

    def __eq__(self, other: object) -> bool:
        return self._fits(other)


def _is_cleanup_of_nanobind(function: object) -> bool:
    """Whether a function only empties caches of typing, so that nanobind finds fewer leaks."""
    code = getattr(function, "__code__", None)
    return code is not None and (code.co_filename, code.co_name) == ("<internal>", "cleanup")


def _let_threads_rest() -> None:
    """Let threads of libraries take the interpreter's lock once more, if they wait for it.

    gloo's threads do, to drop the tensors of the last collective. When the interpreter has begun to end, that
    aborts the process. An executed worker hardly ends so early: it imports what its exit functions need.
    """
    own = str(os.getpid())
    for _ in range(_LOOKS):
        try:
            others = [task for task in os.listdir("/proc/self/task") if task != own]
        except OSError:  # the program has another root directory
            return
        if not others:
            return
        _signal.sigtimedwait((), _LOOK_S)  # without the lock
        if all(fields_of_thread(task)[:1] != [b"R"] for task in others):
            return


class _Survivors:
    """Objects of the worker that modules of the server hold. They end when this object does."""

    def __init__(self) -> None:
        files = [getattr(sys, f"__{name}__", None) for name in ("stdin", "stdout", "stderr")]
        buffers = [getattr(file, "buffer", None) for file in files]
        raws = [getattr(buffer, "raw", None) for buffer in buffers]
        spared = {*map(id, (self, *files, *buffers, *raws))}
        # The parts of a file from the outer to the inner, behind all that may still write to it.
        parts = [vars(_io)[name] for name in ("_TextIOBase", "_BufferedIOBase", "_RawIOBase")]
        places: dict[type, int] = {}
        found: list[tuple[int, Any]] = []
        # The server's objects are frozen, and not among them.
        for held in gc.get_objects():
            kind = type(held)
            if kind not in places:
                bases = type.mro(kind)
                ends = any("__del__" in vars(base) for base in bases)
                place = next((place for place, part in enumerate(parts, 1) if part in bases), 0)
                places[kind] = place if ends else -1
            if places[kind] >= 0 and id(held) not in spared:
                try:
                    found.append((places[kind], _weakref.ref(held)))
                except TypeError:
                    continue  # nothing refers to it weakly
        self._references = [reference for _, reference in sorted(found, key=lambda pair: pair[0])]

    def __del__(self) -> None:
        flush_streams()  # one of the objects may be a wrapper that closes what lies below stdout
        for reference in self._references:
            held = reference()
            if held is not None:
                _End(held)


class _End:
    """Ends an object at once. The interpreter reports an error of it, as of any other `__del__`."""

    __slots__ = ("_object",)

    def __init__(self, held: object) -> None:
        self._object = held

    def __del__(self) -> None:
        kind: Any = type(self._object)
        kind.__del__(self._object)


class _Last:
    """Ends the process when it is destroyed, or mutes stderr."""

    def __init__(self, leave: Callable[[int], None] | None, code: int, *, mutes: bool) -> None:
        self._leave, self._code, self._mutes = leave, code, mutes

    def __del__(self) -> None:
        if self._leave is not None:
            flush_streams()
            self._leave(self._code)
        if self._mutes:
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 2)


_STREAMS = ("stdin", "stdout", "stderr")


def flush_streams() -> None:
    """Write what the streams hold: after a fork, both processes would write it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                continue


def line_buffering() -> dict[str, bool]:
    """By name, whether each stream writes line by line. Missing and unusable streams are left out."""
    first = {name: getattr(sys, f"__{name}__", None) for name in _STREAMS}
    return {name: one.line_buffering for name, one in first.items() if one is not None and _is_whole(one)}


def reopen_streams(by_line: Mapping[str, bool] | None = None) -> None:
    """Begin the streams anew on the descriptors 0 to 2, which lead elsewhere now.

    The objects stay the same, because modules that were imported before hold them. Encoding and error handler
    stay the same, too, as environment and locale do. The stream of a closed descriptor becomes None.
    ``by_line``: by name, whether a stream writes line by line, if imported code has chosen that.
    """
    for fd, name in enumerate(_STREAMS):
        first = getattr(sys, f"__{name}__", None)
        if first is not None and not _is_whole(first):
            continue
        now = _reopened(first, fd, by_line=(by_line or {}).get(name))
        # A module may have replaced the first stream by one of its own.
        if getattr(sys, name, None) is first:
            setattr(sys, name, now)
        setattr(sys, f"__{name}__", now)


def _is_whole(stream: Any) -> bool:
    """Whether a stream is usable: it is not closed, and still has its buffer."""
    try:
        return not stream.closed
    except ValueError:
        return False


def _reopened(stream: Any, fd: int, *, by_line: bool | None) -> Any:
    if stream is None:
        return None
    try:
        block = os.fstat(fd).st_blksize
    except OSError:  # it is closed
        return None
    is_written = fd > 0
    is_buffered = hasattr(stream.buffer, "raw")
    encoding, errors, writes_at_once = stream.encoding, stream.errors, stream.write_through
    # A new one, because the object remembers whether it can seek.
    raw: Any = _io.FileIO(fd, "wb" if is_written else "rb", closefd=False)
    raw.name = f"<{_STREAMS[fd]}>"
    if by_line is None:
        by_line = not writes_at_once and (raw.isatty() or fd == 2)
    if is_buffered:
        if sys.version_info >= (3, 14):  # as `open` chooses it
            size = max(min(block, 8192 * 1024), _io.DEFAULT_BUFFER_SIZE)
        else:
            size = block if block > 1 else _io.DEFAULT_BUFFER_SIZE
        stream.buffer.__init__(raw, size)
    stream.__init__(
        stream.buffer if is_buffered else raw,
        encoding,
        errors,
        newline="\n",
        line_buffering=by_line,
        write_through=writes_at_once,
    )
    stream.mode = "w" if is_written else "r"
    return stream
