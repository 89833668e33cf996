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


def kept_by_kernel() -> dict[str, Any]:
    """What the kernel keeps of a process and passes on to its children, beside its status."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    # Get: dumpable, keepcaps, time stamp counter, secure bits, timer slack, machine checks, huge pages, I/O flusher,
    # memory deny write execute, merging of pages.
    numbers: dict[Any, Any] = {
        number: library.prctl(number, 0, 0, 0, 0) for number in (3, 7, 27, 30, 34, 42, 58, 66, 68)
    }
    word = ctypes.c_int(-1)
    for number in (25, 37):
        library.prctl(number, ctypes.byref(word), 0, 0, 0)
        numbers[number] = word.value
    numbers[52] = [library.prctl(52, which, 0, 0, 0) for which in range(3)]
    mode, nodes = ctypes.c_int(-1), ctypes.create_string_buffer(1 << 13)
    attributes = ctypes.create_string_buffer(56)
    if os.uname().machine == "x86_64":
        numbers["io"] = library.syscall(252, 1, 0)
        library.syscall(239, ctypes.byref(mode), nodes, 1 << 16, None, 0)
        library.syscall(315, 0, attributes, 56, 0)
        numbers["memory"] = [mode.value, nodes.raw.rstrip(b"\0").hex()]
        numbers["schedule"] = attributes.raw.hex()
        # Whether the session has a key ring: some commands get a new one each.
        numbers["keys"] = library.syscall(250, 0, ctypes.c_int(-3), 0) > 0
    return numbers


def terminal() -> list[Any]:
    """The terminal of the session, and whether this group is in the foreground."""
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        return [error.errno]
    try:
        return ["terminal", os.tcgetpgrp(fd) == os.getpgrp(), os.getsid(0)]
    finally:
        os.close(fd)


def fields_of_stat() -> list[str]:
    """Terminal, flags for children, priority, niceness, policy."""
    fields = read("/proc/self/stat").rpartition(")")[2].split()
    return [fields[index] for index in (4, 15, 16, 35, 37, 38)]


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
    "kernel": called(kept_by_kernel),
    "terminal": terminal(),
    "stat": fields_of_stat(),
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))},
    # Less the group that each attempt has for itself.
    "cgroup": [line.partition("/dsl-")[0] for line in read("/proc/self/cgroup").splitlines()],
    "root": [os.readlink("/proc/self/root"), sorted(os.listdir("/"))],
    "mounts": len(read("/proc/self/mountinfo").splitlines()),
    "personality": called(lambda: read("/proc/self/personality")),
    "core dumps": read("/proc/self/coredump_filter"),
    "logged in": [called(lambda: read("/proc/self/loginuid")), called(lambda: read("/proc/self/sessionid"))],
    "security": called(lambda: read("/proc/self/attr/current")),
    "allowed": status("Cpus_allowed", "Mems_allowed", "CapInh", "CapPrm", "CapBnd", "CapAmb", "Groups", "THP_enabled"),
    "limits": read("/proc/self/limits"),
    "users": [called(lambda: read("/proc/self/uid_map")), called(lambda: read("/proc/self/setgroups"))],
    "out of memory": read("/proc/self/oom_score_adj"),
    "hash": hash("text"),
}  # fmt: skip
if sys.argv[1:2] == ["--to"]:
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
else:
    print(json.dumps(found))
