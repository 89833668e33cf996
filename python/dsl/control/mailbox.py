"""Messages that have arrived and are unread, and a descriptor that is readable while there are some."""

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
"""We do not read from a link while this many bytes of its messages are unread."""

UNREAD_BYTES_OF_ALL = 64 * UNREAD_BYTES
"""The same limit for all links together: it pauses each link that sends beyond it."""

MESSAGE_COST = 512
"""Bytes that a message counts for in addition to its own."""


class Mailbox:
    """A queue with a descriptor, for any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._items: deque[tuple[Link | None, object, int]] = deque()
        self._bytes = 0

    def put(self, link: Link | None, message: object, size: int = 0) -> None:
        """Keep a message of ``size`` bytes. A link with too many unread bytes is marked as paused."""
        with self._lock:
            if link is not None:
                size += MESSAGE_COST
                self._note(link, size)
                link.is_paused = link.unread_bytes >= UNREAD_BYTES or self._bytes >= UNREAD_BYTES_OF_ALL
            if not self._items:
                os.eventfd_write(self.fd, 1)
            self._items.append((link, message, size))

    def take(self) -> tuple[list[tuple[Link | None, object]], list[Link]]:
        """Take all messages; also returns the links whose pause is over."""
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
        """Close the descriptor only now: messages can be read as long as the mailbox exists."""
        os.close(self.fd)
