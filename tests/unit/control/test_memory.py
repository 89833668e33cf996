"""What peers make a head keep is bounded, however many there are and whatever they do not read."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.links import hello

from dsl.control import console, frames, mailbox
from dsl.control.console import Console
from dsl.control.frames import Damaged, Decoder
from dsl.control.hub import FIRST_WINDOW, LEAST_WINDOW, OUTPUT_BYTES, Hub
from dsl.control.link import Link
from dsl.control.messages import Hello, Running, message_to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY = 10_000
HELLO = frames.frame(frames.MESSAGE, message_to_bytes(hello()))


class Wire:
    """The stream of a link, played by the test: it takes what there is room for, and brings nothing."""

    is_local = False
    own_address = ""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.written = bytearray()

    def fds(self) -> tuple[int, int]:
        """None is needed."""
        return -1, -1

    def tune(self, silence_s: float) -> None:
        """Nothing."""

    def read(self) -> bytes | None:
        """Nothing yet."""
        return None

    def write(self, data: memoryview) -> int:
        """Take as much as there is room for."""
        count = min(self.room - len(self.written), len(data))
        self.written += data[:count]
        return count

    def is_written(self) -> bool:
        """Whatever was taken."""
        return True

    def finish(self) -> bool:
        """Nobody is there."""
        return False

    def close(self) -> None:
        """Nothing."""

    disown = close


@pytest.fixture
def head() -> Iterator[Hub]:
    """A head whose console nobody reads: its threads are not started."""
    hub = Hub(20.0, show=True)
    yield hub
    hub.disown()


def arrive(link: Link, *sent: bytes) -> None:
    """Let frames come from an agent."""
    link.handle(Decoder().feed(b"".join(sent)))


def kinds(data: bytes) -> list[int]:
    return [kind for kind, _ in Decoder().feed(data)]


def test_a_peer_that_reads_nothing_is_owed_one_answer_however_often_it_asks(head: Hub) -> None:
    wire = Wire()
    link = Link(head, wire, "n")
    arrive(link, HELLO)
    for at in range(MANY):
        arrive(link, frames.ping(at, at) * 10)
        link.flush()
    wire.room = 1 << 30
    link.flush()
    assert sorted(kinds(bytes(wire.written))) == [frames.PING, frames.PONG, frames.PONG, frames.CREDIT]
    assert link.is_idle


def test_answers_that_were_not_asked_for_make_nobody_send_much(head: Hub) -> None:
    wire = Wire()
    link = Link(head, wire, "n")
    arrive(link, HELLO)
    now_ns = time.monotonic_ns()
    for _ in range(MANY):
        arrive(link, frames.pong(frames.ping(now_ns, time.time_ns())[5:], time.time_ns(), time.time_ns()))
    wire.room = 1 << 30
    link.flush()
    assert len(wire.written) < 200


def test_leave_that_an_agent_does_not_read_is_told_in_one_frame(head: Hub) -> None:
    wire = Wire()
    link = Link(head, wire, "n")
    arrive(link, HELLO)
    piece = frames.output(1, b"x" * (8 << 10))
    for _ in range(MANY):
        arrive(link, piece)
        head._taken(link, 8 << 10)
    wire.room = 1 << 30
    link.flush()
    assert sorted(kinds(bytes(wire.written))) == [frames.PING, frames.CREDIT]


@pytest.mark.parametrize("count", [1, 2, 100, MANY])
def test_the_output_of_all_agents_takes_no_more_than_its_bound(head: Hub, count: int) -> None:
    """And they come to send so much: the console has shown something of each, and then takes nothing."""
    head.agents = count
    links = [Link(head, Wire(1 << 20), "n") for _ in range(count)]
    for link in links:
        arrive(link, HELLO)
        assert LEAST_WINDOW <= link.leave <= FIRST_WINDOW
    for _ in range(3):
        for link in links:
            size = link.leave - frames.OUTPUT_COST
            arrive(link, frames.output(1, b"x" * size))
            head._taken(link, size)
    held = sum(link.outstanding for link in links)
    assert 0.9 * OUTPUT_BYTES < held <= OUTPUT_BYTES
    assert all(link.leave == link.outstanding for link in links)
    for link in links:
        head._gone(link)
    assert head._granted == 0


def test_agents_of_which_nobody_has_told_are_no_way_around_the_bound(head: Hub) -> None:
    links = [Link(head, Wire(1 << 20), "n") for _ in range(MANY)]
    for link in links:
        arrive(link, HELLO)
    assert sum(link.outstanding for link in links) <= OUTPUT_BYTES + MANY * LEAST_WINDOW


def test_output_that_is_not_shown_counts_though_its_agent_has_gone_and_come_again(head: Hub) -> None:
    head.agents = 1
    for _ in range(MANY):
        link = Link(head, Wire(1 << 20), "n")
        arrive(link, HELLO)
        arrive(link, frames.output(1, b"x" * (link.leave - frames.OUTPUT_COST)))
        head._gone(link)
    assert head._granted <= OUTPUT_BYTES + MANY * LEAST_WINDOW


def test_output_in_tiny_pieces_costs_what_it_takes_to_keep_it(head: Hub) -> None:
    head.agents = 1
    link = Link(head, Wire(1 << 20), "n")
    arrive(link, HELLO)
    many = FIRST_WINDOW // frames.OUTPUT_COST
    arrive(link, *[frames.output(1, b"")] * many)
    with pytest.raises(Damaged, match="more output than it has leave for"):
        arrive(link, frames.output(1, b""))


def test_messages_that_nobody_reads_are_bounded_over_all_links() -> None:
    head = Hub(20.0)
    box = head._mailbox
    links = [Link(head, Wire(), "n") for _ in range(1000)]
    kept = 0
    for _ in range(1000):
        for link in links:
            if not link.is_paused:
                box.put(link, Running(0), 100_000)
                kept += 100_000
    most = mailbox.UNREAD_BYTES_OF_ALL + len(links) * 200_000
    assert mailbox.UNREAD_BYTES_OF_ALL <= kept <= most
    messages, resumed = box.take()
    assert len(messages) * 100_000 == kept
    assert set(resumed) == set(links)


def test_a_long_first_message_does_not_leave_its_link_deaf() -> None:
    agent = Hub(20.0)
    link = Link(agent, Wire(), "the head")
    agent.deliver(link, Running(0), 2 * mailbox.UNREAD_BYTES)
    assert link.is_paused
    assert agent.first_message_of(link) == Running(0)
    assert not link.is_paused


def test_lines_that_many_agents_have_begun_are_kept_up_to_a_bound() -> None:
    file = os.memfd_create("console")
    shown = Console(file, file, lambda _who, _count: None, lambda _notice: None)
    for who in range(200):
        shown.put(who, 1, b"%d" % who + b"x" * 60_000, unfinished=False)
    for who in range(200):
        shown.put(who, 1, b"end\n", unfinished=False)
    shown.thread.start()
    assert shown.drain(20)
    target = shown._targets[1]
    shown.close()
    shown.thread.join(10)
    size = os.fstat(file).st_size
    os.close(file)
    again = console.LONGEST_BEGUN_OF_ALL // 60_000 * 60_000
    assert 200 * 60_000 + again <= size < 200 * 60_100 + again + 60_100
    assert target._begun_bytes == 0
    assert not target._begun


def test_a_greeting_is_all_that_a_link_keeps_of_an_agent(head: Hub) -> None:
    link = Link(head, Wire(), "n")
    arrive(link, HELLO)
    ((found, message),) = head.read()
    assert (found, type(message)) == (link, Hello)
    assert link.unread_bytes == 0
