"""The workers' output on its way to the head: every byte, whole lines, and nobody is held up by a slow console."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import termios
import threading
from array import array

import pytest
from tests.conftest import WaitUntil
from tests.support.links import (
    CREDIT,
    LONG_S,
    MARK,
    MESSAGE,
    OUTPUT,
    PACKED,
    Ends,
    bytes_of,
    frame,
    hello,
    messages,
    until,
)

from dsl.control.hub import FdStream, Hub, Link
from dsl.control.messages import Bye, Said, Stop
from dsl.model.codec import to_line
from dsl.model.job import Notice

UNFINISHED, ITSELF = b"\x10.", b"\x10-"
"""Signs of the engine: the line before it is not finished; it stands for the byte \x10 itself."""

PIECE = 16 << 10
"""Longer lines are sent in pieces."""

OUTPUT_BYTES = 32 << 20
"""Most bytes that are on their way to the console."""


def agents(ends: Ends, count: int, others: int = 0) -> list[tuple[Hub, Link, Link, int, int]]:
    """Agents with pipes: (hub, link of the head, link of the agent, stdout, stderr). ``others`` speak, too."""
    made = []
    for place in range(count):
        hub = ends.agent if not place else ends.another_agent()
        on_head, on_agent = ends.by_descriptors(hub, f"node{place}")
        on_agent.send(hello(place))
        (out, write_out), (err, write_err) = ends.pipe(), ends.pipe()
        hub.relay(on_agent, out, err)
        made.append((hub, on_head, on_agent, write_out, write_err))
    ends.head.start()
    for hub, *_ in made:
        hub.start()
    assert len(messages(ends.head, count + others)) == count + others
    return made


def written(fd: int, data: bytes) -> threading.Thread:
    """Write it all on a thread."""

    def write() -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


@pytest.mark.guarantee("G6")
def test_a_hundred_thousand_lines_of_two_agents_arrive_whole_and_in_order(ends: Ends) -> None:
    each = 50_000
    texts = [b"".join(b"%d %d %s\n" % (one, at, b"x" * (at % 90)) for at in range(each)) for one in range(2)]
    made = agents(ends, 2)
    threads = [written(agent[3], text) for agent, text in zip(made, texts, strict=True)]
    shown = bytes_of(ends.shown, sum(map(len, texts)))
    assert [b"".join(shown_of(shown, one)) for one in range(2)] == texts
    for thread in threads:
        thread.join(10)


def test_lines_that_resemble_each_other_are_packed_for_ssh(ends: Ends) -> None:
    """The test plays the head, and takes what ssh would encrypt."""
    mine, sock = socket.socketpair()
    link = ends.agent.add(FdStream(mine.fileno(), mine.detach()), "the head")
    out, write_out = ends.pipe()
    err, _ = ends.pipe()
    ends.agent.relay(link, out, err)
    ends.agent.start()
    sock.sendall(MARK + frame(CREDIT, (1 << 20).to_bytes(8, "big")))
    text = b"".join(b"[rank 3] step %d\n" % at for at in range(2000))
    os.write(write_out, text)
    assert ends.agent.drain(10)
    sent = sock.recv(1 << 20)
    assert sent.startswith(MARK)
    assert sent[len(MARK) + 4] == PACKED
    assert len(sent) < len(text) // 4
    sock.close()


def shown_of(shown: bytes, one: int) -> list[bytes]:
    return [line for line in shown.splitlines(keepends=True) if line.startswith(b"%d " % one)]


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("count, length", [(2, 3_000_000), (10_000, 200_000), (100_000, 200_000)])
def test_a_line_that_is_longer_than_the_share_of_its_agent_is_not_torn(
    ends: Ends, count: int, length: int
) -> None:
    """The share of one among many is small; a line may be longer than any buffer."""
    ends.head.share_output(count)
    (_, _, _, long, _), (_, _, _, short, _) = agents(ends, 2)
    line = b"0 " + b"x" * length + b"\n"
    text = b"".join(b"1 %d\n" % at for at in range(20_000))
    threads = [written(long, line), written(short, text)]
    shown = bytes_of(ends.shown, len(line) + len(text))
    assert shown_of(shown, 0) == [line]
    assert b"".join(shown_of(shown, 1)) == text
    for thread in threads:
        thread.join(10)


@pytest.mark.guarantee("G6")
def test_an_unfinished_line_is_marked_where_another_has_to_come_and_shown_again_whole(ends: Ends) -> None:
    (one, _, _, of_one, _), (other, _, _, of_other, _) = agents(ends, 2)
    os.write(of_one, b"loading")
    assert one.drain(10)
    assert bytes_of(ends.shown, 7) == b"loading"
    os.write(of_other, b"hello\n")
    assert other.drain(10)
    assert bytes_of(ends.shown, 10) == "\u2026\nhello\n".encode()
    os.write(of_one, b" still")
    assert one.drain(10)
    assert bytes_of(ends.shown, 13) == b"loading still"
    os.write(of_one, b" done\nnext\n")
    assert bytes_of(ends.shown, 11) == b" done\nnext\n"
    os.write(of_other, b"bye\n")
    assert bytes_of(ends.shown, 4) == b"bye\n"


@pytest.mark.guarantee("G6")
def test_a_line_is_not_unfinished_because_its_rest_is_held_up_on_the_way(ends: Ends) -> None:
    """Only a worker's own silence ends a line before its end, and that the engine tells."""
    (_, _, _, out, _), (_, _, _, other, _) = agents(ends, 2)
    os.write(out, b"0 1\n0 5")
    assert bytes_of(ends.shown, 4) == b"0 1\n"
    assert not select.select([ends.shown], [], [], 0.3)[0]
    os.write(other, b"1 1\n")
    assert bytes_of(ends.shown, 4) == b"1 1\n"
    os.write(out, b"55\n")
    assert bytes_of(ends.shown, 6) == b"0 555\n"


def test_a_line_that_the_engine_shows_unfinished_is_shown_and_its_signs_are_not(ends: Ends) -> None:
    (_, _, _, out, _), (_, _, _, other, _) = agents(ends, 2)
    os.write(out, b"a" + ITSELF + b".b\nlo" + UNFINISHED + b"ad" + UNFINISHED)
    assert bytes_of(ends.shown, 9) == b"a\x10.b\nload"
    os.write(other, b"hello\n")
    assert bytes_of(ends.shown, 10) == "\u2026\nhello\n".encode()
    os.write(out, b"ing" + ITSELF)
    os.write(out, b"\n")
    assert bytes_of(ends.shown, 9) == b"loading\x10\n"


def test_a_long_line_is_sent_in_pieces_that_cut_no_sign(ends: Ends) -> None:
    (_, _, _, out, _), (_, _, _, other, _) = agents(ends, 2)
    for length in (PIECE - 1, PIECE):
        text = b"x" * length
        os.write(out, text + ITSELF * 2 + text)
        os.write(out, UNFINISHED)
        assert bytes_of(ends.shown, 2 * length + 2) == text + b"\x10\x10" + text
        os.write(out, b"\n")
        assert bytes_of(ends.shown, 1) == b"\n"
    os.write(other, b"hello\n")
    assert bytes_of(ends.shown, 6) == b"hello\n"


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("count", [1, 100_000])
def test_long_lines_of_both_streams_share_a_console_and_the_leave_to_send(count: int) -> None:
    """The rest of the line that the head waits for is sent before anything else."""
    ends = Ends(joined=True)
    ends.head.share_output(count)
    ((_, _, _, out, err),) = agents(ends, 1)
    lines = [b"o" * 300_000 + b"\n", b"e" * 300_000 + b"\n"]
    threads = [written(out, lines[0] * 4), written(err, lines[1] * 4)]
    shown = bytes_of(ends.shown, 8 * 300_001)
    assert sorted(shown.splitlines(keepends=True)) == sorted(lines * 4)
    for thread in threads:
        thread.join(10)
    ends.close()


def test_bytes_that_are_no_text_arrive_as_they_are(ends: Ends) -> None:
    ((agent, _, _, out, err),) = agents(ends, 1)
    data = bytes(range(256)) * 64
    os.write(out, data)
    os.write(err, data[::-1])
    assert agent.drain(10)
    assert bytes_of(ends.shown, len(data)) == data
    assert bytes_of(ends.shown_err, len(data)) == data[::-1]


def test_a_console_that_takes_nothing_stops_the_writer_and_nothing_else(
    ends: Ends, wait_until: WaitUntil
) -> None:
    ends.head.share_output(1)
    ((agent, on_head, on_agent, out, _),) = agents(ends, 1)
    text = b"".join(b"%d %s\n" % (at, b"x" * 1000) for at in range(50_000))
    assert len(text) > OUTPUT_BYTES + (8 << 20)
    writer = written(out, text)
    sent: list[int] = []

    def stands_still() -> bool:
        """Nothing has left the pipe for a while."""
        sent.append(unread(out))
        return len(sent) > 300 and len(set(sent[-300:])) == 1 and sent[-1] > 0

    wait_until(stands_still)
    assert not agent.drain(0.05)
    on_agent.send(Said(Notice("info", "still here")))
    assert messages(ends.head, 1) == [Said(Notice("info", "still here"))]
    on_head.send(Stop(15, 1.0))
    assert messages(agent, 1) == [Stop(15, 1.0)]
    assert not ends.head.drain(0.05)
    assert writer.is_alive()
    assert bytes_of(ends.shown, len(text)) == text
    writer.join(10)
    assert agent.drain(10)
    assert ends.head.drain(10)


def unread(fd: int) -> int:
    """How many bytes are in a pipe."""
    count = array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def test_a_console_that_is_gone_is_told_once_and_holds_up_nobody(ends: Ends) -> None:
    ((agent, _, on_agent, out, err),) = agents(ends, 1)
    os.close(ends.shown)
    ends._fds.remove(ends.shown)
    text = b"line\n" * 1_000_000
    writer = written(out, text)
    writer.join(20)
    assert agent.drain(10)
    assert ends.head.drain(10)
    os.write(err, b"error\n")
    assert bytes_of(ends.shown_err, 6) == b"error\n"
    on_agent.send(Bye())
    notice = "stdout cannot be written (Broken pipe): nothing more of the workers' output is shown there"
    found = until(ends.head, lambda found: any(one == Bye() for _, one in found))
    assert [one for _, one in found] == [Notice("warning", notice), Bye()]


def test_workers_write_on_when_the_head_is_gone(ends: Ends) -> None:
    ((agent, on_head, _, out, _),) = agents(ends, 1)
    on_head.close()
    messages(agent, 1)
    writer = written(out, b"x" * 5_000_000)
    writer.join(10)
    assert not writer.is_alive()
    assert not agent.drain(10)


def test_nothing_is_held_up_by_an_agent_that_is_lost_in_the_middle_of_a_line(ends: Ends) -> None:
    piece = frame(OUTPUT, b"\x81" + b"x" * PIECE)  # its rest never comes
    _, sock = ends.by_socket(frame(MESSAGE, to_line(hello(1))), piece)
    ((_, _, _, other, _),) = agents(ends, 1, others=1)
    assert bytes_of(ends.shown, PIECE) == b"x" * PIECE
    os.write(other, b"hello\n")
    assert not select.select([ends.shown], [], [], 0.3)[0]
    sock.close()
    assert bytes_of(ends.shown, 7) == b"\nhello\n"


def test_drain_does_not_wait_for_somebody_who_writes_on_and_on(ends: Ends) -> None:
    ((agent, _, _, out, _),) = agents(ends, 1)
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            os.write(out, b"more\n" * 1000)

    def show() -> None:
        while not os.read(ends.shown, 1 << 20).endswith(b"last\n"):
            pass

    threads = [threading.Thread(target=one) for one in (write, show)]
    for thread in threads:
        thread.start()
    assert all(agent.drain(10) for _ in range(20))
    is_over.set()
    threads[0].join(10)
    assert agent.drain(10)
    assert ends.head.drain(10)
    os.write(out, b"last\n")
    threads[1].join(10)
    assert not threads[1].is_alive()


def test_drain_of_a_hub_without_output_says_so(ends: Ends) -> None:
    ends.by_descriptors()
    ends.agent.start()
    assert not ends.agent.drain(LONG_S)
    assert ends.head.drain(0)
    assert not select.select([ends.agent], [], [], 0)[0]
