"""Nodes with fixed places meet, tell each other of failures, and notice who is gone: delegates on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.places import Node, free_port

from dsl import __version__
from dsl._record import replace
from dsl.rendezvous.delegate_messages import (
    Changed,
    Fail,
    FailingRank,
    Finish,
    Finished,
    Leave,
    Met,
    NotMet,
    PeerFailed,
    Remark,
)
from dsl.rendezvous.greeting import Hello, hello_to_line

if TYPE_CHECKING:
    from collections.abc import Iterator

CLOSED = "the connection has ended"


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Three delegates."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Node()) for _ in range(3)]


def open_all(nodes: list[Node], address: str = "127.0.0.1", **settings: str) -> int:
    """Have them meet for the first time; return the port."""
    port = free_port()
    for rank, node in enumerate(nodes):
        node.open(rank, len(nodes), port, address=address, **settings)
        node.meet()
    for node in nodes:
        node.expect(Met)
    return port


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "localhost", "[::1]", socket.gethostname()])
def test_unequal_nodes_meet_wherever_the_first_one_is(address: str, nodes: list[Node]) -> None:
    port = free_port()
    sizes = [(2, "train"), (3, "serve"), (1, "train")]
    for rank in (2, 1, 0):
        nodes[rank].open(rank, 3, port, address=address)
        nodes[rank].meet(*sizes[rank])
    met = [node.expect(Met) for node in nodes]
    assert {(one.local_world_sizes, one.hosts) for one in met} == {((2, 3, 1), ("n0", "n1", "n2"))}
    assert [(one.node_rank, one.first_role_rank, one.role_world_size) for one in met] == [
        (0, 0, 3),
        (1, 0, 3),
        (2, 2, 3),
    ]
    assert {(one.address, one.port) for one in met} == {(address.strip("[]"), port)}
    assert {(one.round, one.restarts, one.reason) for one in met} == {(0, 0, "start")}


def test_the_port_is_free_for_a_worker_when_the_nodes_have_met(nodes: list[Node]) -> None:
    """Also for one that does not ask to reuse it."""
    port = open_all(nodes)
    with socket.socket() as worker:
        worker.bind(("0.0.0.0", port))
        worker.listen()
    # What has taken it meanwhile is left alone: all nodes get another one.
    with socket.create_server(("127.0.0.1", port)):
        for node in nodes:
            node.meet(restarts=1)
        (other,) = {node.expect(Met).port for node in nodes}
    assert other != port


def test_a_failure_reaches_the_others_and_all_count_one_restart(nodes: list[Node]) -> None:
    open_all(nodes)
    nodes[1].say(FailingRank(1, 7))
    for node in (nodes[0], nodes[2]):
        assert node.expect(PeerFailed) == PeerFailed("n1", 1, 7, None, final=False)
    for restarts, node in zip((1, 1, 0), nodes, strict=True):
        node.meet(restarts=restarts)
    assert {(one.round, one.restarts, one.reason) for one in [node.expect(Met) for node in nodes]} == {
        (1, 1, "failure")
    }


def test_a_final_failure_ends_all(nodes: list[Node]) -> None:
    open_all(nodes)
    nodes[2].say(Fail(2, 9))
    assert nodes[2].until_end() == []
    for node in nodes[:2]:
        assert node.expect(PeerFailed) == PeerFailed("n2", 2, 9, None, final=True)
    nodes[1].meet(restarts=1)
    assert nodes[1].expect(NotMet) == NotMet("closed", "rank 2 failed")


def test_the_first_node_may_fail_too(nodes: list[Node]) -> None:
    open_all(nodes)
    nodes[1].meet(restarts=1)
    nodes[0].say(Fail(0, 9))
    assert nodes[0].until_end() == []
    assert nodes[0].process.wait(10) == 0
    assert nodes[1].expect(PeerFailed).final
    assert nodes[1].expect(NotMet) == NotMet("closed", "rank 0 failed")
    assert nodes[2].expect(PeerFailed).final
    nodes[2].say(Finish())
    nodes[2].expect(Finished)
    assert nodes[1].heard == nodes[2].heard == []


def test_all_wait_until_the_last_has_finished(nodes: list[Node]) -> None:
    open_all(nodes)
    nodes[0].say(Finish())
    nodes[1].say(Finish())
    nodes[1].say(FailingRank(1, 1))
    nodes[2].expect(PeerFailed)  # so both have been heard
    assert nodes[0].expect(PeerFailed).host == "n1"
    assert nodes[0].heard == []
    nodes[2].say(Finish())
    for node in nodes:
        node.expect(Finished)
        node.socket.close()
        assert node.process.wait(10) == 0


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("how", ["SIGKILL", "agent", "leave"])
def test_a_node_that_goes_is_named_and_ends_the_job(how: str, place: int, nodes: list[Node]) -> None:
    open_all(nodes)
    gone = nodes.pop(place)
    nodes[1].meet(restarts=1)
    if how == "SIGKILL":
        gone.process.kill()
    elif how == "agent":
        gone.socket.close()
    else:
        gone.say(Leave())
    text = {
        "SIGKILL": f"is lost: {CLOSED}",
        "agent": "is lost: its launcher has ended" if place == 0 else f"is lost: {CLOSED}",
        "leave": "has left the job",
    }[how]
    for node in nodes:
        assert node.expect(Remark).text == f"node {place} (n{place}) {text}"
        changed = node.expect(Changed)
        assert (changed.closed, changed.left) == (True, (f"n{place}",))
    assert nodes[1].expect(NotMet) == NotMet("closed", f"node {place} (n{place}) {text}")
    assert gone.process.wait(10) == (-9 if how == "SIGKILL" else 0)


@pytest.mark.parametrize("place", [0, 1])
def test_silence_is_noticed(place: int, nodes: list[Node]) -> None:
    """A cable that is cut, or a machine without power, ends no connection."""
    open_all(nodes, keep_alive_interval="0.4")
    silent = nodes.pop(place)
    os.kill(silent.process.pid, signal.SIGSTOP)
    try:
        for node in nodes:
            name = f"node {place} (n{place})"
            assert node.expect(Remark).text == f"{name} is lost: nothing has been heard from it for 1.2 s"
            assert node.expect(Changed).left == (f"n{place}",)
    finally:
        os.kill(silent.process.pid, signal.SIGCONT)


def test_signs_of_life_keep_a_silent_job_together(nodes: list[Node]) -> None:
    """A node that was stopped itself for a while does not blame the others."""
    open_all(nodes, keep_alive_interval="0.4")
    start_s = time.monotonic()
    with contextlib.suppress(TimeoutError):
        nodes[0].socket.settimeout(3)
        raise AssertionError(nodes[0].expect(Remark))
    assert time.monotonic() - start_s > 2.9
    nodes[0].socket.settimeout(20)
    nodes[1].say(FailingRank(1, 1))
    nodes[0].expect(PeerFailed)


def test_who_waits_says_for_whom_and_gives_up_in_time(nodes: list[Node]) -> None:
    port, nowhere = free_port(), free_port()
    for rank, node, there in zip((0, 1, 2), nodes, (port, port, nowhere), strict=True):
        node.open(rank, 3, there, timeout="6")
        node.meet()
    for node in nodes[:2]:
        assert "waiting for 1 of 3 nodes: node 2" in node.expect(Remark).text
    trouble = f"nobody listens at 127.0.0.1:{nowhere} yet"
    assert nodes[2].expect(Remark) == Remark("info", f"waiting for node 0 for up to 6 s: {trouble}")
    text = "after 6 s the job is still waiting for 1 of 3 nodes: node 2"
    for node in nodes[:2]:
        assert node.expect(NotMet) == NotMet("timeout", text)
    assert nodes[2].expect(NotMet) == NotMet("timeout", f"still waiting for node 0 after 6 s: {trouble}")


def test_nobody_at_the_meeting_point(nodes: list[Node]) -> None:
    port = free_port()
    nodes[1].open(1, 3, port, timeout="0.3")
    nodes[1].meet()
    text = f"still waiting for node 0 after 0.3 s: nobody listens at 127.0.0.1:{port} yet"
    assert nodes[1].expect(NotMet) == NotMet("timeout", text)
    nodes[2].open(2, 3, port, address="no.such.name.invalid", timeout="0.3")
    nodes[2].meet()
    assert "no.such.name.invalid is not known here yet" in nodes[2].expect(NotMet).text


def test_a_port_that_is_taken_is_refused_with_its_holder(nodes: list[Node]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        nodes[0].open(0, 3, port)
        refused = nodes[0].expect(NotMet)
    assert refused.kind == "settings"
    assert refused.text.startswith(f"master port {port} is taken by pid {os.getpid()} (")


@pytest.mark.parametrize(
    "rank, count, run_id, words",
    [
        (1, 3, "job", "its --node-rank is 1, and so is that of node 1 (n1)"),
        (2, 4, "job", "its --nnodes is 4, that of node 0 is 3"),
        (2, 3, "other", "its --rdzv-id is 'other', that of node 0 is 'job'"),
    ],
)
def test_a_node_of_another_job_is_told_so_and_harms_nobody(
    rank: int, count: int, run_id: str, words: str, nodes: list[Node]
) -> None:
    port = free_port()
    for place in (0, 1):
        nodes[place].open(place, 3, port)
        nodes[place].meet()
    nodes[1].say(FailingRank(0, 0))
    nodes[0].expect(PeerFailed)  # its place is taken
    with Node() as wrong:
        wrong.open(rank, count, port, run_id=run_id)
        wrong.meet()
        refused = wrong.expect(NotMet)
        assert refused.kind == "settings"
        assert refused.text.startswith(f"node 0 at 127.0.0.1:{port} refuses this node {rank}, and says why")
        warning = nodes[0].expect(Remark)
        assert warning == Remark("warning", f"node {rank} (n{rank}) at 127.0.0.1 cannot take part: {words}")
        nodes[2].open(2, 3, port)
        nodes[2].meet()
        for node in nodes:
            node.expect(Met)


def call(port: int, data: bytes = b"") -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", port), timeout=20)
    with contextlib.suppress(OSError):
        caller.sendall(data)
    return caller


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        call(port).close()
        return True
    return False


def answer_to(caller: socket.socket) -> bytes:
    """A line, or what is said until the end."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while not data.endswith(b"\n") and (more := caller.recv(4096)):
            data += more
    return data


def test_strangers_are_sent_away_and_the_job_is_unharmed(nodes: list[Node]) -> None:
    port = free_port()
    nodes[0].open(0, 3, port)
    nodes[0].meet()
    nodes[1].open(1, 3, port)
    nodes[1].meet()
    nodes[1].say(FailingRank(0, 0))
    nodes[0].expect(PeerFailed)
    other_version = Hello("0.0.1", "job", 3, 2, "old")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(call(port)) for _ in range(200)]
        for data, words in (
            (b"GET / HTTP/1.1\r\n\r\n", "no dslrun"),
            (b"\x00\xce\xf7\x85\x3c\r\r\x4c", "a torchrun, or a worker of torch"),
            (b"{" + b"x" * (1 << 22), "no dslrun"),
            (b'{"circle":"hello"}\n', "no dslrun"),
        ):
            caller = stack.enter_context(call(port, data))
            assert answer_to(caller) == b""
            if words:
                nodes[0].heard = [one for one in nodes[0].heard if not isinstance(one, Remark)]
        old = stack.enter_context(call(port, hello_to_line(other_version)))
        assert answer_to(old) == b'{"circle":"no"}\n'
        # A place is given to nobody who has not been sent on.
        token = Hello(__version__, "job", 3, 2, "thief")
        sent_on = answer_to(stack.enter_context(call(port, hello_to_line(token))))
        assert b'"circle":"go"' in sent_on
        inner = int(sent_on.partition(b'"port":')[2].partition(b",")[0])
        assert answer_to(stack.enter_context(call(inner, hello_to_line(token)))) == b""
        nodes[2].open(2, 3, port)
        nodes[2].meet()
        for node in nodes:
            node.expect(Met)
        # Those who have said nothing are gone with the port.
        assert [answer_to(one) for one in silent] == [b""] * len(silent)
    assert not listens(port)
    assert nodes[1].heard == nodes[2].heard == []


@pytest.mark.parametrize(
    "data, why",
    [
        (b"\xff\n", "it has sent something that no dslrun says"),
        (b"x" * (1 << 17), "it has sent a line that is too long"),
        (b"", CLOSED),
    ],
)
def test_a_node_that_talks_nonsense_loses_its_place(data: bytes, why: str, nodes: list[Node]) -> None:
    port = open_first_two(nodes)
    hello = Hello(__version__, "job", 3, 2, "odd")
    with call(port, hello_to_line(hello)) as outer:
        sent_on = json.loads(answer_to(outer))
    with call(sent_on["port"], hello_to_line(replace(hello, token=sent_on["token"]))) as inner:
        assert b'"circle":"seat"' in answer_to(inner)
        inner.sendall(data)
        inner.shutdown(socket.SHUT_WR)
        text = f"node 2 (odd) is lost: {why}, before the job has begun"
        assert nodes[0].expect(Remark) == Remark("info", text)
    nodes[2].open(2, 3, port)
    nodes[2].meet()
    for node in nodes:
        node.expect(Met)


def test_a_word_that_was_given_to_a_node_is_good_whoever_calls_after_it(nodes: list[Node]) -> None:
    """Else somebody who asks for a place again and again would lock its node out."""
    port = open_first_two(nodes)
    hello = Hello(__version__, "job", 3, 2, "right")
    with call(port, hello_to_line(hello)) as first, call(port, hello_to_line(hello)) as later:
        sent_on, _ = json.loads(answer_to(first)), answer_to(later)
    with call(sent_on["port"], hello_to_line(replace(hello, token=sent_on["token"]))) as inner:
        assert b'"circle":"seat"' in answer_to(inner)


@pytest.mark.parametrize("port", [0, -1, 65_536, 10**30, "7", True])
def test_a_first_node_that_sends_nodes_to_no_port_is_called_again(port: object, nodes: list[Node]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        nodes[1].open(1, 2, listener.getsockname()[1])
        nodes[1].meet()
        for _ in range(2):
            with listener.accept()[0] as caller:
                caller.settimeout(20)
                answer_to(caller)
                caller.sendall(json.dumps({"circle": "go", "port": port, "token": "x"}).encode() + b"\n")


def test_strangers_are_told_of_once(nodes: list[Node]) -> None:
    port = free_port()
    nodes[0].open(0, 2, port)
    nodes[0].meet()
    nodes[1].open(1, 2, port, run_id="other")  # comes when it listens
    nodes[1].meet()
    nodes[1].expect(NotMet)
    nodes[0].expect(Remark)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\xce\xf7\x85\x3c\r\r\x4c"):
        for _ in range(3):
            with call(port, data) as caller:
                answer_to(caller)
    nodes[2].open(1, 2, port)
    nodes[2].meet()
    nodes[0].expect(Met)
    where = f"127.0.0.1 was sent away from port {port}, where the nodes meet: it is"
    assert nodes[0].heard == [
        Remark("warning", f"{where} no dslrun"),
        Remark("warning", f"{where} a torchrun, or a worker of torch"),
    ]


def test_a_node_that_goes_before_the_start_gives_its_place_back(nodes: list[Node]) -> None:
    port = open_first_two(nodes)
    nodes[1].process.kill()
    text = f"node 1 (n1) is lost: {CLOSED}, before the job has begun"
    assert nodes[0].expect(Remark) == Remark("info", text)
    with Node() as again:
        for rank, node in ((1, again), (2, nodes[2])):
            node.open(rank, 3, port)
            node.meet()
        for node in (nodes[0], again, nodes[2]):
            node.expect(Met)


def open_first_two(nodes: list[Node]) -> int:
    port = free_port()
    for place in (0, 1):
        nodes[place].open(place, 3, port)
        nodes[place].meet()
    nodes[1].say(FailingRank(0, 0))
    nodes[0].expect(PeerFailed)
    return port


def test_a_first_node_that_is_started_again_is_found_again(nodes: list[Node]) -> None:
    port = open_first_two(nodes)
    nodes[0].socket.close()
    nodes[0].process.wait(10)
    with Node() as again:
        for rank, node in ((0, again), (2, nodes[2])):
            node.open(rank, 3, port)
            node.meet()
        for node in (again, nodes[1], nodes[2]):
            node.expect(Met)


def test_a_delegate_needs_no_torch() -> None:
    code = "import sys, dsl.rendezvous.places, dsl.rendezvous.head_node, dsl.rendezvous.other_node; "
    code += "print({'torch', 'numpy', 'logging', 'subprocess', 'typing', 'dataclasses'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
