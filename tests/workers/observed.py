"""Prints what a program can find out about itself, as JSON: name -> value. ``--to FILE`` writes it there."""

from __future__ import annotations

import gc
import io
import json
import locale
import os
import posix
import resource
import signal
import sys
import threading
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def stream(one: Any) -> list[str] | None:
    """All that a standard stream tells."""
    if one is None:
        return None
    buffer = one.buffer
    traits = (
        one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through, one.newlines,
        one.fileno(), one.seekable(), one.readable(), one.writable(), one.closed, one.isatty(),
        type(one).__name__, type(buffer).__name__, type(getattr(buffer, "raw", buffer)).__name__, repr(one), repr(buffer),
    )  # fmt: skip
    return [str(trait) for trait in traits]


def c_environ() -> list[str]:
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return [str(getenv(name.encode())) for name in ("OBSERVED", "LC_CTYPE", "RANK", "NOT_SET")]


def death_signal() -> int:
    import ctypes

    number = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def status(*names: str) -> dict[str, list[str]]:
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file)
    return {name: lines[name].split() for name in names}


def read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read().decode("utf-8", "surrogateescape")


def called(function: Callable[[], Any]) -> Any:
    """The value, or the exception in its place."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  it is told, whatever it is
        return repr(error)


def depth() -> int:
    frame: Any = sys._getframe()
    count = 0
    while frame is not None:
        frame = frame.f_back
        count += 1
    return count


main = sys.modules["__main__"]
first_globals = list(globals())
loader = globals()["__loader__"]
found = {
    "sys.argv": sys.argv,
    "sys.orig_argv": sys.orig_argv,
    "sys.path": sys.path,
    "sys.flags": repr(sys.flags),
    "sys.warnoptions": sys.warnoptions,
    "sys._xoptions": sys._xoptions,
    "sys.executable": sys.executable,
    "sys.prefix": [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.platlibdir],
    "sys.excepthook": repr(sys.excepthook),
    "sys.hooks": [repr(one) for one in (sys.displayhook, sys.breakpointhook, sys.unraisablehook, threading.excepthook)],
    "sys.meta_path": [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
    "sys.path_hooks": [getattr(one, "__name__", type(one).__name__) for one in sys.path_hooks],
    "sys.last": [name for name in dir(sys) if name.startswith("last_")],
    "sys.exc_info": repr(sys.exc_info()),
    "sys.recursionlimit": sys.getrecursionlimit(),
    "sys.switchinterval": sys.getswitchinterval(),
    "sys.dont_write_bytecode": sys.dont_write_bytecode,
    "sys.pycache_prefix": sys.pycache_prefix,
    "sys.trace": [repr(sys.gettrace()), repr(sys.getprofile())],
    "sys.filesystemencoding": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
    "sys.stdin": stream(sys.stdin),
    "sys.stdout": stream(sys.stdout),
    "sys.stderr": stream(sys.stderr),
    "sys.__std__": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "stdin.text": sys.stdin.read() if sys.stdin and not sys.stdin.isatty() else None,
    "stdout.tell": called(sys.stdout.tell),
    "main.names": [name for name in first_globals if name.startswith("__")],
    "main.__name__": __name__,
    "main.__file__": __file__,
    "main.__doc__": __doc__,
    "main.__package__": str(__package__),
    "main.__spec__": [getattr(__spec__, name, None) for name in ("name", "origin", "parent", "cached")],
    "main.__loader__": [type(loader).__name__, getattr(loader, "name", None), getattr(loader, "path", None)],
    "main.__cached__": str(globals().get("__cached__")),
    "main.__builtins__": repr(__builtins__),
    "main.__annotations__": repr(globals().get("__annotations__")),
    "main.is": [vars(main) is globals(), main is sys.modules["__main__"], repr(main)],
    "code": [sys._getframe().f_code.co_filename, sys._getframe().f_code.co_name, sys._getframe().f_code.co_flags],
    "frames": depth(),
    "locals": locals() is globals(),
    "os.environ": list(os.environ.items()),
    "os.environ.same": posix.environ is vars(os.environ)["_data"],
    "C environ": c_environ(),
    "/proc/self/environ": read("/proc/self/environ").split("\0"),
    "/proc/self/cmdline": read("/proc/self/cmdline").split("\0"),
    "/proc/self/comm": read("/proc/self/comm"),
    "/proc/self/exe": os.readlink("/proc/self/exe"),
    "cwd": [os.getcwd(), os.readlink("/proc/self/cwd")],
    "umask": os.umask(os.umask(0o22) or 0o22),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
    "rlimits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
    "affinity": sorted(os.sched_getaffinity(0)),
    "niceness": [os.nice(0), os.sched_getscheduler(0)],
    "group": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getsid(os.getppid())],
    "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getegid(), os.getgroups()],
    "signals": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
    "signals.kernel": status("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd"),
    "signals.mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "signals.wakeup": signal.set_wakeup_fd(-1),
    "timers": [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
    "threads": [threading.active_count(), status("Threads"), repr(type(threading.main_thread())), threading.current_thread().name],
    "threads.native": threading.main_thread().native_id == os.getpid() == threading.get_native_id(),
    "threads.main": threading.current_thread() is threading.main_thread(),
    "children": called(lambda: os.waitpid(-1, os.WNOHANG)),
    "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks],
    "gc.frozen": gc.get_freeze_count(),
    "warnings": [repr(one) for one in warnings.filters],
    "buffer sizes": [io.DEFAULT_BUFFER_SIZE, os.fstat(1).st_blksize],
    "modules": sorted(sys.modules),
    "modules of dsl": [name for name in sys.modules if name.partition(".")[0] == "dsl"],
    "names of dsl": sorted(name for name in sys.path_importer_cache if "dsl" in name.rpartition("/")[2] or name.endswith("forkserver")),
    "usage": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss == 0,
    "oom": read("/proc/self/oom_score_adj"),
    "death signal": death_signal(),
    "no_new_privs": status("NoNewPrivs", "Seccomp", "CapEff"),
    "hash": hash("text"),
}  # fmt: skip
if sys.argv[1:2] == ["--to"]:
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
else:
    print(json.dumps(found))
