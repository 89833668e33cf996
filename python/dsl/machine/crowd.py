"""Serves many clients at a port from one thread, whatever each of them does.

Each client has a deadline, and where there are too many the oldest has to go. So the slow and the silent
keep no other waiting, however many they are.
"""

from __future__ import annotations

import select
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event

    Answer = Callable[[bytearray], "bytes | None"]
    """The answer to what a client has sent; None: it has to send more. Raises OSError: it gets none."""

MOST_CLIENTS = 128
"""So many clients are served at once, and as many wait to be."""
CHUNK = 1 << 16
PAUSE_S = 1.0
"""So long nobody is let in when there are no more descriptors."""


def serve(
    listener: socket.socket,
    is_over: Event,
    answer: Answer,
    *,
    within_s: float,
    most_bytes: int,
    greeting: bytes = b"",
) -> None:
    """Serve clients until the event is set and `close` is called.

    A client gets the ``greeting`` and an answer, and has ``within_s`` for what it sends, at most
    ``most_bytes``, and as long for what it takes.
    """
    own, poller = listener.fileno(), select.poll()
    listener.setblocking(False)
    poller.register(own, select.POLLIN)
    clients: dict[int, _Client] = {}  # the oldest first
    while True:
        next_s = min((one.deadline_s for one in clients.values()), default=None)
        ready = poller.poll(None if next_s is None else max(next_s - time.monotonic(), 0) * 1000 + 1)
        if is_over.is_set():
            break
        now_s = time.monotonic()  # before the answers, which may take long: nobody is late because of them
        for fd, _ in ready:
            if fd != own and not clients[fd].go_on(answer, within_s, most_bytes):
                clients.pop(fd).close()
        if any(fd == own for fd, _ in ready):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue  # the client has gone
            except OSError:
                is_over.wait(PAUSE_S)
                continue
            if len(clients) == MOST_CLIENTS:
                clients.pop(next(iter(clients))).close()
            clients[connection.fileno()] = _Client(connection, poller, greeting, now_s + within_s)
        for fd in [fd for fd, one in clients.items() if one.deadline_s <= now_s]:
            clients.pop(fd).close()
    for one in clients.values():
        one.close()


def close(listener: socket.socket, is_over: Event) -> None:
    """End `serve` in another thread."""
    is_over.set()
    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    listener.close()


class _Client:
    """A connection, what has come from it, and what it has to get."""

    def __init__(
        self, connection: socket.socket, poller: select.poll, greeting: bytes, deadline_s: float
    ) -> None:
        self._connection, self._poller = connection, poller
        self._asked, self._left = bytearray(), memoryview(greeting)
        self._is_answered = False
        self.deadline_s = deadline_s
        """`time.monotonic` when it has to be done with what it does."""
        connection.setblocking(False)
        poller.register(connection, self._wish())

    def _wish(self) -> int:
        reads = 0 if self._is_answered else select.POLLIN
        return reads | (select.POLLOUT if self._left else 0)

    def go_on(self, answer: Answer, within_s: float, most_bytes: int) -> bool:
        """Read and write what can be; false: that is all, or the client has gone or is refused."""
        try:
            if not self._is_answered and (more := self._receive()) is not None:
                self._asked += more
                found = answer(self._asked)
                if found is None and (not more or len(self._asked) > most_bytes):
                    return False
                if found is not None:
                    self._left = memoryview(bytes(self._left) + found)
                    self._is_answered, self.deadline_s = True, time.monotonic() + within_s
            if self._left:
                self._left = self._left[self._connection.send(self._left) :]
            if self._is_answered and not self._left:
                self._connection.shutdown(socket.SHUT_WR)
                return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        self._poller.modify(self._connection, self._wish())
        return True

    def _receive(self) -> bytes | None:
        """What has come; empty: nothing more will come; None: nothing has come so far. Raises OSError."""
        try:
            return self._connection.recv(CHUNK)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """End the connection."""
        self._poller.unregister(self._connection)
        self._connection.close()
