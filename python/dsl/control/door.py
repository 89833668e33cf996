"""The ports of a head: they let in only agents that know their key.

A connection shows that it knows the key with its first message. Until we have read that message, the
connection counts as a stranger's: it may send little, it has ten seconds, and the number of such connections
is limited.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
import time
from functools import partial
from struct import pack

from dsl.control import frames
from dsl.control.frames import Damaged, Decoder
from dsl.control.messages import TO_HEAD, Hello, Refused, message_from_bytes, message_to_bytes
from dsl.control.stream import HAS_KEY, MAGIC, OPENING_BYTES, PREAMBLE, TURNED_AWAY, WHY_REFUSED, answer
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
            self,
            stream: SecureStream,
            address: str,
            place: int,
            port: int,
            decoder: Decoder,
            arrived: list[Frame],
        ) -> None:
            """Make a link."""

        def warn(self, text: str) -> None:
            """Tell the user."""


HANDSHAKE_S = 10.0
"""Seconds that a connection has to show that it knows the key."""

SPARE = 64
"""Connections of strangers that may be open besides one for each expected agent."""

MOST_WARNINGS = 8
"""How many different refusals the user hears of."""

TORCH_STORE = b"\x00\xce\xf7\x85\x3c"
"""First bytes that a client of torch's store sends."""

_ACCEPTS = 64
_FEW, _MANY = 16 << 10, 256 << 10
_PAUSE_S = 1.0
_NO_LINGER = pack("ii", 1, 0)
_EVERYWHERE = ("::", "0.0.0.0")  # noqa: S104  agents come from other hosts


class _Listener:
    """A listening socket. ``keyed``: whether callers must have a job key of the user; None: no check."""

    def __init__(self, address: str, port: int, *, keyed: bool | None) -> None:
        self.asked = (address, port, keyed)
        self.socket = _listen(address, port)
        self.fd = self.socket.fileno()
        self.port = int(self.socket.getsockname()[1])
        self.keyed = keyed


class _Caller:
    """A connection that has not shown yet that it knows the key."""

    def __init__(self, sock: socket.socket, address: str, listener: _Listener, now_s: float) -> None:
        self.socket, self.address, self.listener = sock, address, listener
        self.fd = sock.fileno()
        self.host = address.rpartition(":")[0]
        self.deadline_s = now_s + HANDSHAKE_S
        self.data = b""
        self.place = -1
        self.stream: SecureStream | None = None
        self.decoder = Decoder(frames.LONGEST_OF_STRANGERS)


class Door:
    """The ports of a head. Called on the thread of the hub, but for `add` and `disown`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._listeners: list[_Listener] = []
        self.strangers = 0
        """Connections that were refused."""
        self._warnings: set[str] = set()
        self._keys: dict[int | None, bytes] = {}
        self._expected: dict[int | None, int] = {}
        self._callers: dict[int, _Caller] = {}
        self._of_host: dict[str, dict[int, _Caller]] = {}
        self._answered: dict[int, _Caller] = {}
        """Callers whose first bytes were made with the key. They may be a copy, so this is no proof yet."""
        self._paused_until_s: float | None = None

    def add(self, address: str, port: int, *, keyed: bool | None) -> tuple[int, _Listener | None]:
        """Make a port; returns its number, and what to `open`, or None if it was made before.

        Raises:
            OSError: we cannot listen there.
        """
        for one in self._listeners:
            if one.asked == (address, port, keyed):
                return one.port, None
        made = _Listener(address, port, keyed=keyed)
        self._listeners.append(made)
        return made.port, made

    def open(self, listener: _Listener) -> None:
        """Begin to accept connections at a port."""
        self._host.watch(listener.fd, lambda _mask: self._accept(listener))

    def shut(self, port: int, done: threading.Event) -> None:
        """Close a port, with the connections of its callers, and set ``done``."""
        for caller in [one for one in self._callers.values() if one.listener.port == port]:
            self._drop(caller)
        for one in [one for one in self._listeners if one.port == port]:
            self._host.unwatch(one.fd)
            one.socket.close()
            self._listeners.remove(one)
        done.set()

    def expect(self, place: int | None, key: bytes, count: int) -> None:
        """Take the key of a place, and go on with the callers that waited for it."""
        self._expected[place] = count
        self._keys[place] = key
        for caller in list(self._callers.values()):
            if caller.stream is None and len(caller.data) >= OPENING_BYTES:
                self._go_on(caller)

    def close(self) -> None:
        """Close all ports, and the connections of all callers."""
        for port in {one.port for one in self._listeners}:
            self.shut(port, threading.Event())

    def disown(self) -> None:
        """Close the ports in this process alone."""
        for one in self._listeners:
            one.socket.close()

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
            for one in self._listeners:
                self.open(one)

    def _accept(self, listener: _Listener) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, where = listener.socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room(error)
                return
            address = _address(where)
            sock.setblocking(False)
            caller = _Caller(sock, address, listener, time.monotonic())
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
        for one in self._listeners:
            self._host.unwatch(one.fd)
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
        _, place = PREAMBLE.unpack_from(caller.data)
        caller.place, has_key = place & ~HAS_KEY, bool(place & HAS_KEY)
        key = self._keys.get(caller.place, self._keys.get(None))
        if key is None:
            return
        keyed = caller.listener.keyed
        if keyed is not None and has_key != keyed:
            self._turn_away(caller, 1 if has_key else 2)
            return
        try:
            caller.stream = answer(caller.socket, key, caller.data)
            caller.stream.chunk = _FEW
            self._forget_host(caller)
            self._answered[caller.fd] = caller
            if len(self._answered) > self._most():
                self._refuse(next(iter(self._answered.values())))
        except Damaged:
            self._turn_away(caller, 3)
        except Exception:  # noqa: BLE001  as in `_read`
            self._refuse(caller)

    def _turn_away(self, caller: _Caller, reason: int) -> None:
        """Refuse a caller that has another key, and say so, if that may be a mistake of the user."""
        if caller.listener.keyed is None:
            self._refuse(caller)
            return
        with contextlib.suppress(OSError):
            caller.socket.send(TURNED_AWAY + bytes((reason,)))
        self._refuse(caller, f"a node at {caller.host} was refused: {WHY_REFUSED[reason][0]}")

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
        # Where members come by themselves, the owner of the hub decides about places.
        if caller.listener.keyed is None and self._host.is_connected(caller.place):
            refusal = message_to_bytes(Refused("another agent of this place is connected"))
            caller.stream.write(memoryview(frames.frame(frames.MESSAGE, refusal)))
            self._drop(caller)
            self._host.warn(
                f"a second agent for place {caller.place} has connected from {caller.address} and was refused"
            )
            return
        self._forget(caller)
        caller.decoder.longest, caller.stream.chunk = frames.LONGEST_OF_AGENTS, _MANY
        port = caller.listener.port
        self._host.admit(caller.stream, caller.address, caller.place, port, caller.decoder, arrived)

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
        """End a connection. If a worker may need the port soon, the kernel must keep nothing of it."""
        self._forget(caller)
        if caller.listener.keyed is not None:
            with contextlib.suppress(OSError):
                caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        caller.socket.close()

    def _refuse(self, caller: _Caller, text: str = "") -> None:
        """End the connection of a stranger, and warn the user, of strangers of one kind only once."""
        self._drop(caller)
        self.strangers += 1
        is_known = self.strangers > 1 if caller.listener.keyed is None else not caller.data
        if not text and is_known:  # or a probe that has said nothing
            return
        if not text and caller.data[: len(TORCH_STORE)] == TORCH_STORE:
            where = f"{caller.host} was sent away from port {caller.listener.port}, where the nodes meet"
            text = f"{where}: it is a torchrun, or a worker of torch"
        where = caller.address if caller.listener.keyed is None else caller.host
        port = caller.listener.port
        self._warn(text or f"a stranger at {where} connected to port {port} of this job and was refused")

    def _warn(self, text: str) -> None:
        if text not in self._warnings and len(self._warnings) < MOST_WARNINGS:
            self._warnings.add(text)
            self._host.warn(text)


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens at an address; for an empty one on IPv6 and IPv4, as far as there are both."""
    problem: OSError | None = None
    for place in (address,) if address else _EVERYWHERE:
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:  # there is no IPv6
            problem = error
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(place != "::"))
            sock.bind((place, port))
            sock.listen(4096)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            if problem is None or error.errno == errno.EADDRINUSE:
                problem = error
            if error.errno == errno.EADDRINUSE:
                break
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert problem is not None
    raise problem


def _address(where: tuple[object, ...]) -> str:
    host, port = str(where[0]), where[1]
    host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
