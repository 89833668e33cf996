"""A port at which nodes call. It drops callers that send no greeting in time, or too many bytes."""

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
"""Time that a caller has to send its greeting, and to go once it is dismissed."""

SPARE = 64
"""How many more callers than expected nodes may be connected at once."""

_ACCEPTS = 64
_BACKLOG = 1024
_PAUSE_S = 1.0
_NO_LINGER = struct.pack("ii", 1, 0)
_EVERYWHERE = ("", "::", "0.0.0.0")  # noqa: S104  the other nodes come from anywhere


class Caller:
    """A connection without a valid greeting so far."""

    def __init__(self, sock: socket.socket, where: tuple[str, ...], door: Door) -> None:
        self.socket = sock
        self.address = where[0].removeprefix("::ffff:")
        self.own_port = int(sock.getsockname()[1])
        self.door = door
        self.deadline_s = time.monotonic() + GREETING_S
        self.data = b""
        self.is_leaving = False

    def dismiss(self, line: bytes) -> None:
        """Send a last line, and wait until the caller closes: so the port keeps no connection here."""
        self.is_leaving = True
        try:
            self.socket.send(line)
        except OSError:
            self.door.drop(self)

    def take(self) -> socket.socket:
        """Hand the connection over: the door forgets it."""
        self.door.forget(self)
        return self.socket


class Door:
    """Some listening sockets and their callers.

    ``greet`` gets a caller, its first line, and the bytes after that line. ``reject`` gets a caller that
    sends something else, with the bytes read so far, before the door drops it.
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
        """Close the port, and drop all callers."""
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
        """Stop watching a caller."""
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
        """The oldest caller from the address with most connections: a flood hurts its own sender first."""
        counts: dict[str, int] = {}
        for caller in self._callers.values():
            counts[caller.address] = counts.get(caller.address, 0) + 1
        address = max(counts, key=lambda one: counts[one])
        return next(one for one in self._callers.values() if one.address == address)

    def _make_room(self) -> None:
        """Drop a caller, or pause: no descriptors are left for new callers."""
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
    """Sockets that listen where others reach a node by this address; port 0: any port.

    An address that all machines have is used as it is. Any other address may mean something else here, or
    reach us through another machine. So for such an address we listen at all addresses of this machine, as a
    store does.

    Raises:
        OSError: no socket can listen.
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
