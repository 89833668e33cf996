"""Random and mutated messages at every state of a head and of an agent: each costs its sender's link at most.

The head, its conductor, its hub and the door are those of the product, and so are the links; the streams are
the test's, and the clock. Two agents say what agents say. A third one does, too, and between that anything.
"""

from __future__ import annotations

import socket
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.events import a_report
from tests.support.launchers import make_agents

from dsl._record import fields
from dsl.agent import head as head_module
from dsl.agent import starters as starters_module
from dsl.agent.head import Head
from dsl.agent.part import Orders, decide
from dsl.agent.starters import Starters
from dsl.conductor.conductor import Conductor
from dsl.conductor.terms import reached_terms
from dsl.control import frames
from dsl.control.checks import assignment_problem, meeting_problem
from dsl.control.door import Door, _Caller
from dsl.control.frames import Decoder
from dsl.control.hub import Hub
from dsl.control.link import Link
from dsl.control.messages import (
    TO_AGENT,
    TO_HEAD,
    Assignment,
    Bye,
    Checked,
    Failing,
    Hello,
    Lost,
    Over,
    Running,
    Said,
    Stop,
    message_from_bytes,
    message_to_bytes,
)
from dsl.launchers.base import Start
from dsl.launchers.each import kept
from dsl.model.job import Host, Job, Meeting, MeetingPoint, Notice, Program
from dsl.model.outcome import Membership
from dsl.model.remote import Remote
from dsl.plan.flavours import DEEPSPEED, ELASTIC

EACH = 100
"""Hostile words of one example for a head, and for an agent: a million in all with 5000 examples."""

HOSTS = 3
HISTORY = Mock(awaits="")
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 255, 256, 65_536, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308),
    *("", "x", "\x1b]0;x\x07", "\ud800", "\0", "x" * 10_000, [], {}, [[]], [1], ["x"], {"Hello": {}}),
)


class Poll:
    """An epoll that nobody waits for."""

    def register(self, fd: int, mask: int) -> None:
        """Nothing."""

    def modify(self, fd: int, mask: int) -> None:
        """Nothing."""

    def unregister(self, fd: int) -> None:
        """Nothing."""


class Talk:
    """What an agent hears of its head."""

    deadline_s = None

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def fileno(self) -> int:
        """None is needed."""
        return -1

    def receive(self) -> list[object]:
        """What has come."""
        return [message for _, message in self._hub.read()]

    def send(self, message: object) -> None:
        """Nobody hears it."""


class Wire:
    """The stream of a link: what the other side has sent comes at the next reading."""

    is_local = False
    own_address = ""
    chunk = 0

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._socket = sock
        self._sent = Decoder()
        self.coming: bytes | None = None
        self.is_closed = False
        self.heard: list[object] = []

    def fds(self) -> tuple[int, int]:
        """Not for polling."""
        return id(self), id(self)

    def tune(self, silence_s: float) -> None:
        """Nothing."""

    def read(self) -> bytes | None:
        """What was sent."""
        data, self.coming = self.coming, None
        return data

    def write(self, data: memoryview) -> int:
        """Note the messages in it."""
        self.heard += [payload for kind, payload in self._sent.feed(bytes(data)) if kind == frames.MESSAGE]
        return len(data)

    def is_written(self) -> bool:
        """Whatever was taken."""
        return True

    def finish(self) -> bool:
        """The other side closes, too."""
        return False

    def close(self) -> None:
        """Let go."""
        self.is_closed = True
        if self._socket is not None:
            self._socket.close()

    disown = close


# Words, good and bad.


def plain_value(annotation: str, random: Random) -> Any:
    """Something that a field of this kind might be."""
    if annotation.startswith("tuple"):
        inner = "str" if "str" in annotation else "int"
        return [plain_value(inner, random) for _ in range(random.randrange(3))]
    if annotation == "str":
        return random.choice(("", "x", "a line\nanother", "\x1b[2J", "failed: x"))
    if annotation == "bool":
        return random.random() < 0.5
    if annotation == "Notice":
        return {"Notice": {"level": random.choice(("info", "warning", "debug")), "text": "x"}}
    return random.choice((0, 0, 1, 1, 2, 3, 15, 143, 29500))


def any_message(kinds: Any, random: Random) -> Any:
    """One whose fields fit, mostly."""
    kind = random.choice(list(kinds.values()))
    inner = {field: plain_value(text, random) for field, text in fields(kind).items()}
    for field in list(inner):
        if random.random() < 0.1:
            inner[field] = random.choice(NASTY)
        elif random.random() < 0.05:
            del inner[field]
    return {kind.__name__: inner}


def hostile(good: list[bytes], kinds: Any, random: Random) -> bytes:
    """Bytes of a frame or of something like it."""
    from json import dumps

    dice = random.random()
    if dice < 0.55:
        payload = dumps(any_message(kinds, random)).encode()
    elif dice < 0.8:
        payload = mutated(random.choice(good), random)
    elif dice < 0.85:
        depth = random.choice((10, 17, 700, 5000))
        payload = b'{"Said":' * depth + b"1" + b"}" * depth if dice < 0.82 else b"[" * depth + b"]" * depth
    else:
        kind = random.choice((frames.PING, frames.PONG, frames.OUTPUT, frames.CREDIT))
        size = random.choice((0, 1, 7, 8, 16, 32, 33, 2000))
        return frames.frame(
            kind, random.choice((b"\1", b"\2", b"\xff")) * min(size, 1) + random.randbytes(size)
        )
    data = frames.frame(frames.MESSAGE, payload)
    return mutated(data, random) if random.random() < 0.1 else data


def mutated(data: bytes, random: Random) -> bytes:
    """The same with a small change or a few."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(changed) + 1)
        what = random.randrange(4)
        if what == 0:
            changed[at : at + 1] = random.randbytes(1)
        elif what == 1:
            del changed[at : at + random.randrange(1, 6)]
        elif what == 2:
            changed[at:at] = random.choice((b"[", b"]", b"{", b"}", b'"', b",", b"-", b"1", b"null", b"\xff"))
        else:
            changed[at:at] = changed[at : at + random.randrange(40)]
    return bytes(changed)


# The head.


class Agent:
    """What an agent of a host says to what it is told."""

    def __init__(self, stage: Stage, place: int) -> None:
        self.place = place
        self.stage = stage
        ours, self._theirs = socket.socketpair()
        self.wire = Wire(ours)
        self.caller = stage.knock(ours, self.wire, place)
        self.said: list[bytes] = []
        self.attempt = 0
        self.has_ended = False
        self._queue: list[object] = [Hello("1", place, "h", 1)]

    @property
    def is_lost(self) -> bool:
        """Nobody hears it any more."""
        return self.wire.is_closed

    def go_on(self, random: Random) -> None:
        """Say the next word, if there is one."""
        for payload in self.wire.heard:
            assert isinstance(payload, bytes)
            self._hear(message_from_bytes(payload, TO_AGENT), random)
        self.wire.heard.clear()
        if self._queue:
            self.say(self._queue.pop(0))

    def _hear(self, message: object, random: Random) -> None:
        if isinstance(message, Assignment):
            self._queue.append(Checked(addresses=("10.0.0.1",), free_port=1, accelerator="cpu"))
        elif isinstance(message, Meeting):
            self.attempt = message.attempt
            self._queue.append(Running(self.attempt))
            if random.random() < 0.3:
                self._queue += [Failing(self.attempt, 0, 3, 10**18), Said(Notice("info", "x"))]
                self._queue.append(a_report(self.attempt, 3, rank=0, at_ms=10**12))
            elif random.random() < 0.5:
                self._queue.append(a_report(self.attempt, 0))
        elif isinstance(message, Stop):
            self._queue.append(a_report(self.attempt, 143, victims=(self.place,)))
        elif isinstance(message, Over):
            self._queue.append(Bye(0))
            self.has_ended = True

    def say(self, message: object) -> None:
        """Send a message."""
        payload = message_to_bytes(message)
        self.said.append(payload)
        self.send(frames.frame(frames.MESSAGE, payload))

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.wire.coming = data
        self.stage.bring(self)

    def close(self) -> None:
        """Go."""
        self._theirs.close()
        self.wire.close()


class Stage:
    """A head, its hub and its door, without threads."""

    def __init__(self, random: Random, *, is_elastic: bool) -> None:
        job = Job(
            flavour=ELASTIC if is_elastic else DEEPSPEED,
            program=Program("script", "train.py"),
            meeting=MeetingPoint("static", "10.0.0.1", 29501),
            hosts=tuple(Host(f"n{rank}", (0,)) for rank in range(HOSTS)),
            node_count=HOSTS,
            max_restarts=random.choice((0, 3)),
            log_level="critical",
        )
        self.now_s = 1000.0
        self.hub = Hub(15.0, show=True)
        self.server = self.hub._server
        self.server._epoll = Poll()  # type: ignore[assignment]
        self.hub.listen()
        door = self.server.door
        assert door is not None
        self.door: Door = door
        assignment = Assignment("1", job, 0)
        self.conductor: Conductor
        if is_elastic:
            remote = Remote("pdsh", least_nodes=1, most_nodes=HOSTS, wait_s=600.0)
            self.conductor = Conductor(reached_terms(job, remote, assignment), self.now_s)
            starts = [Start(argv=("pdsh",), node_rank=rank) for rank in range(HOSTS)]
            start = kept(starts, make_agents({}))
        else:
            self.conductor = Conductor(reached_terms(job, Remote("pdsh"), assignment), self.now_s)
            labels = tuple((f"n{rank}", rank) for rank in range(HOSTS))
            start = Start(argv=("pdsh",), labels=labels)
        self.starters = Starters(job, [start], range(HOSTS), {})
        self.head = Head(job, self.conductor, self.starters, self.hub)
        self.why_lost: list[str] = []
        drop = self.server._drop

        def note(link: Link, reason: str, *, is_silent: bool = False) -> None:
            self.why_lost.append(reason)
            drop(link, reason, is_silent=is_silent)

        self.server._drop = note  # type: ignore[method-assign]

    def knock(self, sock: socket.socket, wire: Wire, place: int) -> _Caller:
        """Connect, up to the first message behind the handshake."""
        caller = _Caller(sock, "10.0.0.9:1", Mock(keyed=None, port=1), self.now_s)
        caller.place, caller.stream = place, wire  # type: ignore[assignment]
        self.door._callers[caller.fd] = self.door._answered[caller.fd] = caller
        return caller

    def bring(self, agent: Agent) -> None:
        """Let the hub read what an agent has sent, and the head do what follows."""
        link = next((one for one in self.server.links.values() if one.stream is agent.wire), None)
        if link is not None:
            self.server._ready(link, 1)
        elif self.door._callers.get(agent.caller.fd) is agent.caller:
            self.door._read(agent.caller, 1)
        self.turn()

    def turn(self) -> None:
        """What all threads do when something has come."""
        self.head.read()
        if self.server._is_rung:
            self.server._hear_bell(1)
        shown = self.hub._console
        assert shown is not None
        for piece in list(shown._queue):
            if len(piece) == 4:
                self.hub._taken(piece[0], len(piece[2]))
        shown._queue.clear()
        shown._unshown = 0

    def close(self) -> None:
        """Let go of all descriptors."""
        self.hub.disown()
        self.starters.disown()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of a head."""
    time = SimpleNamespace(now_s=1000.0)
    time.monotonic = lambda: time.now_s
    for module in (head_module, starters_module):
        monkeypatch.setattr(module, "time", time)
    return time


def torment_a_head(random: Random, clock: SimpleNamespace, count: int, *, is_elastic: bool) -> None:
    """So many hostile words to a head, over jobs as they come. AssertionError: another link is lost."""
    left = count
    while left > 0:
        clock.now_s = 1000.0
        stage = Stage(random, is_elastic=is_elastic)
        bad_place = random.randrange(HOSTS)
        agents = [Agent(stage, place) for place in range(HOSTS) if place != bad_place]
        bad = Agent(stage, bad_place)
        everybody = [*agents, bad]
        try:
            for _ in range(random.choice((10, 60, 200))):
                agent = random.choice(everybody)
                if agent is not bad or random.random() < 0.4:
                    agent.go_on(random)
                else:
                    good = bad.said or [message_to_bytes(Hello("1", bad.place, "h", 1))]
                    bad.send(hostile(good, TO_HEAD, random))
                    left -= 1
                if bad.is_lost:
                    bad.close()
                    taken = [one.place for one in agents if one.said]  # whoever is there has the key
                    bad = everybody[-1] = Agent(stage, random.choice((bad_place, bad_place, 9, *taken)))
                if random.random() < 0.05:
                    clock.now_s += random.choice((0.1, 2.0, 12.0, 70.0))
                    stage.turn()
                for one in agents:
                    # The head may have ended the job, or not wait for a host for ever.
                    assert (
                        not one.is_lost
                        or one.has_ended
                        or stage.conductor.code is not None
                        or (is_elastic and clock.now_s > 1060)
                    ), stage.why_lost
                if stage.conductor.is_done:
                    break
            assert not [one for one in stage.why_lost if "cannot be dealt with" in one], stage.why_lost
        finally:
            for one in everybody:
                one.close()
            stage.close()


# The agent.


def torment_an_agent(random: Random, count: int) -> None:
    """So many hostile words to an agent, at each of its steps. Its link is lost, or it goes on."""
    hosts = tuple(Host(f"n{rank}", (0, 1)) for rank in range(HOSTS))
    job = Job(DEEPSPEED, Program("script", "t"), MeetingPoint("static", "a", 1), hosts=hosts)
    meeting = Meeting(0, 1, (2, 2, 2), "10.0.0.1", 29500)
    good = [message_to_bytes(one) for one in (Assignment("1", job, 1), meeting, Stop(15, 3.0), Over())]
    hub = Hub(15.0)
    hub._server._epoll = Poll()  # type: ignore[assignment]
    talk = Talk(hub)
    left = count
    while left > 0:
        wire = Wire()
        link = Link(hub, wire, "the head")
        hub._server.begin(link)
        orders = Orders(talk, meeting) if random.random() < 0.7 else None
        while left > 0 and not link.is_lost:
            if random.random() < 0.5:
                left -= 1
                wire.coming = hostile(good, TO_AGENT, random)
            else:
                wire.coming = frames.frame(frames.MESSAGE, random.choice(good))
            hub._server._ready(link, 1)
            if orders is None:
                orders = _begun(talk, job)
            else:
                _go_on(orders, job)
        lost = [message for message in talk.receive() if isinstance(message, Lost)]
        assert not [one for one in lost if "cannot be dealt with" in one.reason], lost


def _begun(talk: Talk, job: Job) -> Orders | None:
    """What an agent makes of the first words of its head."""
    for message in talk.receive():
        if isinstance(message, Assignment):
            assignment_problem(message)
        elif isinstance(message, Meeting) and not meeting_problem(message, job):
            return Orders(talk, message)
    return None


def _go_on(orders: Orders, job: Job) -> None:
    """While its workers run, and between two attempts."""
    for event in orders.read():
        decide(HISTORY, event, Membership(HOSTS))
    meeting_problem(orders.meeting, job)


@pytest.mark.parametrize("is_elastic", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**64 - 1))
def test_whatever_an_agent_sends_costs_its_own_link_alone(
    clock: SimpleNamespace, seed: int, *, is_elastic: bool
) -> None:
    torment_a_head(Random(seed), clock, EACH // 2, is_elastic=is_elastic)


@given(seed=st.integers(0, 2**64 - 1))
def test_whatever_a_head_sends_costs_its_link_alone(seed: int) -> None:
    torment_an_agent(Random(seed), EACH)
