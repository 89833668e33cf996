"""Random and mutated messages at every state of a head and of an agent: each costs its sender's link at most.

The head, its conductor, its hub and the links are those of the product; the connections behind them are the
test's, and the clock. Two agents say what agents say. A third one does, too, and between that anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.conducting import a_job, reached
from tests.support.events import a_report

from dsl._record import fields, replace
from dsl.agent import head as head_module
from dsl.agent import starters as starters_module
from dsl.agent.head import Head
from dsl.agent.member import Member
from dsl.agent.preflight import assignment_problem, meeting_problem
from dsl.agent.starters import Starters
from dsl.conductor.conductor import Conductor
from dsl.control.hub import Hub
from dsl.control.messages import (
    TO_AGENT,
    TO_HEAD,
    Assignment,
    Bye,
    Checked,
    Failing,
    Hello,
    Over,
    Said,
    Stop,
)
from dsl.launchers.base import Start
from dsl.model.codec import from_line, to_line
from dsl.model.job import Job, Meeting, Notice
from dsl.plan.remote import Remote

EACH = 100
"""Hostile words of one example for a head, and for an agent: a million in all with 5000 examples."""

HOSTS = 3
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 255, 256, 65_536, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308),
    *("", "x", "\x1b]0;x\x07", "\ud800", "\0", "x" * 10_000, [], {}, [[]], [1], ["x"], {"Hello": {}}),
)


class Talk:
    """What an agent hears of its head."""

    deadline_s = None

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def fileno(self) -> int:
        return -1

    def receive(self) -> list[object]:
        return [message for _, message in self._hub.read()]

    def send(self, message: object) -> None:
        """Nobody hears it."""

    def hear(self, event: object) -> None:
        """It is no message."""


class Wire:
    """A link as `Hub` knows it from the extension, without a connection."""

    name, own_address = "n", ""

    def __init__(self, core: Core, place: int, port: int) -> None:
        self.id, self.place, self.port = id(self), place, port
        self.is_lost = self.has_spoken = False
        self.heard: list[bytes] = []
        self._core = core

    def send(self, message: bytes) -> None:
        self.heard.append(message)

    def say(self, message: bytes) -> None:
        if not self.has_spoken and self.place in [one.place for one in self._core.wires if not one.is_lost]:
            self.is_lost = True  # the place is taken
        elif not self.is_lost:
            self.has_spoken = True
            self._core.wires = [*{*self._core.wires, self}]
            self._core.come = [*self._core.come, (self, "message", message)]

    def close(self) -> None:
        self.end("")

    def drop(self, is_stranger: bool) -> None:  # noqa: FBT001  as in the extension
        self.end("")

    def end(self, kind: str) -> None:
        """End it; with a kind, the other side has done so."""
        if not self.is_lost:
            self.is_lost = True
            self._core.come = [*self._core.come, (self, kind, "has closed the connection")]

    def take_samples(self) -> list[tuple[int, ...]]:
        return []


class Core(Hub):
    """A hub without threads and connections."""

    wires: Sequence[Wire] = ()
    come: Sequence[tuple[Any, str, bytes | str | None]] = ()

    def take(self) -> list[tuple[Any, str, bytes | str | None]]:
        """What has come."""
        come, self.come = self.come, ()
        return [*come]

    def drain(self, timeout_s: float | None = None) -> bool:
        """All is shown."""
        return True


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
    """The bytes of a message or of something like it."""
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
        payload = random.randbytes(random.choice((0, 1, 7, 8, 16, 32, 33, 2000)))
    return mutated(payload, random) if random.random() < 0.1 else payload


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
        self.wire = Wire(stage.core, place, 29500)
        self.said: list[bytes] = []
        self.attempt = 0
        self.has_ended = False
        self._queue: list[object] = [Hello("1", place, "h", 1)]

    @property
    def is_lost(self) -> bool:
        return self.wire.is_lost

    def go_on(self, random: Random) -> None:
        for payload in self.wire.heard:
            self._hear(from_line(payload, TO_AGENT), random)
        self.wire.heard.clear()
        if self._queue:
            self.say(self._queue.pop(0))

    def _hear(self, message: object, random: Random) -> None:
        if isinstance(message, Assignment):
            self._queue.append(Checked(addresses=("10.0.0.1",), free_port=1, accelerator="cpu"))
        elif isinstance(message, Meeting):
            self.attempt = message.attempt
            if random.random() < 0.3:
                self._queue += [Failing(self.attempt, 0, 3, 10**18), Said(Notice("info", "x"))]
                self._queue.append(a_report(self.attempt, 3, rank=0, at_ms=10**12))
            elif random.random() < 0.5:
                self._queue.append(a_report(self.attempt, 0))
        elif isinstance(message, Stop):
            self._queue.append(a_report(self.attempt, 143, victims=(self.place,)))
        elif isinstance(message, Over):
            self._queue.append(Bye())
            self.has_ended = True

    def say(self, message: object) -> None:
        """Send a message."""
        payload = to_line(message)
        self.said.append(payload)
        self.send(payload)

    def send(self, data: bytes) -> None:
        self.wire.say(data)
        self.stage.head.read()

    def close(self) -> None:
        self.wire.end("closed")
        self.stage.head.read()


class Stage:
    """A head and its hub, without threads."""

    def __init__(self, random: Random, *, is_elastic: bool) -> None:
        job = a_job(*[1] * HOSTS, restarts=random.choice((0, 3)), is_elastic=is_elastic)
        job = replace(job, log_level="critical")
        self.hub = self.core = Core(15.0, show=True)
        if is_elastic:
            remote = Remote("pdsh", least_nodes=1, most_nodes=HOSTS, wait_s=600.0)
            starts = [Start(argv=("pdsh",), node_rank=rank) for rank in range(HOSTS)]
        else:
            remote = Remote("pdsh")
            labels = tuple((f"n{rank}", rank) for rank in range(HOSTS))
            starts = [Start(argv=("pdsh",), labels=labels)]
        self.conductor = Conductor(reached(job, remote), 1000.0)
        self.starters = Starters(job, starts, range(HOSTS), {}, at_once=64)
        self.starters.plan(0)
        self.starters.supervisor = Mock(add=Mock(side_effect=count(HOSTS)))
        self.head = Head(self.conductor, self.starters, self.hub)

    def close(self) -> None:
        self.starters.disown()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
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
                    good = bad.said or [to_line(Hello("1", bad.place, "h", 1))]
                    bad.send(hostile(good, TO_HEAD, random))
                    left -= 1
                if bad.is_lost:
                    bad.close()
                    taken = [one.place for one in agents if one.said]  # whoever is there has the key
                    bad = everybody[-1] = Agent(stage, random.choice((bad_place, bad_place, 9, *taken)))
                if random.random() < 0.05:
                    clock.now_s += random.choice((0.1, 2.0, 12.0, 70.0))
                    stage.head.read()
                for one in agents:
                    # The head may have ended the job, or not wait for a host for ever.
                    assert (
                        not one.is_lost
                        or one.has_ended
                        or stage.conductor.code is not None
                        or (is_elastic and clock.now_s > 1060)
                    )
                if stage.conductor.roster.is_done:
                    break
        finally:
            for one in everybody:
                one.close()
            stage.close()


# The agent.


def torment_an_agent(random: Random, count: int) -> None:
    """So many hostile words to an agent, at each of its steps. Its link is lost, or it goes on."""
    job = a_job(*[2] * HOSTS)
    meeting = Meeting(0, 1, (2, 2, 2), "10.0.0.1", 29500)
    good = [to_line(one) for one in (Assignment("1", job, 1), meeting, Stop(15, 3.0), Over())]
    hub = core = Core(15.0)
    talk = Talk(hub)
    left = count
    while left > 0:
        wire = Wire(core, -1, 0)
        member = Member(talk, meeting) if random.random() < 0.7 else None
        while left > 0 and not wire.is_lost:
            if random.random() < 0.5:
                left -= 1
                wire.say(hostile(good, TO_AGENT, random))
            else:
                wire.say(random.choice(good))
            if member is None:
                member = _begun(talk, job)
            else:
                for event in member.read():
                    member.decide(event, None)
                meeting_problem(member.meeting, job.hosts[1])
        wire.end("closed")
        talk.receive()


def _begun(talk: Talk, job: Job) -> Member | None:
    """What an agent makes of the first words of its head."""
    for message in talk.receive():
        if isinstance(message, Assignment):
            assignment_problem(message)
        elif isinstance(message, Meeting) and not meeting_problem(message, job.hosts[1]):
            return Member(talk, message)
    return None


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
