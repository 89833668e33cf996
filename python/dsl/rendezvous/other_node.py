"""A node with a fixed place other than 0: finds node 0, and passes messages between it and the agent."""

from __future__ import annotations

import errno
import os
import socket
import time

from dsl import __version__
from dsl._record import replace
from dsl.errors import RendezvousError
from dsl.lists import LAST_PORT
from dsl.rendezvous import greeting
from dsl.rendezvous.delegate_messages import (
    MOST_BYTES,
    Changed,
    Finish,
    Finished,
    Meet,
    Met,
    NotMet,
    PeerFailed,
    Remark,
    answer_from_line,
    order_to_line,
)
from dsl.rendezvous.greeting import ALIVE, LONGEST_GREETING, Hello, hello_to_line
from dsl.rendezvous.leader import node_name
from dsl.rendezvous.wire import Pulse, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from dsl.rendezvous.delegate_messages import Answer, Order
    from dsl.rendezvous.terms import Terms
    from dsl.rendezvous.wire import Loop

REMIND_S = 2.0
"""After this time the user hears that node 0 is not there."""

ANSWER_S = 3.0
"""Time that node 0 has to answer a call."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Pause between calls, which doubles each time."""


class OtherNode:
    """This side of the connection to node 0."""

    def __init__(self, loop: Loop, terms: Terms, answer: Callable[[Answer], None]) -> None:
        """Begin to call. ``answer`` tells our own agent."""
        self._loop, self._terms, self._answer = loop, terms, answer
        self._wire: Wire | None = None
        self._call: Wire | None = None
        self._calling: socket.socket | None = None
        self._targets: list[tuple[int, tuple[str, ...]]] = []
        self._pause_s = FIRST_PAUSE_S
        self._trouble = f"nobody listens at {terms.meeting_point} yet"
        self._waits: Order | None = None
        self._early: list[Order] = []
        self._has_met = self._is_over = self._was_refused = False
        self._closed = ""
        self._head = node_name(0, "")
        self._head_host = terms.address
        self._warning = ""
        now_s = time.monotonic()
        loop.at("remind", now_s + REMIND_S, self._remind)
        loop.at("expire", now_s + terms.timeout_s, self._expire)
        Pulse(loop, ALIVE, self._here, every_s=terms.beat_s, silence_s=terms.silence_s)
        self._look_up()

    def hear(self, order: Order) -> None:
        """Carry out an order of our agent."""
        if isinstance(order, Meet | Finish):
            if self._closed:
                self._answer(NotMet("closed", self._closed) if isinstance(order, Meet) else Finished())
                return
            self._waits = order
            if self._was_refused:
                self._was_refused = False
                self._look_up()
        if self._wire is not None:
            self._wire.send(order_to_line(order))
        elif not isinstance(order, Meet | Finish):
            self._early.append(order)

    def end(self) -> None:
        """Our agent has gone."""
        self._is_over = True
        self._hang_up()
        for one in self._here():
            one.finish()

    @property
    def is_done(self) -> bool:
        """Whether the connection has ended."""
        return not self._here()

    def _here(self) -> list[Wire]:
        return [] if self._wire is None or self._wire.is_closed else [self._wire]

    # ---- finding node 0

    def _look_up(self) -> None:
        try:
            found = socket.getaddrinfo(self._terms.address, self._terms.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no name"
            self._fail(f"{self._terms.address} is not known here yet ({str(reason).lower()})")
            return
        self._targets = [(int(family), where) for family, _, _, _, where in found]  # type: ignore[misc]
        self._try_next()

    def _try_next(self) -> None:
        """Call at the next address of node 0."""
        if not self._targets:
            self._loop.at("call", time.monotonic() + self._pause_s, self._look_up)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return
        family, where = self._targets.pop(0)
        self._dial(family, where, self._knock)

    def _fail(self, trouble: str) -> None:
        self._trouble = trouble
        self._hang_up()
        if not self._is_over:
            self._try_next()

    def _hang_up(self) -> None:
        self._loop.cancel("call")
        if self._calling is not None:
            self._loop.unwatch(self._calling.fileno())
            self._calling.close()
            self._calling = None
        if self._call is not None:
            self._call.close()
            self._call = None

    def _dial(self, family: int, where: tuple[str, ...], then: Callable[[socket.socket], None]) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        self._calling = sock
        self._loop.at("call", time.monotonic() + ANSWER_S, lambda: self._fail(self._silent()))
        code = sock.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            self._fail(self._unreachable(code))
            return

        def connected(_mask: int) -> None:
            self._loop.unwatch(sock.fileno())
            self._calling = None
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code or _is_itself(sock):
                sock.close()
                self._fail(self._unreachable(code or errno.ECONNREFUSED))
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                then(sock)

        self._loop.watch(sock.fileno(), connected, read=False, write=True)

    def _silent(self) -> str:
        if self._calling is not None:
            return f"{self._terms.meeting_point} does not answer yet"
        return self._unknown()

    def _unknown(self) -> str:
        return f"who listens at {self._terms.meeting_point} is no dslrun that waits for nodes"

    def _unreachable(self, code: int) -> str:
        if code == errno.ECONNREFUSED:
            return f"nobody listens at {self._terms.meeting_point} yet"
        return f"{self._terms.meeting_point} cannot be reached yet ({os.strerror(code).lower()})"

    def _hello(self, token: str = "") -> bytes:
        terms = self._terms
        hello = Hello(__version__, terms.run_id, terms.node_count, terms.node_rank, terms.host, token)
        return hello_to_line(hello)

    def _knock(self, sock: socket.socket) -> None:
        """Send our `Hello` to the agreed port, and learn the inner port."""
        where = sock.getpeername()
        family = int(sock.family)

        def hear(line: bytes) -> None:
            found = greeting.read(line)
            port = found.get("port")
            if found.get("circle") == "no":
                self._refuse()
            elif found.get("circle") == "go" and type(port) is int and 0 < port <= LAST_PORT:
                self._hang_up()
                token = str(found.get("token"))
                place = (where[0], port, *where[2:])
                self._dial(family, place, lambda sock: self._sit_down(sock, token))
            else:
                self._fail(self._unknown())

        self._call = Wire(
            self._loop,
            sock,
            hear,
            lambda _why: self._fail(self._unknown()),
            longest=LONGEST_GREETING,
            most_queued=MOST_BYTES,
        )
        self._call.send(self._hello())

    def _sit_down(self, sock: socket.socket, token: str) -> None:
        """Take our place at the inner port."""
        self._call = wire = Wire(
            self._loop, sock, self._hear, self._lose, longest=MOST_BYTES, most_queued=MOST_BYTES
        )
        wire.send(self._hello(token))

    # ---- what node 0 says

    def _hear(self, line: bytes) -> None:
        if line.startswith(greeting.OWN):
            self._hear_greeting(greeting.read(line))
            return
        try:
            answer = answer_from_line(line)
        except RendezvousError:
            self._nonsense()
            return
        self._pass_on(answer)

    def _nonsense(self) -> None:
        wire = self._wire or self._call
        if wire is not None:
            wire.lose("it has sent something that no dslrun says")

    def _hear_greeting(self, found: Mapping[str, Any]) -> None:
        kind = found.get("circle")
        if kind == "no":
            self._refuse()
        elif kind == "seat" and self._call is not None:
            self._wire, self._call = self._call, None
            self._loop.cancel("call")
            self._loop.cancel("remind")
            self._head_host = str(found.get("host"))[: greeting.LONGEST_HOST]
            self._head = node_name(0, self._head_host)
            self._pause_s = FIRST_PAUSE_S
            early, self._early = self._early, []
            for order in [*([] if self._waits is None else [self._waits]), *early]:
                self._wire.send(order_to_line(order))

    def _pass_on(self, answer: Answer) -> None:
        if isinstance(answer, Met):
            if (answer.node_rank, len(answer.hosts)) != (self._terms.node_rank, self._terms.node_count):
                self._nonsense()
                return
            self._has_met, self._waits = True, None
            self._loop.cancel("expire")
            answer = replace(answer, address=self._terms.address)
        elif isinstance(answer, NotMet | Finished):
            self._waits = None
            self._is_over = self._is_over or isinstance(answer, Finished)
        elif isinstance(answer, Changed) and answer.closed:
            self._closed = self._warning or "a node has left the job"
        elif isinstance(answer, PeerFailed) and answer.final:
            self._closed = f"host {answer.host} has failed"
        elif isinstance(answer, Remark):
            self._warning = answer.text
        self._answer(answer)

    def _lose(self, why: str) -> None:
        """Handle the end of the connection to node 0."""
        if self._wire is None or not self._has_met:
            self._wire = None
            self._fail(f"the connection to {self._head} has ended")
            return
        text = f"{self._head} is lost: {why}"
        if not self._closed and not self._is_over:
            self._closed = text
            self._answer(Remark("warning", text))
            left = self._terms.node_count - 1
            self._answer(Changed(left, 0, closed=True, left=(self._head_host,)))
        waits, self._waits = self._waits, None
        if isinstance(waits, Meet):
            self._answer(NotMet("closed", self._closed or text))
        elif isinstance(waits, Finish):
            self._answer(Finished())

    # ---- what the user hears meanwhile

    def _refuse(self) -> None:
        """Report that node 0 refuses us. Node 0 does not say why, because the caller may be a stranger."""
        self._hang_up()
        self._was_refused = True
        self._waits = None
        self._loop.cancel("remind")
        place, where = self._terms.node_rank, self._terms.meeting_point
        text = f"node 0 at {where} refuses this node {place}, and says why in its own output"
        mend = "the version of dsl, --rdzv-id, --nnodes and --node-rank must fit together"
        self._answer(NotMet("settings", f"{text}: {mend}"))

    def _remind(self) -> None:
        command = self._terms.command_of(0)
        advice = f"; type there: {command}" if command else ""
        text = f"waiting for {self._head} for up to {self._terms.timeout_s:g} s: {self._trouble}"
        self._answer(Remark("info", text + advice))

    def _expire(self) -> None:
        if self._wire is None and not self._was_refused:
            self._hang_up()
            self._was_refused = True
            text = f"still waiting for {self._head} after {self._terms.timeout_s:g} s: {self._trouble}"
            self._answer(NotMet("timeout", text))


def _is_itself(sock: socket.socket) -> bool:
    """Whether a socket is connected to itself: the kernel had chosen the same port that it calls."""
    return bool(sock.getsockname() == sock.getpeername())
