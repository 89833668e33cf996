"""Many clients at a port: each gets its answer, and none keeps another waiting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.kit.waiting import until

from dsl.machine.crowd import MOST_CLIENTS, close, serve

PATIENCE_S = 20.0
"""So long a test waits at most for what has to come."""


class Place:
    """A port that says ``hi ``, and answers a line with the same line, many times."""

    def __init__(self, within_s: float, times: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=MOST_CLIENTS)
        self._is_over = threading.Event()
        self.address = self._listener.getsockname()
        self.times = times

        def answer(asked: bytearray) -> bytes | None:
            if asked == b"no\n":
                raise OSError
            return bytes(asked) * self.times if asked.endswith(b"\n") else None

        def work() -> None:
            serve(self._listener, self._is_over, answer, within_s=within_s, most_bytes=100, greeting=b"hi ")

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def call(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE_S)

    def end(self) -> None:
        close(self._listener, self._is_over)
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def place() -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(within_s: float = 10 * PATIENCE_S, times: int = 1) -> Place:
        made.append(Place(within_s, times))
        return made[-1]

    yield make
    for one in made:
        one.end()


def everything(client: socket.socket) -> bytes:
    data = b""
    while more := client.recv(1 << 16):
        data += more
    return data


def test_a_client_is_greeted_and_gets_all_of_a_long_answer(place: Callable[..., Place]) -> None:
    found = place(times=1 << 20)
    with found.call() as client, found.call() as slow:
        slow.sendall(b"slow\n")
        for part in (b"li", b"ne\n"):
            client.sendall(part)
        assert everything(client) == b"hi " + b"line\n" * (1 << 20)
        assert everything(slow) == b"hi " + b"slow\n" * (1 << 20)


@pytest.mark.parametrize("data", [b"no\n", b"x" * 101])
def test_who_is_refused_gets_no_answer(place: Callable[..., Place], data: bytes) -> None:
    with place().call() as client:
        assert client.recv(3) == b"hi "
        client.sendall(data)
        assert everything(client) == b""


def test_silent_clients_are_many_and_the_oldest_has_to_go(place: Callable[..., Place]) -> None:
    """No deadline helps: it is longer than the test."""
    found = place()
    with ExitStack() as silent:
        clients = [silent.enter_context(found.call()) for _ in range(MOST_CLIENTS)]
        for one in clients:
            assert one.recv(3) == b"hi "
        for number in range(3):
            with found.call() as client:
                client.sendall(b"line\n")
                assert everything(client) == b"hi line\n"
            if number == 0:
                assert clients[0].recv(1) == b""
        clients[1].sendall(b"late\n")
        assert everything(clients[1]) == b"late\n"


@pytest.mark.parametrize("data", [b"", b"half a line"])
def test_who_is_not_done_in_time_has_to_go(place: Callable[..., Place], data: bytes) -> None:
    with place(within_s=0.2).call() as client:
        client.sendall(data)
        assert everything(client) == b"hi "


def test_who_takes_nothing_has_to_go(place: Callable[..., Place]) -> None:
    found = place(within_s=0.2, times=1 << 22)
    with found.call() as client:
        client.sendall(b"line\n")

        def is_left() -> bool:
            with open("/proc/net/tcp", encoding="ascii") as file:
                rows = [line.split() for line in file]
            own = f"0100007F:{found.address[1]:04X}"
            return not any(row[1] == own and row[3] == "01" for row in rows)

        until(is_left)


def test_no_thread_is_added(place: Callable[..., Place]) -> None:
    found = place()
    before = threading.active_count()
    with ExitStack() as clients:
        for _ in range(50):
            assert clients.enter_context(found.call()).recv(3) == b"hi "
        assert threading.active_count() == before


def test_it_ends_beside_clients_that_stay() -> None:
    found = Place(within_s=10 * PATIENCE_S, times=1)
    with found.call() as client:
        assert client.recv(3) == b"hi "
        found.end()
        assert client.recv(1) == b""
