"""Calls warm fork servers, which outlive the command, and starts them.

A command calls before it becomes a guard: what a guard starts, it ends. The agent takes the connections over.
"""

from __future__ import annotations

import os

from dsl._core import is_in_job, warm_answer, warm_digest, warm_join, warm_key, warm_listen, warm_obstacle
from dsl._record import Record
from dsl.forkserver.boot import words_of
from dsl.machine import MARK, NEW, READY, find_sockets, remove_socket, socket_folders, wait_for
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Collection, Iterator
    from socket import socket
    from typing import Literal

    from dsl.model.job import ForkServer, NodePlan, Warm

    Purpose = Literal["serve", "hold"]
else:
    import _signal

START_S = 10.0
"""A server that has not begun by then, because somebody has stopped it, is given up."""


class WarmCall(Record):
    """Connections with a warm server."""

    fds: tuple[int, ...]
    """Descriptors of the connections: one for each branch that forks workers."""
    is_ready: bool
    """The server has imported its modules."""
    is_new: bool
    """This command has started the server."""


class WarmCalls:
    """Connections with the warm servers of a plan, for the agent. The guard has copies."""

    def __init__(self, plan: NodePlan, mask: Collection[int] | None) -> None:
        """Call the servers, and start missing ones with this signal mask; None: start none."""
        count, servers = len(plan.workers), [one for one in plan.fork_servers if one.warm is not None]
        self._calls = [(server, call(server, count, start_mask=mask)) for server in servers]

    def notices(self) -> tuple[Notice, ...]:
        """What the user has to know: a server was started, and stays."""
        wanted = [(one.warm, found) for one, found in self._calls if one.warm and not one.warm.only_if_there]
        stay_s = [warm.stay_s for warm, found in wanted if found and found.is_new and warm.stay_s]
        if stay_s:
            text = (
                f"what the workers import is kept for {stay_s[0]:g} s after the job: dsl-warm stop ends that"
            )
            return (Notice("info", text, is_made=True),)
        if all(found for _, found in self._calls):
            return ()
        if any(found is None for _, found in wanted):
            text = f"start method warm: {why_none()}, so the server ends with the job"
            return (Notice("info", text, is_made=True),)
        if why := warm_obstacle():
            return (Notice("detail", f"start method auto: no warm server, {why}", is_made=True),)
        return ()

    def settle(self, plan: NodePlan) -> NodePlan:
        """The plan without fork servers that do not pay off: one worker needs none that has yet to import."""
        if len(plan.workers) > 1 or not all(one.warm and one.warm.only_if_there for one in plan.fork_servers):
            return plan
        if any(found is not None for _, found in self._calls):
            return plan
        from dsl.plan.starting import without_fork_servers

        return without_fork_servers(plan)

    def take(self, server: ForkServer, workers: int) -> WarmCall | None:
        """The connections with this server, which are the caller's now; None if there are none.

        A server of a later plan is called now.
        """
        for place, (one, found) in enumerate(self._calls):
            if one == server:
                del self._calls[place]
                return found
        return call(server, workers)

    def take_all(self) -> list[int]:
        """The descriptors of all connections that were not taken, which are the caller's now."""
        fds = [fd for _, found in self._calls if found is not None for fd in found.fds]
        self._calls.clear()
        return fds

    def close(self) -> None:
        """Close all connections that were not taken."""
        for fd in self.take_all():
            os.close(fd)


class HeldServers:
    """Warm servers that a program holds: they stay while it runs, whatever its jobs want, and end with it.

    Several threads may use this.
    """

    def __init__(self) -> None:
        from threading import Lock

        self._connections: dict[str, socket] = {}
        self._lock = Lock()

    def hold(self, servers: Collection[ForkServer], mask: Collection[int]) -> None:
        """Hold these servers, as far as they are warm. Missing ones are started with this signal mask."""
        from socket import socket

        with self._lock:
            for server in [one for one in servers if one.warm is not None]:
                digest = digest_of(server)
                held = self._connections.get(digest)
                if held is not None:
                    if not _has_hung_up(held):
                        continue
                    self._connections.pop(digest).close()
                found = call(server, start_mask=mask, purpose="hold")
                if found is not None:
                    self._connections[digest] = socket(fileno=found.fds[0])

    def close(self) -> None:
        """Let the servers end, unless other programs need them."""
        from socket import SHUT_RDWR

        with self._lock:
            for held in self._connections.values():
                held.shutdown(SHUT_RDWR)  # children that were forked meanwhile have copies of it
                held.close()
            self._connections.clear()


def why_none() -> str:
    """Why there is no warm server for this command, and none can be started."""
    return warm_obstacle() or ("this is part of a job" if is_in_job() else "no server can be kept from here")


def call(
    server: ForkServer,
    workers: int = 1,
    *,
    start_mask: Collection[int] | None = None,
    purpose: Purpose = "serve",
) -> WarmCall | None:
    """Call the warm server of this kind, which is to fork about so many workers; None if there is none.

    A missing server is started with the signal mask ``start_mask``, if there is one; but not below a job,
    which would end it.
    """
    warm = server.warm
    assert warm is not None
    if warm_obstacle():
        return None
    words, key = _key_of(server, warm)
    digest = warm_digest(key)
    for folder, name in _servers(digest):
        found = _call(folder, name, purpose, key, warm, workers)
        if found is not None:
            return found
    if start_mask is None or warm.only_if_there or is_in_job():
        return None
    for folder in socket_folders():
        name = f"{digest}-{os.urandom(4).hex()}{NEW}"
        if _start(words, _environ_of(server, warm), folder, name, start_mask):
            return _call(folder, name, purpose, key, warm, workers, is_new=True)
    return None


def answer(found: WarmCall, timeout_s: float) -> str:
    """Wait until a server that was called with ``hold`` has imported.

    Returns why it does not serve; empty if it does.
    """
    told = warm_answer(found.fds[0], timeout_s)
    if told is None:
        return "has ended while it imported"
    return "" if told == b"stays" else told.decode(errors="replace")


def digest_of(server: ForkServer) -> str:
    """How the names of the sockets of such warm servers begin, before a dash."""
    assert server.warm is not None
    return warm_digest(_key_of(server, server.warm)[1])


def _has_hung_up(held: socket) -> bool:
    """Whether the server at the other end takes no more calls."""
    return bool(wait_for(held.fileno(), left_s=0, events=0))


def _key_of(server: ForkServer, warm: Warm) -> tuple[tuple[str, ...], bytes]:
    """The words that start a server, and in what it has to agree with this command."""
    words = words_of(server, warm.withheld)
    entries = [os.fsencode(f"{name}={value}") for name, value in _environ_of(server, warm).items()]
    return words, warm_key([os.fsencode(word) for word in words], entries)


def _environ_of(server: ForkServer, warm: Warm) -> dict[str, str]:
    """The environment of a warm server."""
    absent = {*warm.withheld, *warm.left_out}
    return {name: value for name, value in server.env.items() if name not in absent}


def _servers(digest: str) -> Iterator[tuple[str, str]]:
    """Folder and name of each socket with this digest, those of servers that are ready first."""
    mine = [one for one in find_sockets(NEW, READY) if one[1].startswith(f"{digest}-")]
    yield from sorted(mine, key=lambda one: one[1].endswith(NEW))


def _call(
    folder: str, name: str, purpose: Purpose, key: bytes, warm: Warm, workers: int, *, is_new: bool = False
) -> WarmCall | None:
    # Its imports may have ended since its name was read.
    for one in (name, name.replace(NEW, READY)) if name.endswith(NEW) else (name,):
        try:
            fds = warm_join(folder, one, purpose, key, warm.stay_s, warm.memory, workers)
        except (ConnectionRefusedError, ConnectionResetError):  # it has ended, or is just ending
            remove_socket(folder, one)
        except OSError:
            continue
        else:
            return WarmCall(tuple(fds), is_ready=one.endswith(READY), is_new=is_new)
    return None


def _start(
    words: tuple[str, ...], environ: dict[str, str], folder: str, name: str, mask: Collection[int]
) -> bool:
    """Start a server that is no descendant of this process and listens there. False: it cannot be started."""
    try:
        fd = warm_listen(folder, name)
    except OSError:
        return False
    pid = 0
    try:
        os.set_inheritable(fd, True)
        others = [one for one in _inherited() if one > 2 and one != fd]
        pid = os.posix_spawnp(
            words[0],
            [*words, folder, name, f"{MARK}{fd}//"],
            environ,
            file_actions=[(os.POSIX_SPAWN_CLOSE, one) for one in others],
            setsigmask=mask,
            # As in a worker that the engine executes.
            setsigdef=[_signal.SIGCHLD, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM],
        )
        is_started = _has_begun(pid)
    except ChildProcessError:  # SIGCHLD is ignored here: the kernel has reaped it
        is_started = bool(pid)
    except OSError:
        is_started = False
    finally:
        os.close(fd)
    remove_socket(folder, f".{name}")  # a server that listens has taken the dot away
    return is_started


def _has_begun(pid: int) -> bool:
    """Wait until the process that has started a server ends. Raises ChildProcessError."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # before Linux 5.3
        pass
    else:
        if not wait_for(pidfd, left_s=START_S):
            os.kill(pid, _signal.SIGKILL)
        os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    return status == 0


def _inherited() -> list[int]:
    """Descriptors that another program would get."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
    return found
