"""Messages that have arrived and wait for whoever reads them, and a descriptor that is readable meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from dsl.control import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.control.link import Link

UNREAD_BYTES = frames.LONGEST_OF_AGENTS
"""A link is not read from while so many bytes of its messages wait here."""

UNREAD_BYTES_OF_ALL = 64 * UNREAD_BYTES
"""The same of all links that have sent something."""

MESSAGE_COST = 512
"""What a message counts for beyond its bytes."""


class Mailbox:
    """A queue with a descriptor, for any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._items: deque[tuple[Link | None, object, int]] = deque()
        self._bytes = 0

    def put(self, link: Link | None, message: object, size: int = 0) -> None:
        """Keep a message that took so many bytes. A link that has sent too many is marked as paused."""
        with self._lock:
            if link is not None:
                size += MESSAGE_COST
                self._note(link, size)
                link.is_paused = link.unread_bytes >= UNREAD_BYTES or self._bytes >= UNREAD_BYTES_OF_ALL
            if not self._items:
                os.eventfd_write(self.fd, 1)
            self._items.append((link, message, size))

    def take(self) -> tuple[list[tuple[Link | None, object]], list[Link]]:
        """Take all messages, and the links that were paused and need not be any longer."""
        with self._lock:
            items, self._items = self._items, deque()
            self._hush()
            resumed = []
            for link, _, size in items:
                if link is not None:
                    self._note(link, -size)
                    if link.is_paused and not link.unread_bytes:
                        link.is_paused = False
                        resumed.append(link)
        return [(link, message) for link, message, _ in items], resumed

    def take_first(self, link: Link) -> object:
        """Take the first message of one link; None: there is none."""
        with self._lock:
            for at, (whose, message, size) in enumerate(self._items):
                if whose is link:
                    del self._items[at]
                    self._note(link, -size)
                    link.is_paused = False
                    if not self._items:
                        self._hush()
                    return message
        return None

    def _note(self, link: Link, size: int) -> None:
        link.unread_bytes += size
        self._bytes += size

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        """Close the descriptor: messages may be read as long as somebody can ask for them."""
        os.close(self.fd)
