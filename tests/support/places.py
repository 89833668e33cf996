"""Delegates of fixed nodes on this machine, each with a test in the place of its agent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, TypeVar

from dsl.rendezvous.delegate_messages import Lines, Meet, Open, answer_from_line, order_to_line

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from dsl.rendezvous.delegate_messages import Answer, Order

_A = TypeVar("_A")

PATIENCE_S = 20.0


class Node:
    """A delegate, and the words with it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsl.rendezvous.places", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd="/",
                stdin=subprocess.DEVNULL,
            )
        self.socket = ours
        self.socket.settimeout(PATIENCE_S)
        self._lines = Lines()
        self.heard: list[Answer] = []
        """What nobody has waited for, in order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()

    def say(self, order: Order) -> None:
        """Give an order."""
        self.socket.sendall(order_to_line(order))

    def open(
        self,
        rank: int,
        nodes: int,
        port: int,
        *,
        address: str = "127.0.0.1",
        run_id: str = "job",
        **settings: str,
    ) -> None:
        """The first order; the node is called ``nRANK``."""
        pairs = (*settings.items(), ("node_rank", str(rank)))
        self.say(Open("static", f"{address}:{port}", run_id, nodes, nodes, None, pairs, f"n{rank}"))

    def meet(self, size: int = 1, role: str = "default", restarts: int = 0) -> None:
        """Join the next round."""
        self.say(Meet(size, role, restarts, "failure" if restarts else "start"))

    def expect(self, kind: type[_A]) -> _A:
        """The next answer of a kind; what came before it is kept in `heard`."""
        while True:
            for place, answer in enumerate(self.heard):
                if isinstance(answer, kind):
                    return self.heard.pop(place)  # type: ignore[return-value]
            data = self.socket.recv(1 << 16)
            if not data:
                raise AssertionError(f"the delegate has ended, after {self.heard}")
            self.heard += [answer_from_line(line) for line in self._lines.feed(data)]

    def until_end(self) -> list[Answer]:
        """All that is said until the delegate closes its end."""
        while data := self.socket.recv(1 << 16):
            self.heard += [answer_from_line(line) for line in self._lines.feed(data)]
        return self.heard


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def kill(node: Node) -> None:
    """End a delegate as a power failure ends its machine, but that the kernel tells the others."""
    os.kill(node.process.pid, 9)
