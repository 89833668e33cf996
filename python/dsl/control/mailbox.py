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

UNREAD_MESSAGES = 4096
"""A link is not read from while so many of its messages wait here."""

UNREAD_BYTES = frames.LONGEST
"""The same in bytes."""


class Mailbox:
    """A queue with a descriptor, for any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._items: deque[tuple[Link | None, object, int]] = deque()

    def put(self, link: Link | None, message: object, size: int = 0) -> None:
        """Keep a message that took so many bytes. A link that has sent too many is marked as paused."""
        with self._lock:
            if link is not None:
                link.unread += 1
                link.unread_bytes += size
                link.is_paused = link.unread >= UNREAD_MESSAGES or link.unread_bytes >= UNREAD_BYTES
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
                    link.unread -= 1
                    link.unread_bytes -= size
                    if link.is_paused and not link.unread:
                        link.is_paused = False
                        resumed.append(link)
        return [(link, message) for link, message, _ in items], resumed

    def take_first(self, link: Link) -> object:
        """Take the first message of one link; None: there is none."""
        with self._lock:
            for at, (whose, message, size) in enumerate(self._items):
                if whose is link:
                    del self._items[at]
                    link.unread -= 1
                    link.unread_bytes -= size
                    if not self._items:
                        self._hush()
                    return message
        return None

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        """Close the descriptor: messages may be read as long as somebody can ask for them."""
        os.close(self.fd)
