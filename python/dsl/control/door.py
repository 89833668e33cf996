"""The port of a head: lets in only agents that know their key.

A connection shows that it knows the key with its first message. Until we have read that message, the
connection counts as a stranger's: it may send little, it has ten seconds, and the number of such connections
is limited.
"""

from __future__ import annotations

import errno
import resource
import socket
import time
from functools import partial

from dsl.control import frames
from dsl.control.frames import Decoder
from dsl.control.messages import TO_HEAD, Hello, Refused, message_from_bytes, message_to_bytes
from dsl.control.stream import MAGIC, OPENING_BYTES, PREAMBLE, answer
from dsl.errors import JobFormatError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from dsl.control.frames import Frame
    from dsl.control.stream import SecureStream

    class Host(Protocol):
        """The hub, as the door sees it."""

        def watch(self, fd: int, ready: Callable[[int], None]) -> None:
            """Call back when the descriptor is readable."""

        def unwatch(self, fd: int) -> None:
            """Stop watching a descriptor."""

        def is_connected(self, place: int) -> bool:
            """Whether an agent of that place is connected."""

        def admit(
            self, stream: SecureStream, address: str, place: int, decoder: Decoder, arrived: list[Frame]
        ) -> None:
            """Make a link."""

        def warn(self, text: str) -> None:
            """Tell the user."""


HANDSHAKE_S = 10.0
"""Seconds that a connection has to show that it knows the key."""

SPARE = 64
"""Connections of strangers that may be open besides one for each expected agent."""

_ACCEPTS = 64
_FEW, _MANY = 16 << 10, 256 << 10
_PAUSE_S = 1.0


class _Caller:
    """A connection that has not shown yet that it knows the key."""

    def __init__(self, sock: socket.socket, address: str, now_s: float) -> None:
        self.socket, self.address = sock, address
        self.fd = sock.fileno()
        self.host = address.rpartition(":")[0]
        self.deadline_s = now_s + HANDSHAKE_S
        self.data = b""
        self.place = -1
        self.stream: SecureStream | None = None
        self.decoder = Decoder(frames.LONGEST_OF_STRANGERS)


class Door:
    """Listens on all addresses of this machine. Called on the thread of the hub."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._socket = _listener()
        self.port = int(self._socket.getsockname()[1])
        self.strangers = 0
        """Connections that were refused."""
        self._keys: dict[int | None, bytes] = {}
        self._expected: dict[int | None, int] = {}
        self._callers: dict[int, _Caller] = {}
        self._of_host: dict[str, dict[int, _Caller]] = {}
        self._answered: dict[int, _Caller] = {}
        """Callers whose first bytes were made with the key. They may be a copy, so this is no proof yet."""
        self._paused_until_s: float | None = None

    def open(self) -> None:
        """Begin to accept connections."""
        self._host.watch(self._socket.fileno(), self._accept)

    def expect(self, place: int | None, key: bytes, count: int) -> None:
        """Take the key of a place, and go on with the callers that waited for it."""
        self._expected[place] = count
        self._keys[place] = key
        for caller in list(self._callers.values()):
            if caller.stream is None and len(caller.data) >= OPENING_BYTES:
                self._go_on(caller)

    def close(self) -> None:
        """Close the port, and the connections of all callers."""
        for caller in list(self._callers.values()):
            self._drop(caller)
        if self._paused_until_s is None:
            self._host.unwatch(self._socket.fileno())
        self._socket.close()

    def disown(self) -> None:
        """Close the port in this process alone."""
        self._socket.close()

    @property
    def due_s(self) -> float | None:
        """When `expire` has something to do; None: never."""
        due = [] if self._paused_until_s is None else [self._paused_until_s]
        if self._callers:  # the first is the oldest
            due.append(next(iter(self._callers.values())).deadline_s)
        return min(due, default=None)

    def expire(self, now_s: float) -> None:
        """Refuse the callers that have taken too long, and accept again after a pause."""
        while self._callers and (oldest := next(iter(self._callers.values()))).deadline_s <= now_s:
            self._refuse(oldest)
        if self._paused_until_s is not None and self._paused_until_s <= now_s:
            self._paused_until_s = None
            self.open()

    def _accept(self, _mask: int) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, where = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room(error)
                return
            address = _address(where)
            sock.setblocking(False)
            caller = _Caller(sock, address, time.monotonic())
            self._callers[sock.fileno()] = caller
            self._of_host.setdefault(caller.host, {})[sock.fileno()] = caller
            self._host.watch(sock.fileno(), partial(self._read, caller))
            self._read(caller, 0)  # a caller that waited to be accepted may have sent something already
            if len(self._callers) - len(self._answered) > self._most():
                self._refuse(self._least_welcome())

    def _least_welcome(self) -> _Caller:
        """The caller to refuse first: the oldest one of the address with the most connections.

        So a host that floods us hurts itself first. Callers whose first bytes were made with the key, now or
        at another time, are refused only if there are no others.
        """
        if not self._of_host:
            return next(iter(self._answered.values()))
        return next(iter(max(self._of_host.values(), key=len).values()))

    def _most(self) -> int:
        """How many callers may be connected at a time: never as many as we have descriptors."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        expected = SPARE + sum(self._expected.values())
        return expected if soft == resource.RLIM_INFINITY else min(expected, max(soft // 2, SPARE))

    def _make_room(self, error: OSError) -> None:
        """Free a descriptor for the next caller, or pause: no descriptor is left to accept it."""
        if self._callers:
            self._refuse(self._least_welcome())
            return
        self._host.warn(
            f"an agent that connects cannot be served ({error.strerror}): raise the limit of open files "
            "(ulimit -n)"
        )
        self._host.unwatch(self._socket.fileno())
        self._paused_until_s = time.monotonic() + _PAUSE_S

    def _read(self, caller: _Caller, _mask: int) -> None:
        """Read from a caller. An error ends this caller and no other."""
        try:
            self._hear(caller)
        except BlockingIOError:
            return
        except Exception:  # noqa: BLE001  whatever a stranger sends
            if self._callers.get(caller.fd) is caller:
                self._refuse(caller)
            else:
                caller.socket.close()

    def _hear(self, caller: _Caller) -> None:
        if caller.stream is not None:
            self._read_hello(caller)
            return
        if len(caller.data) >= OPENING_BYTES:
            # Its key is not known yet, and an agent sends nothing before our answer.
            if caller.socket.recv(1) == b"":
                self._drop(caller)
            else:
                self._refuse(caller)
            return
        data = caller.socket.recv(OPENING_BYTES - len(caller.data))
        caller.data += data
        if not MAGIC.startswith(caller.data[: len(MAGIC)]):
            self._refuse(caller)
        elif not data:
            # An agent that has also reached us at another address ends this connection after its first bytes.
            if len(caller.data) >= PREAMBLE.size:
                self._drop(caller)
            else:
                self._refuse(caller)
        elif len(caller.data) >= OPENING_BYTES:
            self._go_on(caller)

    def _go_on(self, caller: _Caller) -> None:
        """Answer the first message of the handshake, if a key is known for the place."""
        _, caller.place = PREAMBLE.unpack_from(caller.data)
        key = self._keys.get(caller.place, self._keys.get(None))
        if key is None:
            return
        try:
            caller.stream = answer(caller.socket, key, caller.data)
            caller.stream.chunk = _FEW
            self._forget_host(caller)
            self._answered[caller.fd] = caller
            if len(self._answered) > self._most():
                self._refuse(next(iter(self._answered.values())))
        except Exception:  # noqa: BLE001  as in `_read`
            self._refuse(caller)

    def _read_hello(self, caller: _Caller) -> None:
        """Read the first message, which shows that the caller knows the key. Raises OSError, Damaged."""
        assert caller.stream is not None
        data = caller.stream.read()
        if data == b"":
            self._drop(caller)
            return
        arrived = list(caller.decoder.feed(data or b""))
        if not arrived:
            return
        kind, payload = arrived[0]
        try:
            hello = message_from_bytes(payload, TO_HEAD) if kind == frames.MESSAGE else None
        except JobFormatError:
            hello = None
        if not isinstance(hello, Hello) or hello.place != caller.place:
            self._refuse(caller)
            return
        if self._host.is_connected(caller.place):
            refusal = message_to_bytes(Refused("another agent of this place is connected"))
            caller.stream.write(memoryview(frames.frame(frames.MESSAGE, refusal)))
            self._drop(caller)
            self._host.warn(
                f"a second agent for place {caller.place} has connected from {caller.address} and was refused"
            )
            return
        self._forget(caller)
        caller.decoder.longest, caller.stream.chunk = frames.LONGEST_OF_AGENTS, _MANY
        self._host.admit(caller.stream, caller.address, caller.place, caller.decoder, arrived)

    def _forget(self, caller: _Caller) -> None:
        fd = caller.fd
        del self._callers[fd]
        if self._answered.pop(fd, None) is None:
            self._forget_host(caller)
        self._host.unwatch(caller.fd)

    def _forget_host(self, caller: _Caller) -> None:
        of_host = self._of_host[caller.host]
        del of_host[caller.fd]
        if not of_host:
            del self._of_host[caller.host]

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.socket.close()

    def _refuse(self, caller: _Caller) -> None:
        """End the connection of a stranger, and warn the user the first time."""
        self._drop(caller)
        self.strangers += 1
        if self.strangers == 1:
            self._host.warn(
                f"a stranger at {caller.address} connected to port {self.port} of this job and was refused"
            )


def _listener() -> socket.socket:
    """A socket that listens on IPv6 and IPv4, or on IPv4 alone if there is no IPv6."""
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        where = ("0.0.0.0", 0)  # noqa: S104  agents come from other hosts
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            where = ("::", 0)
        try:
            sock.bind(where)
        except OSError:  # IPv6 is switched off
            sock.close()
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.bind(("0.0.0.0", 0))  # noqa: S104  as above
        sock.listen(4096)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _address(where: tuple[object, ...]) -> str:
    host, port = str(where[0]), where[1]
    host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
