"""``python -m dsl.rendezvous.places FD``: meets the other nodes for an agent whose job has fixed places.

It talks with its agent over the descriptor, as every delegate does (`dsl.rendezvous.delegate_messages`), and
with the other nodes over TCP, without torch: node 0 leads. It ends with its agent. It is no command of users.
"""

from __future__ import annotations

import signal
import socket
import sys
import time

from dsl.errors import DslError, RendezvousError
from dsl.rendezvous.delegate_messages import (
    MOST_BYTES,
    Fail,
    Finished,
    Leave,
    NotMet,
    Open,
    answer_to_line,
    order_from_line,
)
from dsl.rendezvous.terms import terms_of
from dsl.rendezvous.wire import FAREWELL_S, Loop, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.rendezvous.delegate_messages import Answer
    from dsl.rendezvous.head_node import HeadNode
    from dsl.rendezvous.other_node import OtherNode

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The agent gets these signals and decides what follows. It ends us by closing its end of the socket."""


class Delegate:
    """The process between the agent and the other nodes."""

    def __init__(self, sock: socket.socket) -> None:
        self.loop = Loop()
        self._node: HeadNode | OtherNode | None = None
        self._agent = Wire(
            self.loop,
            sock,
            self._hear,
            lambda _why: self._end(),
            longest=MOST_BYTES,
            most_queued=64 * MOST_BYTES,
        )
        self._is_ending = False

    def answer(self, answer: Answer) -> None:
        """Tell the agent. After the last answer the delegate ends, once the other nodes have had theirs."""
        self._agent.send(answer_to_line(answer))
        if isinstance(answer, Finished):
            self.loop.at("finished", 0.0, self._end)

    def _hear(self, line: bytes) -> None:
        try:
            order = order_from_line(line)
        except RendezvousError as error:
            self.answer(NotMet("other", str(error)))
            self._end()
            return
        if isinstance(order, Open):
            self._open(order)
        elif self._node is not None:
            self._node.hear(order)
        if isinstance(order, Leave | Fail):
            self._end()

    def _open(self, order: Open) -> None:
        try:
            terms = terms_of(order)
            if terms.node_rank == 0:
                from dsl.rendezvous.head_node import HeadNode

                self._node = HeadNode(self.loop, terms, self.answer)
            else:
                from dsl.rendezvous.other_node import OtherNode

                self._node = OtherNode(self.loop, terms, self.answer)
        except DslError as error:
            self.answer(NotMet("settings", str(error)))

    def _end(self) -> None:
        """Send what is left for the other nodes, and end."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._node is not None:
            self._node.end()
        self.loop.at("end", time.monotonic() + FAREWELL_S, self._stop)
        self.loop.each_turn = self._look

    def _look(self) -> None:
        if self._node is None or self._node.is_done:
            self._stop()

    def _stop(self) -> None:
        self.loop.is_over = True


def main() -> int:
    """Serve the agent at the other end of the descriptor until it or the job has gone."""
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    Delegate(socket.socket(fileno=int(sys.argv[1]))).loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
