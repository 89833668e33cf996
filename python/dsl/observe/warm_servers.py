"""The warm fork servers of this user on this machine: which there are, and how they are ended."""

from __future__ import annotations

import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from dsl._core import warm_answer, warm_call
from dsl._record import Record
from dsl.forkserver.boot import MARK, NEW, READY
from dsl.machine.kernel_files import memory_of
from dsl.machine.sockets import MOST_AT_ONCE, ask_sockets, left_alone, peer_of, remove_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

ANSWER_S = 1.0
"""How long a server may take to answer."""
END_S = 5.0
"""How long a server without jobs may take to end."""
YOUNG_S = 10.0
"""A socket that is younger may belong to a server that begins."""


class WarmServer(Record):
    """A warm server."""

    folder: str
    """Folder of its socket."""
    name: str
    """Name of its socket."""
    pid: int
    """Its process."""
    state: Literal["idle", "busy", "importing", "no answer"]
    """Whether it has jobs, or why it has not said anything about itself."""
    memory: int
    """Bytes that it has for itself."""
    jobs: int = 0
    """Jobs that it has forked workers for."""
    running: int = 0
    """Those that run."""
    idle_s: float = 0.0
    """Seconds since it had its last job."""
    stay_s: float = 0.0
    """Seconds without a job after which it ends."""
    holders: int = 0
    """Programs that hold it: it does not end before them."""
    interpreter: str = ""
    """Its Python."""
    program: str = ""
    """The program whose workers it forks."""
    modules: tuple[str, ...] = ()
    """What it has imported."""


def warm_servers(tell: Callable[[str], None] | None = None) -> list[WarmServer]:
    """All warm servers, by their pids. Removes sockets that servers have left.

    ``tell`` hears of sockets whose process is not one of this user here: nothing is asked there.
    """
    found = ask_sockets(_meet, NEW, READY)
    for one in found:
        if tell is not None and isinstance(one, str):
            tell(one)
    return sorted([one for one in found if isinstance(one, WarmServer)], key=lambda one: one.pid)


def _meet(place: tuple[str, str]) -> WarmServer | str | None:
    folder, name = place
    if name.endswith(NEW):
        # Not by a call: a server that imports would take it for that of its job.
        pid = _importing(name)
        if pid:
            return WarmServer(folder, name, pid, "importing", memory_of(pid))
        try:
            if time.time() - os.lstat(os.path.join(folder, name)).st_mtime < YOUNG_S:
                return None
        except OSError:
            return None
    try:
        fd = warm_call(folder, name, "tell")
    except (ConnectionRefusedError, ConnectionResetError):  # it has ended, or is just ending
        remove_socket(folder, name)
        return None
    except BlockingIOError:  # it is stopped, and too many calls wait
        pid = _importing(name)
        return WarmServer(folder, name, pid, "no answer", memory_of(pid)) if pid else None
    except PermissionError as error:
        return None if error.errno else left_alone(folder, name, error)
    except OSError:
        return None
    try:
        pid = peer_of(fd)
    except OSError:  # it has ended meanwhile
        pid = 0
    answer = warm_answer(fd, ANSWER_S)
    if answer is not None:
        return parse(folder, name, pid, answer)
    if not os.path.exists(os.path.join(folder, name)) or not _is_server(pid, name):
        return None
    return WarmServer(folder, name, pid, "no answer", memory_of(pid))


def parse(folder: str, name: str, pid: int, answer: bytes) -> WarmServer:
    """A server by its socket, the pid that the kernel tells, and its answer."""
    line, _, about = answer.partition(b"\n")
    jobs, running, idle_ms, stay_ms, holders = map(int, line.split()[1:])
    interpreter, program, modules = [*map(os.fsdecode, about.split(b"\0")), "", "", ""][:3]
    return WarmServer(
        folder,
        name,
        pid,
        "busy" if running else "idle",
        memory_of(pid),
        jobs,
        running,
        idle_ms / 1000,
        stay_ms / 1000,
        holders,
        interpreter,
        program,
        tuple([one for one in modules.split(",") if one]),
    )


def _importing(name: str) -> int:
    """Pid of the server that listens at this socket while it imports; 0: there is none."""
    found = [int(one) for one in os.listdir("/proc") if one.isdecimal() and _is_server(int(one), name)]
    return max(found, default=0)


def _is_server(pid: int, name: str) -> bool:
    """Whether a process of this user was started as the server with this socket."""
    stem = name.removesuffix(READY).removesuffix(NEW)
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().removesuffix(b"\0").split(b"\0")
    except OSError:
        return False
    return len(words) > 1 and words[-1].startswith(MARK.encode()) and words[-2] == os.fsencode(stem + NEW)


def stop(servers: Sequence[WarmServer]) -> list[WarmServer]:
    """End servers. Returns those that are still there: they have jobs, or cannot be ended."""
    pidfds = [(one, _pidfd(one)) for one in servers]
    try:
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            list(pool.map(_stop, pidfds))
        until = time.monotonic() + END_S
        return [one for one, fd in pidfds if fd is not None and not _has_ended(one, fd, until)]
    finally:
        for _, fd in pidfds:
            if fd is not None:
                os.close(fd)


def _pidfd(server: WarmServer) -> int | None:
    """A pidfd of a server; None: it has ended."""
    try:
        fd = os.pidfd_open(server.pid)
    except OSError:
        return None
    if _is_server(server.pid, server.name):
        return fd
    os.close(fd)
    return None


def _stop(item: tuple[WarmServer, int | None]) -> None:
    server, pidfd = item
    if pidfd is None:
        return
    if server.state in ("idle", "busy"):
        try:
            if warm_answer(warm_call(server.folder, server.name, "stop"), ANSWER_S) is not None:
                return
        except OSError:
            pass
    try:
        # No other signal ends it: it holds all others back.
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return
    remove_socket(server.folder, server.name)


def _has_ended(server: WarmServer, pidfd: int, until: float) -> bool:
    """Wait until a server has ended, unless it ends after its jobs."""
    wait = select.poll()
    wait.register(pidfd, select.POLLIN)
    left_s = 0.0 if server.state == "busy" else max(until - time.monotonic(), 0.0)
    return bool(wait.poll(left_s * 1000))
