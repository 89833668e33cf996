"""Delegates without torch: each passes its agent's lines on to the test, which plays the other nodes.

They meet by torch's own rendezvous, as with a node under torchrun.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dsl.model.codec import Lines, to_line
from dsl.model.job import Meeting
from dsl.rendezvous.delegate_messages import ORDERS, ByTorch, Claim, Meet, NodesMet, Open

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from dsl.rendezvous.delegate_messages import Answer, Order

_T = TypeVar("_T")
WAIT_S = 20.0

# The command with delegates of the test's: what stands in for the product's own words.
_COMMAND = (
    "import sys; from dsl.rendezvous import dynamic; fake, hub = sys.argv[1:3]; del sys.argv[1:3]; "
    "dynamic.delegate_words = lambda: (sys.executable, fake, hub); "
    "from dsl.run import command; sys.exit(command())"
)


def elastic_line(hub: Hub, words: Sequence[str]) -> list[str]:
    """A command line of ``dslrun`` whose delegate speaks with the hub."""
    fake = Path(__file__).with_name("fake_delegate.py")
    return [sys.executable, "-c", _COMMAND, str(fake), str(hub.path), *words]


class Node:
    """One agent, as its delegate sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(WAIT_S)
        self._lines = Lines(*ORDERS)
        self._orders: list[Order] = []
        self.opened = self.expect(Open)
        self.expect(Claim)
        self.say(ByTorch())

    def expect(self, kind: type[_T]) -> _T:
        """The next order, which is of this kind. Fails when none comes."""
        order = self.next()
        assert isinstance(order, kind), f"expected {kind.__name__}, got {order}"
        return order

    def next(self) -> Order | None:
        """The next order; None: the delegate is gone."""
        while not self._orders:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._orders += self._lines.feed(data)
        return self._orders.pop(0)

    def say(self, answer: Answer) -> None:
        self._connection.sendall(to_line(answer))

    def hang_up(self) -> None:
        """End the delegate by itself, as in a crash."""
        self._connection.close()


def meet(nodes: Sequence[Node], port: int, *, round_: int = 0, expected: Any = None) -> list[Meet]:
    """Let nodes meet in this order; their orders."""
    orders = [node.expect(Meet) for node in nodes]
    sizes = tuple(order.local_world_size for order in orders)
    for place, node in enumerate(nodes):
        meeting = Meeting(
            attempt=0,
            node_rank=place,
            local_world_sizes=sizes,
            address="127.0.0.1",
            port=port,
            round=round_,
            first_role_rank=sum(sizes[:place]),
            role_size=sum(sizes),
        )
        node.say(NodesMet(meeting, tuple(node.opened.host for node in nodes)))
    return orders


class Hub:
    """Where the delegates of a test come together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(path))
        self._listener.listen()
        self._listener.settimeout(WAIT_S)
        self._connections: list[socket.socket] = []

    def node(self) -> Node:
        """The next agent that has started its delegate."""
        connection, _ = self._listener.accept()
        self._connections.append(connection)
        return Node(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._listener, *self._connections):
            one.close()
