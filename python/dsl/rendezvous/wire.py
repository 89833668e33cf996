"""The event loop of a delegate, and its connections of lines: one thread, no polling."""

from __future__ import annotations

import errno
import select
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

CHUNK = 1 << 16
FAREWELL_S = 2.0
"""Time that the other side has to read the last lines."""

ENDED = "the connection has ended"

_BUSY = (errno.EAGAIN, errno.EINTR)
_RESET = (errno.ECONNRESET, errno.EPIPE)


class Loop:
    """Calls back when descriptors are ready, and when times are due."""

    def __init__(self) -> None:
        self.is_over = False
        """Set it to leave `run`."""
        self.each_turn: Callable[[], None] | None = None
        """Called after all ready descriptors and due times were served."""
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}
        self._due: dict[Hashable, tuple[float, Callable[[], None]]] = {}

    def watch(self, fd: int, call: Callable[[int], None], *, read: bool = True, write: bool = False) -> None:
        """Call back with the mask of events when a descriptor is readable or writable."""
        mask = (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0)
        if fd in self._calls:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._calls[fd] = call

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor. Call it before you close the descriptor."""
        if self._calls.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def at(self, key: Hashable, due_s: float, call: Callable[[], None]) -> None:
        """Call back at a time of `time.monotonic`. Replaces an earlier call with the same key."""
        self._due[key] = (due_s, call)

    def cancel(self, key: Hashable) -> None:
        """Cancel the call with this key."""
        self._due.pop(key, None)

    def run(self) -> None:
        """Serve until `is_over` is set."""
        while not self.is_over:
            due_s = min([one for one, _ in self._due.values()], default=None)
            left_s = -1.0 if due_s is None else max(0.0, due_s - time.monotonic())
            # Data that has arrived comes first: after we were stopped ourselves, other sides must not seem
            # silent.
            for fd, mask in self._epoll.poll(left_s):
                call = self._calls.get(fd)
                if call is not None:
                    call(mask)
            now_s = time.monotonic()
            for key in [key for key, (one, _) in self._due.items() if one <= now_s]:
                _, then = self._due.pop(key, (0.0, None))
                if then is not None:
                    then()
            if self.each_turn is not None:
                self.each_turn()


class Wire:
    """A connection of lines. ``hear`` gets each line; ``lost`` gets the reason if the connection is lost."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        hear: Callable[[bytes], None],
        lost: Callable[[str], None],
        *,
        longest: int,
        most_queued: int,
    ) -> None:
        """``longest``: most bytes of a line; ``most_queued``: most bytes that may wait for the other side."""
        self.last_heard_s = time.monotonic()
        """`time.monotonic` when data last came."""
        self.is_closed = False
        self._loop, self._socket = loop, sock
        self._hear, self._lost = hear, lost
        self._longest, self._most_queued = longest, most_queued
        self._rest = b""
        self._queue = bytearray()
        self._is_ending = False
        sock.setblocking(False)
        loop.watch(sock.fileno(), self._ready)

    def feed(self, data: bytes) -> None:
        """Take bytes that other code has read from the socket."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if self.is_closed or self._is_ending:
                return
            if len(line) > self._longest:
                break
            self._hear(line)
        else:
            if len(self._rest) <= self._longest:
                return
        self.lose("it has sent a line that is too long")

    def send(self, line: bytes) -> None:
        """Send a line, now or when the other side takes it."""
        if self.is_closed or self._is_ending:
            return
        self._queue += line
        self._flush()
        if len(self._queue) > self._most_queued:
            self._loop.at(self, 0.0, lambda: self.lose("it takes nothing of what is sent"))

    def lose(self, why: str) -> None:
        """Close the connection, and report why."""
        if not self.is_closed:
            self.close()
            self._lost(why)

    def finish(self) -> None:
        """Close the connection when the other side has read everything and gone, or after `FAREWELL_S`."""
        if self.is_closed or self._is_ending:
            return
        self._is_ending = True
        self._loop.at(self, time.monotonic() + FAREWELL_S, self.close)
        self._flush()

    def close(self) -> None:
        """Close the connection at once."""
        if not self.is_closed:
            self.is_closed = True
            self._loop.unwatch(self._socket.fileno())
            self._loop.cancel(self)
            self._socket.close()

    def _ready(self, mask: int) -> None:
        if mask & ~select.EPOLLOUT:
            self._read()
        if not self.is_closed and mask & select.EPOLLOUT:
            self._flush()

    def _read(self) -> None:
        try:
            data = self._socket.recv(CHUNK)
        except OSError as error:
            if error.errno not in _BUSY:
                self._end(ENDED if error.errno in _RESET else f"{ENDED} ({(error.strerror or '').lower()})")
            return
        if not data:
            self._end(ENDED)
            return
        self.last_heard_s = time.monotonic()
        if not self._is_ending:
            self.feed(data)

    def _end(self, why: str) -> None:
        if self._is_ending:
            self.close()
        else:
            self.lose(why)

    def _flush(self) -> None:
        try:
            while self._queue:
                del self._queue[: self._socket.send(self._queue)]
        except OSError as error:
            if error.errno not in _BUSY:
                self._queue.clear()  # the bytes still to be read say why
        if self._is_ending and not self._queue:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.close()
                return
        self._loop.watch(self._socket.fileno(), self._ready, write=bool(self._queue))


class Pulse:
    """Sends signs of life on some wires, and checks those of the other sides."""

    def __init__(
        self, loop: Loop, sign: bytes, wires: Callable[[], list[Wire]], *, every_s: float, silence_s: float
    ) -> None:
        """Sends ``sign`` every ``every_s``. A wire that is silent for ``silence_s`` is lost."""
        self._loop, self._sign, self._wires = loop, sign, wires
        self._every_s, self._silence_s = every_s, silence_s
        self._beat()

    def _beat(self) -> None:
        now_s = time.monotonic()
        for wire in self._wires():
            if now_s - wire.last_heard_s > self._silence_s - self._every_s:
                wire.lose(f"nothing has been heard from it for {self._silence_s:g} s")
            else:
                wire.send(self._sign)
        self._loop.at(self, now_s + self._every_s, self._beat)
