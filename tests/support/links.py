"""Two hubs, as a head and an agent have them, and the connection between them."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from dsl.control.hub import FdStream, Hub, Link, connect
from dsl.control.messages import Hello

KEY = bytes(range(32))
LONG_S = 20.0


def hello(place: int = 0) -> Hello:
    """The first word of an agent."""
    return Hello("1", place, "host", 1)


MARK = b"\0dsl\x01link\n"
"""What each side writes first on descriptors."""

MESSAGE, PING, PONG, OUTPUT, CREDIT, PACKED = 1, 2, 3, 4, 5, 6
"""Kinds of frames."""


def frame(kind: int, payload: bytes) -> bytes:
    """A frame as it goes over a connection."""
    return len(payload).to_bytes(4, "big") + bytes((kind,)) + payload


class Ends:
    """A head, an agent, and what the head shows."""

    def __init__(self, head_s: float = LONG_S, agent_s: float = LONG_S, *, joined: bool = False) -> None:
        """``joined``: what the head shows of both streams goes to one place."""
        self.shown, write_out = os.pipe()
        self.shown_err, write_err = os.pipe()
        self._fds = [self.shown, self.shown_err, write_out, write_err]
        self.head = Hub(head_s, show=True, console=(write_out, write_out if joined else write_err))
        self.agent = Hub(agent_s)
        self._hubs = [self.head, self.agent]

    def another_agent(self) -> Hub:
        self._hubs.append(Hub(LONG_S))
        return self._hubs[-1]

    def by_descriptors(self, agent: Hub | None = None, name: str = "node1") -> tuple[Link, Link]:
        """A pair of sockets, as between a head and its ssh: the link of the head, and that of the agent."""
        mine, theirs = (end.detach() for end in socket.socketpair())
        link = self.head.add(FdStream(mine, mine), name)
        return link, (agent or self.agent).add(FdStream(theirs, theirs), "the head")

    def by_socket(self, *said: bytes, name: str = "node1") -> tuple[Link, socket.socket]:
        """The link of a head, and the socket of an agent that the test plays; it has said these frames."""
        mine, theirs = socket.socketpair()
        link = self.head.add(FdStream(mine.fileno(), mine.detach()), name)
        theirs.sendall(MARK + b"".join(said))
        return link, theirs

    def by_tcp(self, place: int = 0, agent: Hub | None = None) -> tuple[Link, Link]:
        """A connection to the port of the head, which is started for it. The first message is read."""
        port = self.head.listen()
        self.head.expect(place, KEY)
        self.head.start()
        link = (agent or self.agent).add(connect([f"127.0.0.1:{port}"], KEY, place, 10), "the head")
        link.send_now(hello(place))
        ((on_head, _),) = until(self.head, bool)
        return on_head, link

    def pipe(self) -> tuple[int, int]:
        """A pipe for output; the hub gets its read end."""
        read, write = os.pipe()
        self._fds.append(write)
        return read, write

    def close(self) -> None:
        for hub in reversed(self._hubs):
            hub.close(5)
        for fd in self._fds:
            os.close(fd)


def until(
    hub: Hub, wanted: Callable[[list[tuple[Any, Any]]], bool], timeout_s: float = 10.0
) -> list[tuple[Any, Any]]:
    """Read until all that was read is what is wanted."""
    found: list[tuple[Any, Any]] = []
    deadline_s = time.monotonic() + timeout_s
    while not wanted(found):
        left_s = deadline_s - time.monotonic()
        assert left_s > 0, f"only {found}"
        if select.select([hub], [], [], left_s)[0]:
            found += hub.read()
    return found


def messages(hub: Hub, count: int) -> list[Any]:
    """So many messages, whosever they are."""
    return [message for _, message in until(hub, lambda found: len(found) >= count)]


def bytes_of(fd: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        data += os.read(fd, 1 << 20)
    return bytes(data)
