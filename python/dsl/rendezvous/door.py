"""A port at which nodes call: whoever says no greeting in time, or too much, is sent away."""

from __future__ import annotations

import errno
import socket
import struct
import time

from dsl.rendezvous.greeting import LONGEST_GREETING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl.rendezvous.wire import Loop

GREETING_S = 10.0
"""So long may it take until a caller has said who it is, and has gone when it was sent away."""

SPARE = 64
"""So many more callers may be there at once than nodes are expected."""

_ACCEPTS = 64
_BACKLOG = 1024
_PAUSE_S = 1.0
_NO_LINGER = struct.pack("ii", 1, 0)
_EVERYWHERE = ("", "::", "0.0.0.0")  # noqa: S104  the other nodes come from anywhere


class Caller:
    """A connection that has not shown who it is."""

    def __init__(self, sock: socket.socket, where: tuple[str, ...], door: Door) -> None:
        self.socket = sock
        self.address = where[0].removeprefix("::ffff:")
        self.own_port = int(sock.getsockname()[1])
        self.door = door
        self.deadline_s = time.monotonic() + GREETING_S
        self.data = b""
        self.is_leaving = False

    def dismiss(self, line: bytes) -> None:
        """Say a last word, and wait until the caller closes: so nothing of the port stays behind here."""
        self.is_leaving = True
        try:
            self.socket.send(line)
        except OSError:
            self.door.drop(self)

    def take(self) -> socket.socket:
        """Give the connection to somebody else."""
        self.door.forget(self)
        return self.socket


class Door:
    """Some sockets that listen, and who calls there.

    ``greet`` gets a caller with its first line and what follows that. ``reject`` gets one that says something
    else (what it has said, as far as it was read) before it is dropped.
    """

    def __init__(
        self,
        loop: Loop,
        sockets: Sequence[socket.socket],
        most: int,
        greet: Callable[[Caller, bytes, bytes], None],
        reject: Callable[[Caller, bytes], None],
    ) -> None:
        self._loop = loop
        self._sockets = sockets
        self._most = most + SPARE
        self._greet, self._reject = greet, reject
        self._callers: dict[int, Caller] = {}
        self._open()

    def close(self) -> None:
        """Close the port, and send everybody away who is there."""
        for caller in list(self._callers.values()):
            self.drop(caller)
        self._loop.cancel((self, "pause"))
        for one in self._sockets:
            self._loop.unwatch(one.fileno())
            one.close()

    def drop(self, caller: Caller) -> None:
        """End a connection so that the kernel keeps nothing of it."""
        self.forget(caller)
        caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        caller.socket.close()

    def forget(self, caller: Caller) -> None:
        """Do not look after a caller any more."""
        if self._callers.pop(caller.socket.fileno(), None) is not None:
            self._loop.unwatch(caller.socket.fileno())
        self._set_deadline()

    def _open(self) -> None:
        for one in self._sockets:
            self._loop.watch(one.fileno(), lambda _mask, one=one: self._accept(one))  # type: ignore[misc]

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, where = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room()
                return
            sock.setblocking(False)
            caller = Caller(sock, where, self)
            self._callers[sock.fileno()] = caller
            self._loop.watch(sock.fileno(), lambda _mask, caller=caller: self._read(caller))  # type: ignore[misc]
            if len(self._callers) > self._most:
                self.drop(self._least_welcome())
        self._set_deadline()

    def _least_welcome(self) -> Caller:
        """The oldest of the address that has most connections: whoever floods hurts himself first."""
        counts: dict[str, int] = {}
        for caller in self._callers.values():
            counts[caller.address] = counts.get(caller.address, 0) + 1
        address = max(counts, key=lambda one: counts[one])
        return next(one for one in self._callers.values() if one.address == address)

    def _make_room(self) -> None:
        """There are no descriptors for whoever waits."""
        if self._callers:
            self.drop(self._least_welcome())
            return
        for one in self._sockets:
            self._loop.unwatch(one.fileno())
        self._loop.at((self, "pause"), time.monotonic() + _PAUSE_S, self._open)

    def _read(self, caller: Caller) -> None:
        try:
            data = caller.socket.recv(LONGEST_GREETING if caller.is_leaving else LONGEST_GREETING + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if caller.is_leaving:
            if not data:
                self.drop(caller)
            return
        caller.data += data
        line, end, rest = caller.data.partition(b"\n")
        if end and len(line) <= LONGEST_GREETING:
            self._greet(caller, line, rest)
        elif not data or len(caller.data) > LONGEST_GREETING or caller.data[:1] != b"{":
            if caller.data:
                self._reject(caller, caller.data)
            self.drop(caller)

    def _set_deadline(self) -> None:
        oldest = next(iter(self._callers.values()), None)
        if oldest is None:
            self._loop.cancel(self)
        else:
            self._loop.at(self, oldest.deadline_s, self._expire)

    def _expire(self) -> None:
        now_s = time.monotonic()
        for caller in [one for one in self._callers.values() if one.deadline_s <= now_s]:
            self.drop(caller)
        self._set_deadline()


def listen(address: str, port: int) -> list[socket.socket]:
    """Sockets that listen where others call a node that they know by this address; port 0: any.

    An address that all machines have is taken as it is. Any other one may mean something else here, or
    reach us by way of another machine: then all addresses of this machine are listened at, as a store does.

    Raises:
        OSError: none can.
    """
    if address in ("localhost", "localhost.localdomain"):
        places = ["127.0.0.1", "::1"]
    else:
        places = [address] if address.startswith("127.") or address == "::1" else ["::"]
    found = []
    problem = OSError(errno.EADDRNOTAVAIL, "no address")
    for place in places:
        try:
            found.append(_listener(place, port))
        except OSError as error:
            problem = error
    if not found and places == ["::"]:
        found.append(_listener(_EVERYWHERE[-1], port))
    if not found:
        raise problem
    return found


def _listener(place: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in place else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(place != "::"))
        sock.bind((place, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
