"""Hubs talk to each other over real descriptors and real TCP."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from dsl.control.hub import Hub
from dsl.control.messages import Bye, Hello, Lost, Over, Said, Stop
from dsl.control.stream import FdStream, connect
from dsl.errors import ControlError
from dsl.model.job import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dsl.control.link import Link

KEY = bytes(range(32))
LONG_S = 20.0


def hello(place: int = 0) -> Hello:
    return Hello("1", place, "host", 1)


class Ends:
    """Two hubs, each with its end of a connection, and what the head shows."""

    def __init__(self, head_s: float = LONG_S, agent_s: float = LONG_S) -> None:
        self.shown, write_out = os.pipe()
        self.shown_err, write_err = os.pipe()
        self._console = (write_out, write_err)
        self.head = Hub(head_s, show=True, console=self._console)
        self.agent = Hub(agent_s)

    def by_descriptors(self) -> tuple[Link, Link]:
        """A pair of sockets, as between a head and its ssh."""
        mine, theirs = socket.socketpair()
        a, b = mine.detach(), theirs.detach()
        return self.head.add(FdStream(a, a), "node1"), self.agent.add(FdStream(b, b), "the head")

    def close(self) -> None:
        """End both."""
        self.agent.close(5)
        self.head.close(5)
        for fd in (self.shown, self.shown_err, *self._console):
            os.close(fd)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def until(
    hub: Hub, wanted: Callable[[list[tuple[Any, Any]]], bool], timeout_s: float = 10.0
) -> list[tuple[Any, Any]]:
    """All that a hub reads until it is what is wanted."""
    found: list[tuple[Any, Any]] = []
    deadline_s = time.monotonic() + timeout_s
    while not wanted(found):
        left_s = deadline_s - time.monotonic()
        assert left_s > 0, f"only {found}"
        if select.select([hub], [], [], left_s)[0]:
            found += hub.read()
    return found


def messages(hub: Hub, count: int) -> list[Any]:
    return [message for _, message in until(hub, lambda found: len(found) >= count)]


def bytes_of(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += os.read(fd, 1 << 20)
    return data


def test_messages_go_both_ways_in_order(ends: Ends) -> None:
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    ends.agent.start()
    on_agent.send(hello(3))
    for number in range(1000):
        on_agent.send(Said(Notice("info", str(number))))
    found = messages(ends.head, 1001)
    assert found == [hello(3), *[Said(Notice("info", str(number))) for number in range(1000)]]
    assert on_head.place == 3
    on_head.send(Stop(15, 2.5))
    assert until(ends.agent, bool) == [(on_agent, Stop(15, 2.5))]


def test_an_agent_talks_before_its_hub_is_started(ends: Ends) -> None:
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    on_agent.send_now(hello())
    assert messages(ends.head, 1) == [hello()]
    on_head.send(Stop(15, 1.0))
    on_head.send(Over())
    assert on_agent.receive(10) == Stop(15, 1.0)
    ends.agent.start()
    assert messages(ends.agent, 1) == [Over()]


def test_agents_connect_by_tcp_and_only_they_do(ends: Ends) -> None:
    port = ends.head.listen()
    ends.head.expect(None, KEY)
    ends.head.start()
    on_agent = ends.agent.add(connect([f"127.0.0.1:{port}"], KEY, 7, 10), "the head")
    on_agent.send_now(hello(7))
    ((on_head, message),) = until(ends.head, bool)
    assert (message, on_head.place) == (hello(7), 7)
    on_head.send(Over())
    assert on_agent.receive(10) == Over()
    assert on_head.is_local
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(100) == b""
        where = "{}:{}".format(*stranger.getsockname())
    text = f"a stranger at {where} connected to port {port} of this job and was refused"
    assert messages(ends.head, 1) == [Notice("warning", text)]
    on_agent.send_now(Bye(0))
    assert messages(ends.head, 1) == [Bye(0)]


def test_the_end_of_an_agent_is_told_and_nothing_before_it_is_lost(ends: Ends) -> None:
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    on_agent.send_now(hello())
    on_agent.send(Bye(3))
    ends.agent.close(5)
    found = until(ends.head, lambda found: len(found) == 3)
    assert found == [(on_head, hello()), (on_head, Bye(3)), (on_head, Lost("has closed the connection"))]


def test_silence_is_told(ends: Ends) -> None:
    ends.head = Hub(0.4, show=True, console=ends._console)
    _, on_agent = ends.by_descriptors()
    ends.head.start()
    on_agent.send_now(hello())
    assert messages(ends.head, 2) == [hello(), Lost("has not been heard for 0.4 s")]


def test_output_reaches_the_console_and_drain_waits_for_it(ends: Ends) -> None:
    _, on_agent = ends.by_descriptors()
    ends.head.start()
    ends.agent.start()
    on_agent.send(hello())
    out, write_out = os.pipe()
    err, write_err = os.pipe()
    ends.agent.relay(on_agent, out, err)
    os.write(write_out, b"one\ntwo\nunfinished")
    os.write(write_err, b"error\n")
    assert ends.agent.drain(10)
    assert bytes_of(ends.shown, 18) == b"one\ntwo\nunfinished"
    assert bytes_of(ends.shown_err, 6) == b"error\n"
    assert ends.head.drain(10)
    os.close(write_out)
    os.close(write_err)


def test_nobody_answers() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with pytest.raises(ControlError, match=f"127.0.0.1:{port} .Connection refused"):
        connect([f"127.0.0.1:{port}"], KEY, 0, 0.3)


def test_the_clock_is_measured(ends: Ends) -> None:
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    ends.agent.start()
    on_agent.send(hello())
    messages(ends.head, 1)
    deadline_s = time.monotonic() + 10
    while len(on_head.samples) < 4:
        assert time.monotonic() < deadline_s
        select.select([], [], [], 0.001)
    found = on_head.clock
    assert found is not None
    assert abs(found.offset_ns) <= found.error_ns < 50_000_000
