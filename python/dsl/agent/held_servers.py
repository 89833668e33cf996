"""Warm servers that a program holds: they stay while it runs, whatever its jobs want, and end with it."""

from __future__ import annotations

import select
import socket
from threading import Lock
from typing import TYPE_CHECKING

from dsl.agent.warm import call, digest_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from dsl.model.job import ForkServer


class HeldServers:
    """Connections with warm servers, which stay until they are closed. Several threads may use this."""

    def __init__(self) -> None:
        self._connections: dict[str, socket.socket] = {}
        self._lock = Lock()

    def hold(self, servers: Collection[ForkServer], mask: Collection[int]) -> None:
        """Hold these servers, as far as they are warm. Missing ones are started with this signal mask."""
        with self._lock:
            for server in servers:
                if server.warm is None:
                    continue
                digest = digest_of(server)
                held = self._connections.get(digest)
                if held is not None:
                    if not _has_hung_up(held):
                        continue
                    self._connections.pop(digest).close()
                found = call(server, start_mask=mask, purpose="hold")
                if found is not None:
                    self._connections[digest] = socket.socket(fileno=found.fd)

    def close(self) -> None:
        """Let the servers end, unless other programs need them."""
        with self._lock:
            for held in self._connections.values():
                held.shutdown(socket.SHUT_RDWR)  # children that were forked meanwhile have copies of it
                held.close()
            self._connections.clear()


def _has_hung_up(held: socket.socket) -> bool:
    """Whether the server at the other end takes no more calls."""
    poll = select.poll()
    poll.register(held, 0)
    return bool(poll.poll(0))
