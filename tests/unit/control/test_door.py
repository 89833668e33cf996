"""The port of a head: agents get in, strangers do not, and the job goes on."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest
from tests.support.links import KEY, Ends, hello, messages, until

from dsl.control.hub import Link, connect
from dsl.control.messages import Bye, Over, Refused
from dsl.errors import ControlError
from dsl.model.job import Notice


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


def is_unharmed(ends: Ends, on_head: Link, on_agent: Link) -> bool:
    """Whether head and agent still talk."""
    on_head.send(Over())
    on_agent.send_now(Bye())
    return on_agent.receive(10) == Over() and messages(ends.head, 1) == [Bye()]


def first_warning(ends: Ends, sock: socket.socket) -> Notice:
    address = "{}:{}".format(*sock.getsockname())
    return Notice(
        "warning",
        f"a stranger at {address} connected to port {ends.head.listen()} of this job and was refused",
    )


def test_agents_connect_at_both_kinds_of_address(ends: Ends) -> None:
    on_head, on_agent = ends.by_tcp(place=7)
    assert on_head.place == 7
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


PREAMBLE = b"dsl\x01\0\0\0\7"
"""What an agent of place 7 sends first."""

GARBAGE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(200),
    "zeros": bytes(1000),
    "a half preamble": b"",
    "a wrong handshake": PREAMBLE + b"\0\x30" + b"x" * 48,
    "a wrong length": PREAMBLE + b"\xff\xff" + b"x" * 60000,
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


@pytest.mark.parametrize("start", [hello(8), Bye()], ids=["another place", "another message"])
def test_an_agent_says_first_who_it_is_and_no_other_than_its_key_is_for(ends: Ends, start: object) -> None:
    on_head, on_agent = ends.by_tcp(place=1)
    ends.head.expect(7, KEY)
    second = ends.another_agent().add(connect([f"127.0.0.1:{ends.head.listen()}"], KEY, 7, 10), "the head")
    address = second.own_address
    second.send_now(start)
    (notice,) = messages(ends.head, 1)
    assert notice.text.startswith(f"a stranger at {address}:")
    with pytest.raises(ControlError, match="has closed the connection"):
        second.receive(10)
    assert is_unharmed(ends, on_head, on_agent)


def test_a_second_agent_of_a_place_is_refused_and_told(ends: Ends) -> None:
    on_head, on_agent = ends.by_tcp(place=7)
    second = ends.another_agent().add(connect([f"127.0.0.1:{ends.head.listen()}"], KEY, 7, 10), "the head")
    second.send_now(hello(7))
    assert second.receive(10) == Refused("another agent of this place is connected")
    (notice,) = messages(ends.head, 1)
    assert notice.text.startswith("a second agent for place 7 has connected from 127.0.0.1:")
    assert is_unharmed(ends, on_head, on_agent)


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


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
