"""How a forked worker ends: its own objects end as in any Python, those of the server are left alone."""

from __future__ import annotations

import _io
import _weakref
import gc
import os
import posix
import sys

from dsl.forkserver import streams
from dsl.forkserver.poison import fields_of_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Collection
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
        atexit = sys.modules.get("atexit") or __import__("atexit")
        # The function that is registered first is called last.
        atexit.register(self._leave)

    def note(self) -> None:
        """Note what has been imported."""
        self.modules = {name: one for name, one in sys.modules.items() if name not in _NOT_OURS}
        if (weakref := sys.modules.get("weakref")) is not None:
            for finalizer in list(weakref.finalize._registry):  # noqa: SLF001  there is no other list of them
                function = (finalizer.peek() or (None, None))[1]
                if _package(getattr(function, "__module__", None) or "") in _SLOW_TO_END:
                    finalizer.atexit = False

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
        for name, module in self.modules.items():
            if modules.get(name) is module:
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
            is_new = self.modules.get(name) is not module and _package(name) not in sys.stdlib_module_names
            if is_new and type(getattr(module, "__loader__", None)).__name__ == "ExtensionFileLoader":
                return False
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
        except Exception:  # noqa: BLE001  a stream may be of any kind; the interpreter tells of it
            return False
        return True


def _let_threads_rest() -> None:
    """Let threads of libraries take the interpreter's lock once more, if they wait for it.

    gloo's threads do, to drop the tensors of the last collective. When the interpreter has begun to end, that
    aborts the process. An executed worker hardly ends so early: it imports what its exit functions need.
    """
    own = str(os.getpid())
    for _ in range(_LOOKS):
        others = [task for task in os.listdir("/proc/self/task") if task != own]
        if not others:
            return
        _signal.sigtimedwait((), _LOOK_S)  # without the lock
        if all(fields_of_thread(task)[:1] != [b"R"] for task in others):
            return


def _package(name: str) -> str:
    return name.partition(".")[0]


class _Survivors:
    """Objects of the worker that modules of the server hold. They end when this object does."""

    def __init__(self) -> None:
        files = [getattr(sys, f"__{name}__", None) for name in ("stdin", "stdout", "stderr")]
        buffers = [getattr(one, "buffer", None) for one in files]
        raws = [getattr(one, "raw", None) for one in buffers]
        spared = {id(one) for one in (self, *files, *buffers, *raws)}
        # The parts of a file from the outer to the inner, behind all that may still write to it.
        parts = [vars(_io)[name] for name in ("_TextIOBase", "_BufferedIOBase", "_RawIOBase")]
        places: dict[type, int] = {}
        found: list[tuple[int, Any]] = []
        # The server's objects are frozen, and not among them.
        for one in gc.get_objects():
            kind = type(one)
            if kind not in places:
                bases = type.mro(kind)
                ends = any("__del__" in vars(base) for base in bases)
                place = next((place for place, part in enumerate(parts, 1) if part in bases), 0)
                places[kind] = place if ends else -1
            if places[kind] >= 0 and id(one) not in spared:
                try:
                    found.append((places[kind], _weakref.ref(one)))
                except TypeError:
                    continue  # nothing refers to it weakly
        self._references = [reference for _place, reference in sorted(found, key=_first)]

    def __del__(self) -> None:
        streams.flush()  # one of the objects may be a wrapper that closes what lies below stdout
        for reference in self._references:
            one = reference()
            if one is not None:
                _End(one)


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


class _End:
    """Ends an object at once. The interpreter reports an error of it, as of any other `__del__`."""

    __slots__ = ("_object",)

    def __init__(self, one: object) -> None:
        self._object = one

    def __del__(self) -> None:
        kind: Any = type(self._object)
        kind.__del__(self._object)


class _Last:
    """Ends the process when it is destroyed, or mutes stderr."""

    def __init__(self, leave: Callable[[int], None] | None, code: int, *, mutes: bool) -> None:
        self._leave, self._code, self._mutes = leave, code, mutes

    def __del__(self) -> None:
        if self._leave is not None:
            streams.flush()
            self._leave(self._code)
        if self._mutes:
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 2)
