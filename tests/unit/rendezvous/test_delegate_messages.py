"""The lines between an agent and its delegate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dsl.errors import RendezvousError
from dsl.model.codec import LONGEST_SHOWN
from dsl.model.judgement import Failed
from dsl.rendezvous.delegate_messages import (
    ANSWERS,
    MOST_BYTES,
    ORDERS,
    Changed,
    Fail,
    FailingRank,
    Finish,
    Finished,
    Leave,
    Lines,
    Meet,
    Met,
    NotMet,
    Open,
    PeerFailed,
    Remark,
    answer_from_line,
    answer_to_line,
    order_from_line,
    order_to_line,
)

if TYPE_CHECKING:
    from dsl.rendezvous.delegate_messages import Answer, Order

OPEN = Open("c10d", "alpha:29400", "job", 1, 4, None, (("join_timeout", "9"), ("is_host", "1")), "alpha")
MEET = Meet(4, "default", 1, "failure")
FAILED = Failed(
    "rank", "5", 5, 1, 77, 126, 9, exec_stage="exec", exec_errno=13, exec_path="/ü", target="file"
)
ORDER_LIST: list[Order] = [OPEN, MEET, FailingRank(3, 137, FAILED), Leave(), Finish(), Fail(-1, 1)]
ANSWER_LIST: list[Answer] = [
    Met(2, 1, (4, 2), 4, 6, "10.0.0.1", 41000, 1, "membership", ("alpha", "alpha"), ("a", "b")),
    NotMet("closed", "the job is over"),
    Changed(2, 1, False, ("gamma",), True),
    PeerFailed("beta", 5, 1, FAILED, True),
    Remark("info", "waiting for 1 of 2 nodes"),
    Finished(),
]


@pytest.mark.parametrize("order", ORDER_LIST)
def test_an_order_is_read_as_it_was_written(order: Order) -> None:
    line = order_to_line(order)
    assert line.isascii()
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert order_from_line(line[:-1]) == order


@pytest.mark.parametrize("answer", ANSWER_LIST)
def test_an_answer_is_read_as_it_was_written(answer: Answer) -> None:
    line = answer_to_line(answer)
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert answer_from_line(line[:-1]) == answer


def test_all_kinds_are_tried_here() -> None:
    assert [type(one) for one in ORDER_LIST] == list(ORDERS.values())
    assert [type(one) for one in ANSWER_LIST] == list(ANSWERS.values())


def test_the_names_and_fields_on_the_wire() -> None:
    assert json.loads(order_to_line(OPEN)) == {
        "do": "open",
        "backend": "c10d",
        "endpoint": "alpha:29400",
        "run_id": "job",
        "min_nodes": 1,
        "max_nodes": 4,
        "local_addr": None,
        "settings": [["join_timeout", "9"], ["is_host", "1"]],
        "host": "alpha",
    }
    assert json.loads(answer_to_line(Changed(2, 1, False, ()))) == {
        "is": "membership",
        "node_count": 2,
        "waiting": 1,
        "closed": False,
        "left": [],
        "has_dropped_us": False,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"do": "met"},
        {"do": ["meet"]},
        {"do": None},
        {"local_world_size": "4"},
        {"local_world_size": True},
        {"local_world_size": 4.0},
        {"local_world_size": None},
        {"local_world_size": 0},
        {"local_world_size": -5},
        {"local_world_size": 65_537},
        {"restarts": -1},
        {"restarts": 1 << 31},
        {"role": 1},
        {"reason": "boredom"},
        {"reason": []},
        {"more": 1},
    ],
)
def test_a_damaged_order_is_refused(changes: dict[str, object]) -> None:
    plain = {**json.loads(order_to_line(MEET)), **changes}
    with pytest.raises(RendezvousError, match="an order is damaged") as caught:
        order_from_line(json.dumps(plain).encode())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"local_world_sizes": [4, "2"]},
        {"local_world_sizes": 4},
        {"hosts": [1]},
        {"hosts": "alpha"},
        {"hosts": ["alpha"]},
        {"nodes": []},
        {"local_world_sizes": [4, 0]},
        {"node_rank": 2},
        {"node_rank": -1},
        {"port": 65_536},
        {"reason": ""},
    ],
)
def test_a_damaged_answer_is_refused(changes: dict[str, object]) -> None:
    plain = {**json.loads(answer_to_line(ANSWER_LIST[0])), **changes}
    with pytest.raises(RendezvousError, match="an answer is damaged"):
        answer_from_line(json.dumps(plain).encode())


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b2J\r\x00\u202e\udcff"


@pytest.mark.parametrize(
    "answer, field",
    [
        (ANSWER_LIST[1], "text"),
        (ANSWER_LIST[2], "left"),
        (ANSWER_LIST[3], "host"),
        (ANSWER_LIST[4], "text"),
        (ANSWER_LIST[0], "hosts"),
    ],
)
def test_what_users_read_is_printable_and_short_whoever_has_written_it(answer: Answer, field: str) -> None:
    plain = json.loads(answer_to_line(answer))
    text = f"a{ESCAPES}b" + "x" * 100_000
    plain[field] = [text] * len(plain[field]) if isinstance(plain[field], list) else text
    found = getattr(answer_from_line(json.dumps(plain).encode()), field)
    for one in found if isinstance(found, tuple) else (found,):
        assert one.isprintable()
        assert one.startswith("a b"), one  # a carriage return is white space
        assert len(one) <= LONGEST_SHOWN


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b"7", b'"do"', b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(RendezvousError, match="is damaged"):
        order_from_line(line)


def test_a_field_that_is_missing_is_refused() -> None:
    with pytest.raises(RendezvousError, match="Remark needs the field 'text'"):
        answer_from_line(b'{"is":"notice","level":"info"}')


def test_lines_are_cut_wherever_the_data_is_cut() -> None:
    data = b"".join(map(order_to_line, ORDER_LIST))
    for step in (1, 2, 7, len(data)):
        lines = Lines()
        found = [
            line for place in range(0, len(data), step) for line in lines.feed(data[place : place + step])
        ]
        assert [order_from_line(line) for line in found] == ORDER_LIST


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_an_end_takes_no_more_memory_than_is_allowed(end: bytes) -> None:
    lines = Lines()
    assert lines.feed(b"x" * MOST_BYTES) == []
    with pytest.raises(RendezvousError, match="longer than"):
        lines.feed(b"x" + end)
