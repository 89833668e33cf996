"""Carries the bytes of a link: by existing descriptors, or by TCP with an encrypted session.

An encrypted session begins in clear with `MAGIC` and the place of the agent, by which the head finds the key,
and with `HAS_KEY`. A head that refuses the key may say why, also in clear: `TURNED_AWAY`. Two bytes of length
come before each of the two messages of the handshake, and before each later message.
After the handshake, only a side that knows the key can go on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from struct import Struct

from dsl._core import SecureError, SecureSession
from dsl.control.frames import Damaged
from dsl.errors import ControlError, RefusedLinkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    class Stream(Protocol):
        """Carries bytes both ways and never waits."""

        @property
        def is_local(self) -> bool:
            """Whether both ends are known to be on one machine."""

        @property
        def own_address(self) -> str:
            """Our address at this end; empty: another program has made the connection."""

        def fds(self) -> tuple[int, int]:
            """Descriptors to wait for: to read, and to write."""

        def tune(self, silence_s: float) -> None:
            """Let the kernel give up on the other side some time after we do."""

        def read(self) -> bytes | None:
            """What has arrived; None: nothing yet; empty: the other side ended. Raises OSError, Damaged."""

        def write(self, data: memoryview) -> int:
            """Write as many of these bytes as there is room for; returns how many. Raises OSError."""

        def is_written(self) -> bool:
            """Pass on what `write` has kept back; returns whether the kernel has it all. Raises OSError."""

        def finish(self) -> bool:
            """Tell the other side that no more bytes come; returns whether to wait for its end."""

        def close(self) -> None:
            """Close the descriptors."""

        def disown(self) -> None:
            """Close the descriptors in this process alone: another process goes on with them."""


MAGIC = b"dsl\x01"
PREAMBLE = Struct(">4sI")
"""`MAGIC` and the place of the agent."""

HAS_KEY = 1 << 31
"""Added to the place by an agent whose user has given it a key for the job."""

TURNED_AWAY = b"dsl\0"
"""What a head says to a caller with another key, before a byte that is a key of `WHY_REFUSED`."""

WHY_REFUSED = {
    1: (
        "it has a DSL_JOB_KEY, and this node has none",
        "this node has a DSL_JOB_KEY, and the other side has none: give all nodes the same one, or none",
    ),
    2: (
        "it has no DSL_JOB_KEY, and this node has one",
        "this node has no DSL_JOB_KEY, and the other side has one: give all nodes the same one",
    ),
    3: (
        "it has another DSL_JOB_KEY or --rdzv-id than this node",
        "the other side has another DSL_JOB_KEY or --rdzv-id: give all nodes the same ones",
    ),
}
"""Why keys do not fit, for the user of the side that refuses, and for the user of the side that calls."""

MARK = b"\0dsl\x01link\n"
"""What each side writes first on descriptors. Text before it, as from a login shell, is skipped."""

LENGTH = Struct(">H")
"""Length of each encrypted message."""

_HANDSHAKE_BYTES = 48
"""Length of each of the two messages of the handshake."""

OPENING_BYTES = PREAMBLE.size + LENGTH.size + _HANDSHAKE_BYTES
"""All that an agent sends before the head answers."""

_CHUNK = 256 << 10
_NOISE = 64 << 10
_UNSENT = 128 << 10
_TCP_NOTSENT_LOWAT = 25
_NEXT_AFTER_S = 0.25
_AGAIN_AFTER_S = 0.25
_AGAIN_AT_MOST_S = 2.0


class FdStream:
    """Two descriptors, which may be the same one. The stream owns them from now on.

    Raises:
        ControlError: a descriptor is a file, which has no other side.
    """

    is_local = False
    own_address = ""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self._owed, self._has_begun = memoryview(MARK), False
        self._noise: bytearray | None = bytearray()
        self._was_blocking = {fd: os.get_blocking(fd) for fd in (read_fd, write_fd)}
        with select.epoll() as check:
            for fd in self._was_blocking:
                try:
                    check.register(fd, 0)
                except PermissionError:
                    raise ControlError(
                        f"descriptor {fd} is a file, and nobody can answer through it"
                    ) from None
        for fd in self._was_blocking:
            os.set_blocking(fd, False)

    def fds(self) -> tuple[int, int]:
        """Both descriptors."""
        return self.read_fd, self.write_fd

    def tune(self, silence_s: float) -> None:
        """Do nothing: the program that carries the bytes, such as ssh, has made the connection."""

    def read(self) -> bytes | None:
        """Read what has arrived behind the mark of the other side."""
        try:
            data = os.read(self.read_fd, _CHUNK)
        except BlockingIOError:
            return None
        return data if self._noise is None else self._after_mark(self._noise, data)

    def _after_mark(self, noise: bytearray, data: bytes) -> bytes | None:
        noise += data
        before, mark, after = noise.partition(MARK)
        if mark:
            self._noise = None
            return bytes(after) or None
        if data and len(noise) < _NOISE:
            return None
        words = " ".join(before.decode("utf-8", "replace").split())
        said = f": {words[-200:]!r}" if words else ""
        if data:
            raise Damaged(f"does not speak as an agent{said}")
        raise Damaged(f"has closed the connection before an agent spoke{said}")

    def write(self, data: memoryview) -> int:
        """Write as many bytes as there is room for."""
        self._has_begun = True
        if not self.is_written():
            return 0
        try:
            return os.write(self.write_fd, data)
        except BlockingIOError:
            return 0

    def is_written(self) -> bool:
        """Write the mark before the first bytes: nothing else is ever kept back."""
        while self._owed and self._has_begun:
            try:
                self._owed = self._owed[os.write(self.write_fd, self._owed) :]
            except BlockingIOError:
                return False
        return True

    def finish(self) -> bool:
        """Let the other side see the end. What a pipe has taken is not lost when it is closed."""
        if self.write_fd >= 0:
            if self.write_fd != self.read_fd:
                _let_go(self.write_fd, blocking=self._was_blocking[self.write_fd])
                self.write_fd = -1
            else:
                _end_writing(self.write_fd)
        return False

    def close(self) -> None:
        """Close both. Other processes may share them, so restore their blocking mode first."""
        for fd in {self.read_fd, self.write_fd} - {-1}:
            _let_go(fd, blocking=self._was_blocking[fd])
        self.read_fd = self.write_fd = -1

    def disown(self) -> None:
        """Close both, and change nothing that another process shares."""
        for fd in {self.read_fd, self.write_fd}:
            os.close(fd)


def _end_writing(fd: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
        end.shutdown(socket.SHUT_WR)


def _let_go(fd: int, *, blocking: bool) -> None:
    with contextlib.suppress(OSError):
        os.set_blocking(fd, blocking)
    with contextlib.suppress(OSError):
        os.close(fd)


class SecureStream:
    """A TCP connection whose handshake is done."""

    def __init__(self, sock: socket.socket, session: SecureSession) -> None:
        self.chunk = _CHUNK
        """Bytes to read at once."""
        self._socket, self._session = sock, session
        self._arrived = bytearray()
        self._sealed = memoryview(b"")
        sock.setblocking(False)
        self.own_address: str = sock.getsockname()[0]
        self.is_local: bool = self.own_address == sock.getpeername()[0]

    def fds(self) -> tuple[int, int]:
        """The socket, twice."""
        fd = self._socket.fileno()
        return fd, fd

    def tune(self, silence_s: float) -> None:
        """Send small messages at once, let the kernel hold little and give up after twice the silence."""
        tcp, ms = socket.IPPROTO_TCP, max(int(silence_s * 2000), 1)
        options = [
            (tcp, socket.TCP_NODELAY, 1),
            (tcp, socket.TCP_USER_TIMEOUT, ms),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (tcp, socket.TCP_KEEPIDLE, max(ms // 2000, 1)),
            (tcp, socket.TCP_KEEPINTVL, max(ms // 6000, 1)),
            (tcp, socket.TCP_KEEPCNT, 3),
            (tcp, _TCP_NOTSENT_LOWAT, _UNSENT),
        ]
        for level, option, value in options:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(level, option, value)

    def read(self) -> bytes | None:
        """Decrypt what has arrived."""
        try:
            data = self._socket.recv(self.chunk)
        except BlockingIOError:
            data = None
        if data == b"":
            return data
        self._arrived += data or b""
        plain, at = [], 0
        while len(self._arrived) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._arrived, at)
            end = at + LENGTH.size + length
            if end > len(self._arrived):
                break
            try:
                plain.append(self._session.open(bytes(self._arrived[at + LENGTH.size : end])))
            except SecureError:
                raise Damaged("has sent something that was not made with the key of this job") from None
            at = end
        del self._arrived[:at]
        return b"".join(plain) or None

    def write(self, data: memoryview) -> int:
        """Encrypt and send up to one message, if the one before has gone."""
        if not self.is_written():
            return 0
        piece = bytes(data[: SecureSession.MAX_PLAIN])
        message = self._session.seal(piece)
        self._sealed = memoryview(LENGTH.pack(len(message)) + message)
        self.is_written()
        return len(piece)

    def is_written(self) -> bool:
        """Send what is encrypted."""
        while self._sealed:
            try:
                self._sealed = self._sealed[self._socket.send(self._sealed) :]
            except BlockingIOError:
                return False
        return True

    def finish(self) -> bool:
        """End our half. A close with unread bytes would make the kernel throw away what is on its way."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            return True
        return False

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def disown(self) -> None:
        """Close the socket: as long as another process has it, the connection stays."""
        self._socket.close()


def answer(sock: socket.socket, key: bytes, opening: bytes) -> SecureStream:
    """Answer the `OPENING_BYTES` of an agent.

    Raises:
        Damaged: the bytes were not made with the key.
        OSError: the connection has ended.
    """
    session = SecureSession(key, initiator=False)
    try:
        session.read_handshake(opening[PREAMBLE.size + LENGTH.size :])
        message = session.handshake()
    except SecureError:
        raise Damaged("does not know the key of this job") from None
    sock.sendall(LENGTH.pack(len(message)) + message)
    return SecureStream(sock, session)


class _Attempt:
    """One address of the head, tried again and again."""

    def __init__(self, address: str, key: bytes, place: int, due_s: float) -> None:
        """``place`` may have `HAS_KEY` added to it."""
        self.address, self.due_s = address, due_s
        self.socket: socket.socket | None = None
        self.problem = "no answer"
        self.has_begun = False
        self._key, self._place, self._pause_s = key, place, _AGAIN_AFTER_S
        self._answer = b""
        self._has_spoken = False

    def begin(self) -> None:
        """Start to connect."""
        self.has_begun = True
        self._answer, self._has_spoken = b"", False
        try:
            host, port = split_address(self.address)
            family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.socket = socket.socket(family, kind, protocol)
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                self.socket.connect(where)
        except OSError as error:
            self.fail(error.strerror or str(error))

    def fail(self, problem: str) -> None:
        """Give up until later."""
        self.end()
        self.problem = problem
        self.due_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _AGAIN_AT_MOST_S)

    def end(self) -> None:
        """Close what is open."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def go_on(self) -> SecureStream | None:
        """Do what can be done now; return the stream when it is ready."""
        assert self.socket is not None
        try:
            if not self._has_spoken:
                code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                # The kernel may choose the port that we call for our own end.
                if code or self.socket.getsockname() == self.socket.getpeername():
                    self.fail(os.strerror(code or errno.ECONNREFUSED))
                    return None
                self._session = SecureSession(self._key, initiator=True)
                first = self._session.handshake()
                self.socket.sendall(PREAMBLE.pack(MAGIC, self._place) + LENGTH.pack(len(first)) + first)
                self._has_spoken = True
                self.problem = "it does not answer"
                return None
            data = self.socket.recv(LENGTH.size + _HANDSHAKE_BYTES - len(self._answer))
            self._answer += data
            if self._answer[: len(TURNED_AWAY)] == TURNED_AWAY and len(self._answer) > len(TURNED_AWAY):
                _, why = WHY_REFUSED.get(self._answer[len(TURNED_AWAY)], WHY_REFUSED[3])
                raise RefusedLinkError(f"{self.address} refuses this node: {why}")
            if not data:
                self.fail("it has closed the connection")
            elif len(self._answer) == LENGTH.size + _HANDSHAKE_BYTES:
                self._session.read_handshake(self._answer[LENGTH.size :])
                stream, self.socket = SecureStream(self.socket, self._session), None
                return stream
        except BlockingIOError:
            return None
        except OSError as error:
            self.fail(error.strerror or str(error))
        except SecureError:
            self.fail("whoever is there does not know the key of this job")
        return None

    @property
    def is_open(self) -> bool:
        """Whether it waits for the other side."""
        return self.socket is not None

    @property
    def awaited(self) -> int:
        """The poll events to wait for."""
        return select.POLLIN if self._has_spoken else select.POLLOUT


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        ControlError: the text is no such address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ControlError(f"{address!r} is no address: HOST:PORT, and an IPv6 address in brackets")
    return host.removeprefix("[").removesuffix("]"), int(port)


def connect(
    addresses: Sequence[str], key: bytes, place: int, timeout_s: float, *, keyed: bool = False
) -> SecureStream:
    """Connect to the head of a job at the first of its addresses that answers. All are tried again and again.

    ``addresses``: ``HOST:PORT``, an IPv6 address in brackets; names are looked up last. ``key``: 32 bytes
    that the head expects of this ``place``. ``keyed``: the user has given the key.

    Raises:
        RefusedLinkError: the head has said that the keys do not fit.
        ControlError: no address has answered within ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    place |= HAS_KEY if keyed else 0
    attempts = [_Attempt(one, key, place, deadline_s) for one in sorted(addresses, key=_is_name)]
    if not attempts:
        raise ControlError("the head of the job has no address")
    attempts[0].due_s = 0.0
    try:
        while (now_s := time.monotonic()) < deadline_s:
            for at, one in enumerate(attempts):
                if one.socket is None and one.due_s <= now_s:
                    is_first_time = not one.has_begun
                    one.begin()
                    if is_first_time and at + 1 < len(attempts):
                        attempts[at + 1].due_s = now_s + (_NEXT_AFTER_S if one.is_open else 0.0)
            if (stream := _wait(attempts, deadline_s)) is not None:
                return stream
        places = ", ".join(f"{one.address} ({one.problem})" for one in attempts)
        raise ControlError(f"the head of the job cannot be reached within {timeout_s:g} s: {places}")
    finally:
        for one in attempts:
            one.end()


def _wait(attempts: Sequence[_Attempt], deadline_s: float) -> SecureStream | None:
    """Wait until something can be done, and do it."""
    poller = select.poll()
    open_ones = {one.socket.fileno(): one for one in attempts if one.socket is not None}
    for fd, one in open_ones.items():
        poller.register(fd, one.awaited)
    next_s = min([deadline_s, *[one.due_s for one in attempts if one.socket is None]])
    for fd, _ in poller.poll(max(next_s - time.monotonic(), 0) * 1000 + 1):
        one = open_ones[fd]
        if (stream := one.go_on()) is not None:
            return stream
        if one.socket is None:
            for other in attempts:
                if not other.has_begun:
                    other.due_s = 0.0
                    break
    return None


def _is_name(address: str) -> bool:
    try:
        socket.getaddrinfo(split_address(address)[0], None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return True
    return False
