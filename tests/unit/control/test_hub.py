"""Hubs talk to each other over real descriptors and real TCP."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

import pytest
from tests.conftest import WaitUntil
from tests.support.links import (
    MARK,
    MESSAGE,
    OUTPUT,
    PACKED,
    PING,
    Ends,
    bytes_of,
    frame,
    hello,
    messages,
    until,
)

from dsl.control.hub import FdStream
from dsl.control.messages import Bye, Lost, Over, Said, Stop
from dsl.errors import ControlError
from dsl.model.codec import to_line
from dsl.model.job import Notice

UNREAD_BYTES = 1 << 20
"""A hub does not read from a link while so much is unread."""

HELLO = frame(MESSAGE, to_line(hello()))


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


def test_the_end_of_an_agent_is_told_and_nothing_before_it_is_lost(ends: Ends) -> None:
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    on_agent.send_now(hello())
    on_agent.send(Bye())
    ends.agent.close(5)
    found = until(ends.head, lambda found: len(found) == 3)
    assert found == [(on_head, hello()), (on_head, Bye()), (on_head, Lost("has closed the connection"))]


def test_silence_is_told() -> None:
    ends = Ends(head_s=0.4)
    _, on_agent = ends.by_descriptors()
    ends.head.start()
    on_agent.send_now(hello())
    assert messages(ends.head, 2) == [hello(), Lost("has not been heard for 0.4 s", is_silent=True)]
    ends.close()


def test_output_reaches_the_console_and_drain_waits_for_it(ends: Ends) -> None:
    _, on_agent = ends.by_descriptors()
    ends.head.start()
    ends.agent.start()
    on_agent.send(hello())
    out, write_out = ends.pipe()
    err, write_err = ends.pipe()
    ends.agent.relay(on_agent, out, err)
    os.write(write_out, b"one\ntwo\nunfinished")
    os.write(write_err, b"error\n")
    assert ends.agent.drain(10)
    assert bytes_of(ends.shown, 18) == b"one\ntwo\nunfinished"
    assert bytes_of(ends.shown_err, 6) == b"error\n"
    assert ends.head.drain(10)


def test_the_clock_is_measured(ends: Ends, wait_until: WaitUntil) -> None:
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    ends.agent.start()
    on_agent.send(hello())
    messages(ends.head, 1)
    wait_until(lambda: on_head.clock is not None)
    found = on_head.clock
    assert found is not None
    assert abs(found.offset_ns) <= found.error_ns < 50_000_000


def test_links_that_are_closed_deliver_what_was_queued_and_are_not_lost(ends: Ends) -> None:
    on_head, on_agent = ends.by_tcp()
    ends.agent.start()
    for number in range(100):
        on_head.send(Stop(15, 1.0, why=f"{number} " + "x" * 10_000))
    on_head.close()
    found = messages(ends.agent, 101)
    assert [int(one.why.split()[0]) for one in found[:100]] == list(range(100))
    assert found[100] == Lost("has closed the connection")
    assert ends.head.read() == []
    assert on_agent.is_lost


def test_the_last_word_over_tcp_arrives_though_the_agent_leaves_bytes_unread() -> None:
    for _ in range(20):
        ends = Ends()
        on_head, on_agent = ends.by_tcp()
        for _ in range(50):
            on_head.send(Stop(15, 1.0, why="x" * 1000))
        on_agent.send(Bye())
        ends.agent.close(5)
        assert messages(ends.head, 2) == [Bye(), Lost("has closed the connection")]
        ends.close()


def test_an_agent_that_takes_long_to_start_its_hub_does_not_give_up_its_head(wait_until: WaitUntil) -> None:
    ends = Ends(agent_s=0.3)
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    on_agent.send_now(hello())
    on_head.send(Over())
    late_s = time.monotonic() + 0.4
    wait_until(lambda: time.monotonic() > late_s)
    ends.agent.start()
    assert messages(ends.agent, 1) == [Over()]
    ends.close()


def test_who_reads_nothing_is_given_up_though_it_talks() -> None:
    ends = Ends(head_s=0.5)
    on_head, sock = ends.by_socket(HELLO)
    ends.head.start()
    messages(ends.head, 1)
    for _ in range(20):
        on_head.send(Stop(15, 1.0, why="x" * 100_000))
    deadline_s = time.monotonic() + 10
    while not select.select([ends.head], [], [], 0.05)[0]:
        assert time.monotonic() < deadline_s
        sock.sendall(frame(PING, bytes(16)))
    assert messages(ends.head, 1) == [Lost("has taken nothing for 0.5 s")]
    sock.close()
    ends.close()


def test_a_flood_of_messages_waits_in_the_connection_and_all_of_it_arrives(ends: Ends) -> None:
    _, sock = ends.by_socket(HELLO)
    ends.head.start()
    messages(ends.head, 1)
    count = 20_000
    said = (Said(Notice("info", f"{number} " + "x" * 200)) for number in range(count))
    data = b"".join(frame(MESSAGE, to_line(one)) for one in said)
    sent = 0
    while select.select([], [sock], [], 0.5)[1]:
        sent += sock.send(data[sent : sent + 4096])
    assert sent < 2 * UNREAD_BYTES < len(data)
    rest = threading.Thread(target=sock.sendall, args=(data[sent:],))
    rest.start()
    found = messages(ends.head, count)
    assert [int(one.notice.text.split()[0]) for one in found] == list(range(count))
    rest.join()
    sock.close()


@pytest.mark.parametrize("count", [1, 60_000])
def test_what_a_login_shell_says_is_no_part_of_the_link(ends: Ends, count: int) -> None:
    mine, theirs = socket.socketpair()
    theirs.settimeout(10)
    on_head = ends.head.add(FdStream(mine.fileno(), mine.detach()), "noisy")
    ends.head.start()
    theirs.sendall(b"Welcome to node1\n" * count + b"\0d" + MARK + HELLO)
    assert until(ends.head, bool) == [(on_head, hello())]
    theirs.close()


def test_an_agent_that_never_speaks_is_told_with_what_was_said_instead(ends: Ends) -> None:
    mine, theirs = socket.socketpair()
    on_head = ends.head.add(FdStream(mine.fileno(), mine.detach()), "node1")
    ends.head.start()
    theirs.sendall(b"This account is currently\nnot available.\n")
    theirs.close()
    reason = "has closed the connection before an agent spoke: 'This account is currently not available.'"
    assert until(ends.head, bool) == [(on_head, Lost(reason))]


def test_a_file_is_no_connection() -> None:
    with open(os.devnull, "rb") as nothing, pytest.raises(ControlError, match="is a file"):
        FdStream(nothing.fileno(), nothing.fileno())


FULL = (128 << 10).to_bytes(4, "big")
"""What comes next unpacks to 128 KiB."""

MUCH = (
    FULL
    + b"\x7f" + ((128 << 10) - 5).to_bytes(4, "big") + bytes((OUTPUT, 1)) + b"x"  # 7 bytes as they are, and then
    + b"\1\0" + b"\xff" * 513 + bytes(((128 << 10) - 7 - 19 - 5 - 513 * 255,))  # the last of them, many times
    + b"\x50xxxxx"  # LZ4 wants the end as it is
)  # fmt: skip
"""A frame of output that is longer than an agent may send, in LZ4's form of a block."""


@pytest.mark.parametrize(
    "sent, reason",
    [
        (b"\0\0\0\1\x63x", "has sent a message of an unknown kind (99)"),
        (b"\xff\xff\xff\xff\1", "has sent a message of 4294967295 bytes, more than the 1048576 allowed"),
        (b"\0\0\0\3\1[1]", "has sent something that cannot be read: "),
        (b"\0\0\0\1\3x", "has sent a damaged message"),
        (frame(OUTPUT, b"\1" + b"x" * (128 << 10)), "has sent more output than it has leave for"),
        (frame(PACKED, b"\xff\xff\xff\xff" + b"x" * 100), "has sent damaged output"),
        (frame(PACKED, FULL + b"\x1fx\1\0"), "has sent damaged output"),
        (frame(PACKED, MUCH), "has sent more output than it has leave for"),
    ],
)
def test_what_is_no_message_ends_the_link_and_is_told(ends: Ends, sent: bytes, reason: str) -> None:
    on_head, sock = ends.by_socket(HELLO)
    ends.head.start()
    messages(ends.head, 1)
    sock.sendall(sent)
    ((link, lost),) = until(ends.head, bool)
    assert link is on_head
    assert lost.reason.startswith(reason)
    sock.close()
    on_head.send(Over())
    assert ends.head.read() == []


NO_WORDS_OF_AN_AGENT: dict[str, tuple[bytes, str]] = {
    "a second greeting": (to_line(hello(0)), "has said twice who it is"),
    "the greeting of another": (to_line(hello(1)), "has said twice who it is"),
    "an order": (to_line(Stop(15, 1.0)), "'Stop' is none of Hello, "),
    "a code": (b'{"Refused":{"text":"","code":256}}', "code of Refused is 256"),
    "a success that is refused": (b'{"Refused":{"text":"x","code":0}}', "code of Refused is 0"),
    "no number": (b'{"Report":{"attempt":NaN,"code":1}}', "it is not JSON"),
}


@pytest.mark.parametrize("payload, why", NO_WORDS_OF_AN_AGENT.values(), ids=NO_WORDS_OF_AN_AGENT)
def test_what_no_agent_may_say_costs_its_own_link_and_no_other(ends: Ends, payload: bytes, why: str) -> None:
    on_head, sock = ends.by_socket(HELLO)
    _, on_other = ends.by_descriptors(ends.another_agent())
    ends.head.start()
    on_other.send_now(hello(1))
    assert sorted(one.place for one in messages(ends.head, 2)) == [0, 1]
    sock.sendall(frame(MESSAGE, payload))
    ((link, lost),) = until(ends.head, bool)
    assert link is on_head
    assert why in lost.reason
    on_other.send_now(Bye())
    assert messages(ends.head, 1) == [Bye()]
    sock.close()


def test_an_agent_that_does_not_say_first_who_it_is_is_not_heard(ends: Ends) -> None:
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    on_agent.send_now(Bye())
    assert until(ends.head, bool) == [(on_head, Lost("has not said who it is before it sent Bye"))]


def test_the_agent_of_a_host_speaks_for_no_other(ends: Ends) -> None:
    """Over ssh the head knows whom it has reached."""
    on_head, on_agent = ends.by_descriptors()
    on_head.place = 2
    ends.head.start()
    on_agent.send_now(hello(1))
    assert until(ends.head, bool) == [(on_head, Lost("has said that it is that of place 1, not 2"))]


def test_a_head_says_nothing_that_only_agents_say(ends: Ends) -> None:
    on_head, on_agent = ends.by_descriptors()
    ends.head.start()
    ends.agent.start()
    on_head.send(Bye())
    ((link, lost),) = until(ends.agent, bool)
    assert link is on_agent
    assert "'Bye' is none of Assignment, Meeting" in lost.reason
