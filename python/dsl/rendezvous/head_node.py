"""Node 0 of a job with fixed places: admits the other nodes, and passes on what the `Leader` says.

The nodes call at the agreed port. Node 0 closes it before workers start, because rank 0 listens there.
"""

from __future__ import annotations

import os
import resource
import socket
import time

from dsl import __version__
from dsl.errors import PortError, RendezvousError
from dsl.machine.network import is_loopback, is_own_address, own_addresses, resolve
from dsl.machine.ports import Ports
from dsl.rendezvous import greeting
from dsl.rendezvous.delegate_messages import Remark, answer_to_line, order_from_line
from dsl.rendezvous.door import Door, listen
from dsl.rendezvous.greeting import ALIVE, Hello, hello_from_line, objection, stranger
from dsl.rendezvous.leader import Leader, node_name
from dsl.rendezvous.static import choose_port
from dsl.rendezvous.wire import Pulse, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl.rendezvous.delegate_messages import Answer, Order
    from dsl.rendezvous.door import Caller
    from dsl.rendezvous.leader import Says
    from dsl.rendezvous.terms import Terms
    from dsl.rendezvous.wire import Loop

LONGEST_LINE = 1 << 16
"""Bytes of a line from another node."""

MOST_QUEUED = 1 << 23

MOST_WARNINGS = 8
"""How many rejected callers the user hears about."""

REMIND_S = 2.0
"""After this time the users hear which nodes the job waits for."""


class HeadNode:
    """The leader's side of all connections."""

    def __init__(self, loop: Loop, terms: Terms, answer: Callable[[Answer], None]) -> None:
        """Begin to listen. ``answer`` tells our own agent.

        Raises:
            PortError: the port is taken, or we cannot listen at it.
        """
        self._loop, self._terms, self._answer = loop, terms, answer
        self._ports = Ports()
        self._leader = Leader(terms.node_count, terms.address, self._port_of)
        self._leader.come(0, terms.host)
        self._wires: dict[int, Wire] = {}
        self._tokens: dict[int, str] = {}
        self._warnings: set[str] = set()
        self._ours = Hello(__version__, terms.run_id, terms.node_count, 0, terms.host)
        _raise_file_limit()
        choose_port(terms.port, shared=True, ports=self._ports)
        try:
            outer, inner = listen(terms.address, terms.port), listen(terms.address, 0)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise PortError(f"cannot listen at {terms.meeting_point}: {reason}") from None
        self._inner_ports = {one.family: int(one.getsockname()[1]) for one in inner}
        self._doors = [
            Door(loop, outer, terms.node_count, self._greet, self._reject),
            Door(loop, inner, terms.node_count, self._admit, self._reject),
        ]
        now_s = time.monotonic()
        loop.at("remind", now_s + REMIND_S, self._remind)
        loop.at("expire", now_s + terms.timeout_s, self._expire)
        Pulse(loop, ALIVE, self._here, every_s=terms.beat_s, silence_s=terms.silence_s)

    def hear(self, order: Order) -> None:
        """Carry out an order of our agent."""
        self._say(self._leader.hear(0, order))

    def end(self) -> None:
        """Our agent has gone: tell the other nodes, unless it had said goodbye, and end all connections."""
        self._say(self._leader.lose(0, "its launcher has ended"))
        self._close_doors()
        for wire in self._here():
            wire.finish()

    @property
    def is_done(self) -> bool:
        """Whether no connection is left."""
        return not self._here()

    def _here(self) -> list[Wire]:
        return [wire for wire in self._wires.values() if not wire.is_closed]

    def _say(self, says: Says) -> None:
        if self._leader.rounds:
            self._close_doors()
        for place, answer in says:
            if place == 0:
                self._answer(answer)
            elif place in self._wires:
                self._wires[place].send(answer_to_line(answer))

    def _close_doors(self) -> None:
        for door in self._doors:
            door.close()
        self._doors = []
        self._loop.cancel("remind")
        self._loop.cancel("expire")

    def _port_of(self, number: int) -> int:
        """The port of a round: the agreed port, unless another process has taken it since."""
        port = self._terms.port
        return port if number == 0 or self._ports.is_free(port) else self._ports.pick()

    def _greet(self, caller: Caller, line: bytes, _rest: bytes) -> None:
        """Answer a caller at the agreed port."""
        hello = self._welcome(caller, line)
        if hello is None:
            return
        # All callers for a place get the same token, so no caller can make the token of another caller
        # invalid.
        token = self._tokens.setdefault(hello.place, os.urandom(16).hex())
        caller.dismiss(greeting.write("go", port=self._inner_ports[caller.socket.family], token=token))

    def _admit(self, caller: Caller, line: bytes, rest: bytes) -> None:
        """Give a place to a caller at the inner port."""
        hello = self._welcome(caller, line)
        if hello is None:
            return
        place = hello.place
        if not hello.token or self._tokens.get(place) != hello.token:
            caller.door.drop(caller)
            return
        sock = caller.take()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = self._wires[place] = Wire(
            self._loop,
            sock,
            lambda line: self._hear(place, line),
            lambda why: self._say(self._leader.lose(place, why)),
            longest=LONGEST_LINE,
            most_queued=MOST_QUEUED,
        )
        self._leader.come(place, hello.host)
        wire.send(greeting.write("seat", host=self._terms.host))
        wire.feed(rest)

    def _welcome(self, caller: Caller, line: bytes) -> Hello | None:
        """The caller's `Hello`, if its place is free."""
        hello = hello_from_line(line)
        if hello is None:
            self._reject(caller, line)
            caller.door.drop(caller)
            return None
        why = objection(hello, self._ours)
        if not why and self._leader.is_taken(hello.place):
            why = f"its --node-rank is {hello.place}, and so is that of {self._leader.name(hello.place)}"
        if not why:
            return hello
        self._warn(f"{node_name(hello.place, hello.host)} at {caller.address} cannot take part: {why}")
        caller.dismiss(greeting.write("no"))
        return None

    def _reject(self, caller: Caller, data: bytes) -> None:
        where = f"port {caller.own_port}, where the nodes meet"
        self._warn(f"{caller.address} was sent away from {where}: it is {stranger(data)}")

    def _warn(self, text: str) -> None:
        if text not in self._warnings and len(self._warnings) < MOST_WARNINGS:
            self._warnings.add(text)
            self._answer(Remark("warning", text))

    def _hear(self, place: int, line: bytes) -> None:
        if line.startswith(greeting.OWN):
            return
        try:
            order = order_from_line(line)
        except RendezvousError:
            self._wires[place].lose("it has sent something that no dslrun says")
            return
        self._say(self._leader.hear(place, order))

    def _remind(self) -> None:
        if self._leader.missing() == [0]:
            return  # our own agent is not ready yet
        text, terms = self._leader.waiting(), self._terms
        here = f"this is node 0, {text}, at {terms.meeting_point} for up to {terms.timeout_s:g} s"
        self._answer(Remark("info", here + self._doubt() + self._advice()))
        for wire in self._here():
            wire.send(answer_to_line(Remark("info", text)))

    def _doubt(self) -> str:
        """A possible reason why no node comes."""
        if len(self._leader.seats) > 1:
            return ""
        address = self._terms.address
        found = resolve(address)
        if any(map(is_own_address, found)):
            return ""
        return f"; {address} is no address of this machine" if found else f"; {address} is not known here"

    def _advice(self) -> str:
        """What to type on the nodes that have not come."""
        absent = [place for place in self._leader.missing() if not self._leader.is_taken(place)]
        command = self._terms.command_of(absent[0]) if absent else ""
        if not command:
            return ""
        command += ", and so on" if len(absent) > 1 else ""
        address = self._terms.address
        if not is_loopback(address):
            return f"; type there: {command}"
        better = f"--master-addr {next(iter(own_addresses()), 'ADDRESS')}"
        return f"; type on this machine: {command}; other machines need {better} here and there"

    def _expire(self) -> None:
        self._say(self._leader.expire(self._terms.timeout_s))


def _raise_file_limit() -> None:
    """Raise the limit of open files: each node takes one connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        return
