"""What the kernel says of a process and its threads: states, CPU time, system calls and their arguments."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

from dsl._record import Record
from dsl.machine.kernel import list_names, read_fact, read_fields
from dsl.words import with_port

MOST_TASKS = 512
"""Threads of a process at which we look."""

LONGEST_PATH = 256
"""Bytes of a path that we read from a process."""

# Numbers of the system calls in which programs wait.
_X86_64 = {
    0: "read", 1: "write", 2: "open", 4: "stat", 6: "lstat", 7: "poll", 16: "ioctl", 17: "pread64",
    18: "pwrite64", 20: "writev", 23: "select", 26: "msync", 34: "pause", 35: "nanosleep", 42: "connect",
    43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl",
    73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate", 82: "rename", 83: "mkdir", 87: "unlink",
    128: "rt_sigtimedwait", 130: "rt_sigsuspend", 162: "sync", 202: "futex", 230: "clock_nanosleep",
    232: "epoll_wait", 247: "waitid", 257: "openat", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat",
    264: "renameat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 285: "fallocate", 288: "accept4",
    316: "renameat2", 332: "statx",
}  # fmt: skip
_AARCH64 = {
    22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 34: "mkdirat", 35: "unlinkat", 38: "renameat",
    47: "fallocate", 56: "openat", 63: "read", 64: "write", 66: "writev", 67: "pread64", 68: "pwrite64",
    72: "pselect6", 73: "ppoll", 79: "newfstatat", 81: "sync", 82: "fsync", 83: "fdatasync", 95: "waitid",
    98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 133: "rt_sigsuspend", 137: "rt_sigtimedwait",
    202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg",
    227: "msync", 242: "accept4", 260: "wait4", 276: "renameat2", 291: "statx",
}  # fmt: skip
CALLS = {"x86_64": _X86_64, "aarch64": _AARCH64}

# Their first argument is a descriptor, their first or second a path, or the first the pid of a child.
OF_DESCRIPTOR = {
    *("read", "write", "pread64", "pwrite64", "writev", "connect", "accept", "accept4", "sendto", "recvfrom"),
    *("sendmsg", "recvmsg", "ioctl", "fcntl", "flock", "fsync", "fdatasync", "fallocate"),
}
OF_PATH = {
    **dict.fromkeys(("open", "stat", "lstat", "mkdir", "unlink", "rename", "truncate"), 0),
    **dict.fromkeys(("openat", "mkdirat", "unlinkat", "newfstatat", "renameat", "renameat2", "statx"), 1),
}
SLEEPS = ("nanosleep", "clock_nanosleep")
STANDARD = ("stdin", "stdout", "stderr")


class Task(Record):
    """One thread, or a process as a whole, at one moment."""

    tid: int
    """Its thread id."""
    name: str
    """Its name in the kernel."""
    state: str
    """The kernel's letter."""
    parent: int
    """Pid of the parent of its process."""
    major_faults: int
    """Pages so far that had to be read while it waited."""
    cpu_ticks: int
    """CPU time so far, in clock ticks."""


def read_task(path: str) -> Task | None:
    """Read ``/proc/PID`` (the whole process) or ``/proc/PID/task/TID``; None if there is no such thread."""
    head, bracket, tail = read_fact(f"{path}/stat").rpartition(")")
    fields = tail.split()
    if not bracket or len(fields) < 13:
        return None
    tid, _, name = head.partition(" (")
    return Task(int(tid), name, fields[0], int(fields[1]), int(fields[9]), int(fields[11]) + int(fields[12]))


def read_tasks(pid: int) -> dict[int, Task]:
    """The threads of a process by their ids, the main thread first."""
    folder = f"/proc/{pid}/task"
    tids = sorted([name for name in list_names(folder) if name.isdigit()], key=int)[:MOST_TASKS]
    found = [read_task(f"{folder}/{tid}") for tid in tids]
    return {task.tid: task for task in found if task is not None}


def read_processes() -> dict[int, Task]:
    """All processes by their pids."""
    found = [read_task(f"/proc/{name}") for name in list_names("/proc") if name.isdigit()]
    return {task.tid: task for task in found if task is not None}


def descendants(pid: int, processes: Iterable[Task]) -> list[Task]:
    """The processes below this one, nearest first."""
    children: dict[int, list[Task]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(pid, ()))
    for process in found:
        found += children.get(process.tid, ())
    return found


def pulses(pids: Sequence[int]) -> list[str]:
    """For each of these processes a text that changes with what it and its descendants read or write.

    It also changes when a descendant comes or goes, and with each page that had to be read from disk. Empty:
    there is no such process. Counters that may not be read make a text that is never the same.
    """
    processes = read_processes()
    found = []
    for pid in pids:
        tree = [processes[pid], *descendants(pid, processes.values())] if pid in processes else []
        living = [process for process in tree if process.state not in "ZX"]
        count = sum(_bytes_passed(process.tid) for process in living)
        faults = sum(process.major_faults for process in living)
        found.append(f"{count} {faults} {' '.join([str(one.tid) for one in living])}" if living else "")
    return found


def _bytes_passed(pid: int) -> int:
    """Bytes that a process has read and written by system calls, other than those for sockets alone."""
    fields = read_fields(f"/proc/{pid}/io")
    try:
        return int(fields["rchar"]) + int(fields["wchar"])
    except (KeyError, ValueError):
        return time.monotonic_ns()


def switches(pid: int, tid: int) -> int:
    """How often a thread has begun to wait so far."""
    text = read_fields(f"/proc/{pid}/task/{tid}/status").get("voluntary_ctxt_switches", "")
    return int(text) if text.isdecimal() else 0


def is_python(pid: int) -> bool:
    """Whether a process runs a Python interpreter."""
    try:
        if os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy")):
            return True
        with open(f"/proc/{pid}/maps", "rb") as file:
            return b"/libpython" in file.read(1 << 20)
    except OSError:
        return False


def channel(pid: int, tid: int) -> str:
    """Function of the kernel in which a thread waits; empty: none, or unknown."""
    name = read_fact(f"/proc/{pid}/task/{tid}/wchan")
    return "" if name == "0" else name


def variables(pid: int, names: Iterable[str]) -> dict[str, str]:
    """Variables of the environment with which a process began; without those that it has not."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = os.fsdecode(file.read(1 << 20)).split("\0")
    except OSError:
        return {}
    pairs = dict([entry.partition("=")[::2] for entry in entries])
    return {name: pairs[name] for name in names if name in pairs}


def naps(pid: int) -> bool:
    """Whether the main thread of a process sleeps for a time that it has chosen."""
    number = read_fact(f"/proc/{pid}/syscall").partition(" ")[0]
    return number.isdecimal() and CALLS.get(os.uname().machine, {}).get(int(number)) in SLEEPS


class CallReader:
    """Words for the system calls in which the threads of one process wait."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._names: Mapping[int, str] = CALLS.get(os.uname().machine, {})
        self._peers: dict[int, str] | None = None

    def read(self, tid: int) -> str:
        """``read(stdin)``; empty if the thread runs, or the kernel does not tell."""
        words = read_fact(f"/proc/{self._pid}/task/{tid}/syscall").split()
        if len(words) < 7 or words[0] == "-1":
            return ""
        number = int(words[0])
        name = self._names.get(number, f"system call {number}")
        about = self._about(name, [int(word, 16) for word in words[1:7]])
        return f"{name}({about})" if about else name

    def _about(self, name: str, arguments: list[int]) -> str:
        """What the call waits for, by its arguments."""
        if name in OF_DESCRIPTOR:
            return self._descriptor(arguments[0] & 0xFFFFFFFF)
        if name in OF_PATH:
            return os.fsdecode(self._memory(arguments[OF_PATH[name]], LONGEST_PATH).partition(b"\0")[0])
        if name in ("poll", "ppoll") and arguments[1] == 1:
            content = self._memory(arguments[0], 4)
            return self._descriptor(struct.unpack("i", content)[0]) if len(content) == 4 else ""
        if name == "wait4" and 0 < arguments[0] < 1 << 31:
            return f"pid {arguments[0]}"
        return f"pid {arguments[1]}" if name == "waitid" and arguments[0] == os.P_PID else ""

    def _descriptor(self, fd: int) -> str:
        """The file or the peer behind a descriptor."""
        try:
            target = os.readlink(f"/proc/{self._pid}/fd/{fd}")
        except OSError:
            return f"descriptor {fd}"
        if fd < len(STANDARD):
            return STANDARD[fd]
        if target.startswith("socket:"):
            return self._peer(fd) or "socket"
        return target.partition(":")[0] if target.startswith("pipe:") else target

    def _peer(self, fd: int) -> str:
        if self._peers is None:
            try:
                import psutil

                sockets = psutil.Process(self._pid).net_connections("inet")
            except (ImportError, psutil.Error, OSError):
                sockets = []
            # A socket without a peer has an empty tuple, whatever its type says.
            ends: list[tuple[int, tuple[object, ...]]] = [(one.fd, tuple(one.raddr)) for one in sockets]
            self._peers = {of: with_port(str(end[0]), int(str(end[1]))) for of, end in ends if end}
        return self._peers.get(fd, "")

    def _memory(self, address: int, size: int) -> bytes:
        """Bytes of the process; fewer or none where the kernel refuses."""
        try:
            with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, address)
        except (OSError, OverflowError):
            return b""
