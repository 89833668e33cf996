"""Tries the ways between hosts: a port that answers connections, and connections to such ports.

Each side sends enough for many packets of full size, so a network that loses large ones shows. A
caller gets some bytes without a meaning, and at most `MOST_CALLERS` callers get them.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

from dsl.model.health import Answer, Target, Way

BULK = 64 * 1024
"""Bytes that each side sends."""
TRY_S = 2.0
"""All ways of a host are tried at once, for so long."""
CALL_S = 5.0
"""A caller gets so long."""
MOST_CALLERS = 4096
MOST_ADDRESSES = 2
"""Addresses of a host that are tried."""


class Porch:
    """A port that says the token to all who connect, and takes and sends bulk. A context manager.

    A thread serves it: the process beside it waits for its head.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        """``ports``: those to try, in this order; 0: any free one."""
        self.token = os.urandom(8).hex()
        """What it says."""
        self.port = 0
        """Where it listens; 0: it could not."""
        self._socket: socket.socket | None = None
        for port in ports:
            with suppress(OSError):
                self._socket = _listen(port)
                self.port = self._socket.getsockname()[1]
                break

    def __enter__(self) -> Porch:  # noqa: PYI034  typing has no Self before 3.11
        if self._socket is not None:
            Thread(target=self._serve, args=(self._socket,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _serve(self, door: socket.socket) -> None:
        for _ in range(MOST_CALLERS):
            try:
                caller, _address = door.accept()
            except OSError:
                return
            Thread(target=self._answer, args=(caller,), daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        end_s = time.monotonic() + CALL_S
        with caller, suppress(OSError):
            caller.settimeout(CALL_S)
            caller.sendall(self.token.encode())
            left = BULK
            while left and time.monotonic() < end_s:
                data = caller.recv(left)
                if not data:
                    return
                left -= len(data)
            caller.sendall(bytes(BULK))


def _listen(port: int) -> socket.socket:
    """A listening socket for IPv4 and, if there is IPv6, for that, too. Raises OSError."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", port), backlog=256)


class _Call:
    """A connection that is tried."""

    def __init__(self, target: Target, address: str) -> None:
        self.target, self.address = target, address
        self.answer: Answer = "silent"
        self.why = ""
        self.is_done = False
        self._sent = self._got = 0
        self._said = b""
        self.socket: socket.socket | None = None
        try:
            found = socket.getaddrinfo(address, target.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, place = found[0]
            self.socket = socket.socket(family, kind, protocol)
            self.socket.setblocking(False)
            code = self.socket.connect_ex(place)
        except socket.gaierror:
            self._end("unreachable", "the name has no address")
            return
        except (OSError, UnicodeError) as error:
            self._end_by(getattr(error, "errno", None) or errno.EINVAL)
            return
        if code not in (0, errno.EINPROGRESS):
            self._end_by(code)

    @property
    def wants(self) -> int:
        """The events of `poll` that it waits for."""
        return select.POLLIN | (select.POLLOUT if self._sent < BULK else 0)

    def go_on(self) -> None:
        """Do what can be done without waiting."""
        assert self.socket is not None
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end_by(code)
            return
        try:
            if self._sent < BULK:
                self._sent += self.socket.send(bytes(BULK - self._sent))
                self.answer = "small"
            data = self.socket.recv(BULK)
        except BlockingIOError:
            return
        except OSError as error:
            self._end_by(error.errno or errno.EIO)
            return
        self._said = (self._said + data)[: len(self.target.token)]
        self._got += len(data)
        is_known = self._said == self.target.token.encode()
        if not data or (len(self._said) == len(self.target.token) and not is_known):
            self._end("" if is_known and self._got >= BULK else "stranger")
        elif is_known and self._got >= BULK + len(self._said):
            self._end("")

    def _end_by(self, code: int) -> None:
        if code in (errno.EAGAIN, errno.EALREADY, errno.ENOTCONN):
            return
        if code == errno.ETIMEDOUT:
            self._end("silent")
        elif code == errno.ECONNREFUSED:
            self._end("refuses")
        elif code == errno.ECONNRESET and self._said:
            self._end("small")
        else:
            self._end("unreachable", os.strerror(code).lower())

    def _end(self, answer: Answer, why: str = "") -> None:
        self.answer, self.why, self.is_done = answer, why, True


def try_ways(targets: Sequence[Target], within_s: float = TRY_S) -> tuple[Way, ...]:
    """Try the ways to some hosts, all at once; the best answer of a host's addresses counts."""
    calls = [_Call(one, address) for one in targets for address in one.addresses[:MOST_ADDRESSES]]
    end_s = time.monotonic() + within_s
    while (waiting := {c.socket.fileno(): c for c in calls if c.socket and not c.is_done}) and (
        left_s := end_s - time.monotonic()
    ) > 0:
        poller = select.poll()
        for fd, call in waiting.items():
            poller.register(fd, call.wants)
        for fd, _ in poller.poll(left_s * 1000 + 1):
            waiting[fd].go_on()
    for call in calls:
        if call.socket is not None:
            call.socket.close()
    ways = []
    for target in targets:
        mine = [call for call in calls if call.target is target]
        best = min(mine, key=lambda call: RANK.index(call.answer), default=None)
        if best is not None:
            ways.append(Way(target.place, best.address, best.answer, best.why))
    return tuple(ways)


RANK: tuple[Answer, ...] = ("", "listens", "small", "refuses", "stranger", "silent", "unreachable")
"""Answers, the best first."""


def knock(addresses: Sequence[str], port: int, within_s: float = TRY_S) -> Answer:
    """What answers at a port of a host. We send nothing."""
    answers: list[Answer] = []
    for address in addresses[:MOST_ADDRESSES]:
        try:
            with socket.create_connection((address, port), within_s):
                answers.append("listens")
        except ConnectionRefusedError:
            answers.append("refuses")
        except TimeoutError:
            answers.append("silent")
        except OSError:
            answers.append("unreachable")
    return min(answers, key=RANK.index, default="unreachable")
