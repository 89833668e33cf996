"""The port of a head: agents get in, strangers do not, and the job goes on."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from kit.waiting import until as is_true
from tests.support.links import KEY, Ends, hello, messages, until

from dsl._core import SecureSession
from dsl.control import door, frames
from dsl.control.messages import Bye, Lost, Over, Refused, message_to_bytes
from dsl.control.stream import LENGTH, MAGIC, PREAMBLE, connect
from dsl.errors import ControlError, RefusedLinkError
from dsl.model.job import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dsl.control.link import Link


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def knock(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(10)
    return sock


def is_refused(sock: socket.socket) -> bool:
    """Whether the head closes the connection."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def message(session: SecureSession, data: bytes) -> bytes:
    sealed = session.seal(data)
    return LENGTH.pack(len(sealed)) + sealed


def speak(sock: socket.socket, place: int, key: bytes = KEY) -> tuple[SecureSession, bytes]:
    """The handshake of an agent; returns the session and the first bytes that were sent."""
    session = SecureSession(key, initiator=True)
    first = session.handshake()
    opening = PREAMBLE.pack(MAGIC, place) + LENGTH.pack(len(first)) + first
    sock.sendall(opening)
    answer = sock.recv(50, socket.MSG_WAITALL)
    session.read_handshake(answer[2:])
    return session, opening


def is_unharmed(ends: Ends, on_head: Link, on_agent: Link) -> bool:
    """Whether head and agent still talk."""
    on_head.send(Over())
    on_agent.send_now(Bye(1))
    return on_agent.receive(10) == Over() and messages(ends.head, 1) == [Bye(1)]


def first_warning(ends: Ends, sock: socket.socket) -> Notice:
    address = "{}:{}".format(*sock.getsockname())
    return Notice(
        "warning",
        f"a stranger at {address} connected to port {ends.head.listen()} of this job and was refused",
    )


def test_agents_connect_at_both_kinds_of_address(ends: Ends) -> None:
    on_head, on_agent = ends.by_tcp(place=7)
    assert on_head.place == 7
    assert on_head.is_local
    assert (on_head.own_address, on_agent.own_address) == ("127.0.0.1", "127.0.0.1")
    assert is_unharmed(ends, on_head, on_agent)
    ends.head.expect(8, KEY)
    other = ends.another_agent().add(connect([f"[::1]:{ends.head.listen()}"], KEY, 8, 10), "the head")
    other.send_now(hello(8))
    ((link, found),) = until(ends.head, bool)
    assert (link.place, found) == (8, hello(8))
    assert link.name.startswith("[::1]:")


def test_one_key_may_be_for_all_places_and_that_of_a_place_comes_before_it(ends: Ends) -> None:
    port = ends.head.listen()
    ends.head.expect(None, KEY)
    ends.head.expect(1, bytes(32))
    ends.head.start()
    with pytest.raises(ControlError, match="closed the connection"):
        connect([f"127.0.0.1:{port}"], KEY, 1, 0.2)
    messages(ends.head, 1)
    for place, key in ((1, bytes(32)), (2, KEY)):
        ends.another_agent().add(connect([f"127.0.0.1:{port}"], key, place, 10), "the head").send_now(
            hello(place)
        )
        assert messages(ends.head, 1) == [hello(place)]


GARBAGE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(200),
    "zeros": bytes(1000),
    "a half preamble": b"",
    "a wrong handshake": PREAMBLE.pack(MAGIC, 7) + LENGTH.pack(48) + b"x" * 48,
    "a wrong length": PREAMBLE.pack(MAGIC, 7) + LENGTH.pack(65535) + b"x" * 60000,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_in_one_line_and_the_job_unharmed(ends: Ends, garbage: bytes) -> None:
    on_head, on_agent = ends.by_tcp(place=7)
    with knock(ends.head.listen()) as sock, knock(ends.head.listen()) as again:
        sock.sendall(garbage)
        with suppress(OSError):  # it is refused already
            sock.shutdown(socket.SHUT_WR)
        assert is_refused(sock)
        again.sendall(b"garbage")
        assert is_refused(again)
        assert messages(ends.head, 1) == [first_warning(ends, sock)]
    assert is_unharmed(ends, on_head, on_agent)
    assert ends.head.strangers == 2


def test_who_replays_what_an_agent_has_sent_is_refused(ends: Ends) -> None:
    port = ends.head.listen()
    ends.head.expect(7, KEY)
    ends.head.start()
    with knock(port) as agent, knock(port) as stranger:
        session, recorded = speak(agent, 7)
        recorded += message(session, frames.frame(frames.MESSAGE, message_to_bytes(hello(7))))
        agent.sendall(recorded[58:])
        assert messages(ends.head, 1) == [hello(7)]
        stranger.sendall(recorded)
        assert is_refused(stranger)
        assert messages(ends.head, 1) == [first_warning(ends, stranger)]
        agent.sendall(message(session, frames.frame(frames.MESSAGE, message_to_bytes(Bye(0)))))
        assert messages(ends.head, 1) == [Bye(0)]
        # The same message once more, on the agent's own connection.
        agent.sendall(recorded[58:])
        assert messages(ends.head, 1) == [
            Lost("has sent something that was not made with the key of this job")
        ]


BAD_STARTS: dict[str, bytes] = {
    "another place": frames.frame(frames.MESSAGE, message_to_bytes(hello(8))),
    "another message": frames.frame(frames.MESSAGE, message_to_bytes(Bye(0))),
    "a heartbeat": frames.ping(1, 2),
    "too long": frames.frame(frames.MESSAGE, bytes(65537))[:100],
    "no message": frames.frame(frames.MESSAGE, b"[1"),
    "nested 700 deep": frames.frame(frames.MESSAGE, b'{"Hello":{"place":' + b"[" * 700 + b"]" * 700 + b"}}"),
    "a place that is a text": frames.frame(
        frames.MESSAGE, message_to_bytes(hello(7)).replace(b'"place":7', b'"place":"7"')
    ),
    "a place that is a truth": frames.frame(
        frames.MESSAGE, message_to_bytes(hello(7)).replace(b'"place":7', b'"place":true')
    ),
}


@pytest.mark.parametrize("start", BAD_STARTS.values(), ids=BAD_STARTS)
def test_an_agent_says_first_who_it_is_and_no_other_than_its_key_is_for(ends: Ends, start: bytes) -> None:
    on_head, on_agent = ends.by_tcp(place=7)
    with knock(ends.head.listen()) as sock:
        session, _ = speak(sock, 7)
        sock.sendall(message(session, start))
        assert is_refused(sock)
        assert messages(ends.head, 1) == [first_warning(ends, sock)]
    assert is_unharmed(ends, on_head, on_agent)


def test_a_second_agent_of_a_place_is_refused_and_told(ends: Ends) -> None:
    on_head, on_agent = ends.by_tcp(place=7)
    second = ends.another_agent().add(connect([f"127.0.0.1:{ends.head.listen()}"], KEY, 7, 10), "the head")
    second.send_now(hello(7))
    assert second.receive(10) == Refused("another agent of this place is connected")
    (notice,) = messages(ends.head, 1)
    assert notice.text.startswith("a second agent for place 7 has connected from 127.0.0.1:")
    assert is_unharmed(ends, on_head, on_agent)


def test_a_flood_of_connections_is_bounded_and_an_agent_gets_through(ends: Ends) -> None:
    on_head, on_agent = ends.by_tcp(place=7)
    ends.head.expect(8, KEY)
    port = ends.head.listen()
    with ExitStack() as stack:
        flood = [stack.enter_context(knock(port)) for _ in range(300)]
        agent = ends.another_agent().add(connect([f"127.0.0.1:{port}"], KEY, 8, 10), "the head")
        agent.send_now(hello(8))
        found = until(ends.head, lambda found: any(one == hello(8) for _, one in found))
        assert [one for _, one in found] == [first_warning(ends, flood[0]), hello(8)]
        for sock in flood[: 300 - door.SPARE - 2]:
            assert is_refused(sock)
        held = flood[-1]
        held.settimeout(0.05)
        with pytest.raises(TimeoutError):
            held.recv(1)
    assert is_unharmed(ends, on_head, on_agent)


def test_a_flood_does_not_push_out_who_has_begun_with_the_key(ends: Ends) -> None:
    """Not even one from the same address."""
    ends.by_tcp(place=7)
    ends.head.expect(8, KEY)
    port = ends.head.listen()
    with ExitStack() as stack:
        agent = stack.enter_context(knock(port))
        session, opening = speak(agent, 8)
        flood = [stack.enter_context(knock(port)) for _ in range(200)]
        assert is_refused(flood[0])
        replays = [stack.enter_context(knock(port)) for _ in range(door.SPARE)]
        for sock in replays:
            sock.sendall(opening)
            assert len(sock.recv(50, socket.MSG_WAITALL)) == 50
        agent.sendall(message(session, frames.frame(frames.MESSAGE, message_to_bytes(hello(8)))))
        found = until(ends.head, lambda found: len(found) == 2)
        assert [one for _, one in found] == [first_warning(ends, flood[0]), hello(8)]


def test_a_flood_does_not_push_out_who_came_before_it(ends: Ends) -> None:
    """What has been said while nobody listened is read first."""
    ends.by_tcp(place=7)
    ends.head.expect(8, KEY)
    port = ends.head.listen()
    is_over = threading.Event()
    with ExitStack() as stack:
        ends.head._server.do(is_over.wait)  # type: ignore[arg-type]
        agent = stack.enter_context(knock(port))
        session = SecureSession(KEY, initiator=True)
        first = session.handshake()
        agent.sendall(PREAMBLE.pack(MAGIC, 8) + LENGTH.pack(len(first)) + first)
        for _ in range(200):
            stack.enter_context(knock(port))
        is_over.set()
        session.read_handshake(agent.recv(50, socket.MSG_WAITALL)[2:])
        agent.sendall(message(session, frames.frame(frames.MESSAGE, message_to_bytes(hello(8)))))
        until(ends.head, lambda found: any(one == hello(8) for _, one in found))


def test_who_says_nothing_is_refused_in_time(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.2)
    on_head, on_agent = ends.by_tcp(place=7)
    with knock(ends.head.listen()) as silent, knock(ends.head.listen()) as slow:
        slow.sendall(PREAMBLE.pack(MAGIC, 7))
        assert is_refused(silent)
        assert is_refused(slow)
        assert messages(ends.head, 1) == [first_warning(ends, silent)]
    assert is_unharmed(ends, on_head, on_agent)


def test_an_agent_may_come_before_its_key(ends: Ends) -> None:
    port = ends.head.listen()
    ends.head.start()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(connect([f"127.0.0.1:{port}"], KEY, 3, 10)))
    thread.start()
    until_waiting(ends, 1)
    ends.head.expect(3, KEY)
    thread.join(10)
    ends.agent.add(found[0], "the head").send_now(hello(3))
    assert messages(ends.head, 1) == [hello(3)]


def until_waiting(ends: Ends, count: int) -> None:
    """Until so many connections have said what they have to say, and wait for their key."""
    seen = threading.Event()
    server = ends.head._server

    def look() -> None:
        assert server.door is not None
        waiting = [one for one in server.door._callers.values() if len(one.data) == 58]
        if len(waiting) == count:
            seen.set()

    for _ in range(1000):
        server.do(look)
        if seen.wait(0.01):
            return
    raise AssertionError("nobody waits")


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_head_listens_at_several_ports_and_closes_one_of_them(ends: Ends) -> None:
    """A link says by which of our ports it has come in, and stays when that port is closed."""
    head = ends.head
    ports = [head.listen("127.0.0.1", 0, keyed=False), head.listen("127.0.0.2", 0, keyed=False)]
    assert head.listen("127.0.0.1", 0, keyed=False) == ports[0]
    head.expect(None, KEY, count=4)
    head.start()
    links = []
    for address, port in zip(("127.0.0.1", "127.0.0.2"), ports, strict=True):
        on_agent = ends.another_agent().add(connect([f"{address}:{port}"], KEY, 1, 10), "the head")
        on_agent.send_now(hello(1))  # the owner of the hub decides whether two may come for a place
        ((link, _),) = until(head, bool)
        assert link.port == port
        links.append((link, on_agent))
    head.unlisten(ports[0])
    with pytest.raises(ConnectionRefusedError):
        knock(ports[0])
    assert all(is_unharmed(ends, *pair) for pair in links)


@pytest.mark.parametrize(
    "listener, caller, own_key, reason",
    [
        (False, True, KEY, "this node has a DSL_JOB_KEY, and the other side has none"),
        (True, False, KEY, "this node has no DSL_JOB_KEY, and the other side has one"),
        (True, True, bytes(32), "the other side has another DSL_JOB_KEY or --rdzv-id"),
        (False, False, bytes(32), "the other side has another DSL_JOB_KEY or --rdzv-id"),
    ],
)
def test_who_has_another_key_is_told_so_at_once(
    own_key: bytes, reason: str, ends: Ends, *, listener: bool, caller: bool
) -> None:
    port = ends.head.listen(keyed=listener)
    ends.head.expect(None, KEY)
    ends.head.start()
    for _ in range(3):
        with pytest.raises(RefusedLinkError, match=f"127.0.0.1:{port} refuses this node: {reason}"):
            connect([f"127.0.0.1:{port}"], own_key, 1, 60, keyed=caller)
    ((_, warning),) = until(ends.head, bool)
    assert warning.text.startswith("a node at 127.0.0.1 was refused: it has ")
    is_true(lambda: ends.head.strangers == 3)


def test_a_probe_that_says_nothing_is_no_news_where_members_come_by_themselves(ends: Ends) -> None:
    port = ends.head.listen("127.0.0.1", keyed=False)
    ends.head.expect(None, KEY)
    ends.head.start()
    knock(port).close()
    with knock(port) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert is_refused(stranger)
    assert messages(ends.head, 1) == [
        Notice("warning", f"a stranger at 127.0.0.1 connected to port {port} of this job and was refused")
    ]


def test_all_addresses_of_a_head_are_tried(ends: Ends) -> None:
    port = ends.head.listen()
    ends.head.expect(0, KEY)
    ends.head.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        addresses = ["nowhere.invalid:1", mute, f"127.0.0.1:{closed_port()}", f"127.0.0.1:{port}"]
        ends.agent.add(connect(addresses, KEY, 0, 10), "the head").send_now(hello(0))
        assert messages(ends.head, 1) == [hello(0)]


def test_an_agent_that_reaches_nobody_says_where_it_tried() -> None:
    refused = f"127.0.0.1:{closed_port()}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = "{}:{}".format(*silent.getsockname())
        with pytest.raises(ControlError) as caught:
            connect([mute, refused], KEY, 0, 0.6)
    assert str(caught.value) == (
        f"the head of the job cannot be reached within 0.6 s: {mute} (it does not answer), "
        f"{refused} (Connection refused)"
    )


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:70000", "host:x"])
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(ControlError, match="is no address"):
        connect([address], KEY, 0, 1)


def test_a_key_has_32_bytes(ends: Ends) -> None:
    ends.head.listen()
    with pytest.raises(ControlError, match="a key has 32 bytes, not 31"):
        ends.head.expect(0, bytes(31))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:2] + data[3:]]
)
def test_bytes_that_were_changed_on_the_way_end_the_connection(
    ends: Ends, damage: Callable[[bytes], bytes]
) -> None:
    port = ends.head.listen()
    ends.head.expect(7, KEY)
    ends.head.start()
    with knock(port) as agent:
        session, _ = speak(agent, 7)
        agent.sendall(message(session, frames.frame(frames.MESSAGE, message_to_bytes(hello(7)))))
        messages(ends.head, 1)
        agent.sendall(
            damage(message(session, frames.frame(frames.MESSAGE, message_to_bytes(Bye(0))))) + b"xx"
        )
        assert messages(ends.head, 1) == [
            Lost("has sent something that was not made with the key of this job")
        ]
