"""Delegates of the rendezvous, driven by a test as their agents do.

Importing torch takes seconds, so a nursery does it once, and forks a delegate for each that is wanted.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.kit.waiting import until

from dsl.model.codec import Lines, to_line
from dsl.model.job import MeetingPoint
from dsl.rendezvous.delegate_messages import ANSWERS, Answer, Meet, NodesMet, Open, Order

_A = TypeVar("_A", bound=Answer)

QUICK = (("last_call_timeout", "3"), ("join_timeout", "30"), ("close_timeout", "3"))
"""Settings of rounds that wait for more nodes no longer than a busy machine may need to start those."""
NURSERY = """
import os, signal, socket, sys
from dsl.rendezvous import delegate
from dsl.rendezvous import claim, rounds, torch_side
delegate._warm_up()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
door = socket.socket(fileno=int(sys.argv[1]))
while True:
    code, fds, _, _ = socket.recv_fds(door, 1 << 16, 1)
    if not code:
        sys.exit()
    pid = os.fork()
    if not pid:
        door.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        exec(code.decode())
        os._exit(delegate.main(["", str(fds[0])]))
    os.close(fds[0])
    door.sendall(b"%d\\n" % pid)
"""


class GoneError(AssertionError):
    """The delegate has closed its end."""


class Nursery:
    """A process that has imported torch, and forks delegates."""

    def __init__(self) -> None:
        self._door, theirs = socket.socketpair()
        fd = theirs.fileno()
        self._process = subprocess.Popen([sys.executable, "-c", NURSERY, str(fd)], pass_fds=[fd])
        theirs.close()

    def fork(self, connection: socket.socket, code: str) -> int:
        """Start a delegate that has first run this code; its pid."""
        socket.send_fds(self._door, [code.encode() or b"pass"], [connection.fileno()])
        return int(self._door.recv(64))

    def close(self) -> None:
        self._door.close()
        self._process.wait(10)


class Driven:
    """One delegate, and what it has said."""

    def __init__(self, host: str, nursery: Nursery | None, code: str = "") -> None:
        self._socket, theirs = socket.socketpair()
        self.host = host
        self._lines = Lines(*ANSWERS)
        self.heard: list[Answer] = []
        """All that it has said."""
        self._next = 0
        self._process: subprocess.Popen[bytes] | None = None
        if nursery is None:
            fd = theirs.fileno()
            command = [sys.executable, "-m", "dsl.rendezvous.delegate", str(fd)]
            self._process = subprocess.Popen(command, pass_fds=[fd])
            self.pid = self._process.pid
        else:
            self.pid = nursery.fork(theirs, code)
        self._pidfd = os.pidfd_open(self.pid)
        theirs.close()

    def tell(self, order: Order) -> None:
        self._socket.sendall(to_line(order))

    def meet(self, size: int = 1, role: str = "default") -> None:
        self.tell(Meet(size, role))

    def wait(self, kind: type[_A], timeout_s: float = 20.0) -> _A:
        """The next answer of a kind; those of others are passed over."""
        end_s = time.monotonic() + timeout_s
        while True:
            while self._next < len(self.heard):
                self._next += 1
                answer = self.heard[self._next - 1]
                if isinstance(answer, kind):
                    return answer
            if not self._listen(end_s):
                raise AssertionError(f"{self.host}: no {kind.__name__} in {timeout_s} s, but {self.heard}")

    def _listen(self, end_s: float) -> bool:
        """Take in what comes until then, and whether something came."""
        self._socket.settimeout(max(end_s - time.monotonic(), 0.001))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return False
        if not data:
            raise GoneError(f"{self.host}: it has gone, with {self.heard}")
        self.heard += self._lines.feed(data)
        return True

    def hang_up(self) -> None:
        """Close our end: its agent has gone."""
        self._socket.close()

    def signal(self, signum: int) -> None:
        signal.pidfd_send_signal(self._pidfd, signum)

    def has_ended(self, timeout_s: float) -> bool:
        """Whether it ends by itself in that time; what it still says is heard."""
        end_s = time.monotonic() + timeout_s
        with contextlib.suppress(GoneError, OSError):
            while self._listen(end_s):
                pass
        has_ended = bool(select.select([self._pidfd], [], [], max(end_s - time.monotonic(), 0))[0])
        if has_ended and self._process is not None:
            self._process.wait()
        return has_ended

    def remove(self) -> bool:
        """End it; whether it went when its agent did."""
        self.hang_up()
        is_good = self.has_ended(5.0)
        if not is_good:
            self.signal(signal.SIGKILL)
            self.has_ended(5.0)
        os.close(self._pidfd)
        return is_good


def opening(
    host: str,
    endpoint: str,
    nodes: tuple[int, int] = (2, 2),
    *,
    backend: str = "c10d",
    settings: tuple[tuple[str, str], ...] = QUICK,
    run_id: str = "job",
    local_addr: str | None = None,
) -> Open:
    """The first order of an agent. Nodes are ordered by the last letter of their host's name."""
    address = f"127.0.0.{ord(host[-1])}" if local_addr is None else local_addr
    point = MeetingPoint("dynamic", "", None, backend, endpoint, settings, nodes[0], address)
    return Open(point, run_id, nodes[1], host)


@contextlib.contextmanager
def driven(nursery: Nursery | None) -> Iterator[Callable[..., Driven]]:
    """Start delegates, and see to it that they end when their agents are gone."""
    started: list[Driven] = []

    def start(host: str, code: str = "") -> Driven:
        started.append(Driven(host, nursery, code))
        return started[-1]

    try:
        yield start
    finally:
        stuck = [one.host for one in started if not one.remove()]
    assert stuck == [], "delegates that outlived their agents"


def met(*delegates: Driven, timeout_s: float = 20.0) -> list[NodesMet]:
    """What all of them say of the round."""
    return [one.wait(NodesMet, timeout_s) for one in delegates]


def listens(endpoint: str) -> bool:
    """Whether somebody does there."""
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), timeout=20).close()
        return True
    return False


@contextlib.contextmanager
def running_until_left(words: list[str], **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A quiet Python."""
    env, null = {**os.environ, **environ}, subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *words], env=env, stdout=null, stderr=null)
    try:
        yield process
    finally:
        process.terminate()  # a torchrun ends its workers
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


@contextlib.contextmanager
def a_store(endpoint: str) -> Iterator[None]:
    """One that belongs to no node."""
    code = (
        "import sys, time; from torch.distributed import TCPStore; host, port = sys.argv[1].split(':'); "
        "store = TCPStore(host, int(port), is_master=True, wait_for_workers=False); time.sleep(600)"
    )
    with running_until_left(["-c", code, endpoint]):
        until(lambda: listens(endpoint), 60)
        yield


def torchrun(
    endpoint: str, address: str, *words: str, nodes: str = "2", conf: str = "", **environ: str
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A node under torchrun."""
    line = ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-id=job"]
    line += [f"--rdzv-endpoint={endpoint}", f"--local-addr={address}", f"--rdzv-conf={conf}"]
    return running_until_left([*line, *words], **environ)
