"""The first lines between delegates of nodes with fixed places, and what a node knows from the start."""

from __future__ import annotations

import pytest
from tests.support.outcome import error_of

from dsl._record import replace
from dsl.errors import OptionError
from dsl.rendezvous import greeting
from dsl.rendezvous.delegate_messages import Open
from dsl.rendezvous.greeting import Hello, hello_from_line, hello_to_line, objection, stranger
from dsl.rendezvous.terms import terms_of

OURS = Hello("1.0", "job", 3, 0, "n0")
THEIRS = Hello("1.0", "job", 3, 2, "n2", "abc")


def opening(endpoint: str = "a:7", nodes: int = 3, **settings: str) -> Open:
    return Open("static", endpoint, "job", nodes, nodes, None, tuple(settings.items()), "here")


def test_a_greeting_is_read_as_it_was_written() -> None:
    line = hello_to_line(THEIRS)
    assert line.isascii()
    assert line.startswith(greeting.OWN)
    assert hello_from_line(line[:-1]) == THEIRS


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"circle":"hello"}',
        b'{"circle":["hello"]}',
        b"GET / HTTP/1.1\r",
        b"\xff\xfe",
        b"[" * 4000,
        hello_to_line(THEIRS)[:-1].replace(b'"place":2', b'"place":"2"'),
        hello_to_line(THEIRS)[:-1].replace(b'"place":2', b'"place":true'),
        hello_to_line(THEIRS)[:-1].replace(b'"place"', b'"rank"'),
        hello_to_line(replace(THEIRS, place=-1))[:-1],
        hello_to_line(replace(THEIRS, nodes=10**40))[:-1],
        hello_to_line(replace(THEIRS, host="x" * 300))[:-1],
    ],
)
def test_what_is_no_greeting_is_told_from_one(line: bytes) -> None:
    assert hello_from_line(line) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, ""),
        ({"dsl": "2.0"}, "it runs dsl 2.0, node 0 runs dsl 1.0"),
        ({"run_id": "other"}, "its --rdzv-id is 'other', that of node 0 is 'job'"),
        ({"nodes": 4}, "its --nnodes is 4, that of node 0 is 3"),
        ({"place": 0}, "its --node-rank is 0, with 3 nodes it must be 1 to 2"),
        ({"place": 3}, "its --node-rank is 3, with 3 nodes it must be 1 to 2"),
    ],
)
def test_a_node_of_another_job_is_refused_in_words(changes: dict[str, object], words: str) -> None:
    why = objection(replace(THEIRS, **changes), OURS)
    assert why.startswith(words)
    assert bool(why) == bool(words)


def test_a_client_of_torch_is_known() -> None:
    assert stranger(b"\x00\xce\xf7\x85\x3c\r\r") == "a torchrun, or a worker of torch"
    assert stranger(b"GET /") == "no dslrun"


def test_what_a_node_knows_from_the_start() -> None:
    terms = terms_of(opening("[::1]:29500", 4, node_rank="3", timeout="9", keep_alive_interval="2"))
    assert (terms.node_count, terms.node_rank, terms.address, terms.port) == (4, 3, "::1", 29500)
    assert (terms.timeout_s, terms.silence_s, terms.beat_s, terms.meeting_point) == (9, 6, 1, "[::1]:29500")
    usual = terms_of(opening(node_rank="0", join_timeout="1"))
    assert (usual.timeout_s, usual.silence_s, usual.host) == (600, 15, "here")


@pytest.mark.parametrize(
    "order, words",
    [
        (opening("a", node_rank="0"), "expected HOST:PORT"),
        (opening("a:0", node_rank="0"), "expected HOST:PORT"),
        (opening(":7", node_rank="0"), "expected HOST:PORT"),
        (opening(node_rank="3"), "it must be 0 to 2"),
        (opening(), "it must be 0 to 2"),
        (opening(node_rank="0", timeout="soon"), "--rdzv-conf timeout='soon': expected a number above 0"),
        (opening(node_rank="0", timeout="0"), "expected a number above 0"),
        (opening(node_rank="0", keep_alive_interval="nan"), "expected a number above 0"),
    ],
)
def test_terms_that_make_no_sense_are_refused(order: Open, words: str) -> None:
    message = error_of(OptionError, lambda: terms_of(order))
    assert message is not None
    assert words in message
