"""What an agent and its delegate tell each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.outcome import error_of

from dsl.errors import JobFormatError
from dsl.model.codec import LONGEST_SHOWN, Lines, to_line
from dsl.model.job import Meeting, MeetingPoint, Notice
from dsl.rendezvous.delegate_messages import (
    ANSWERS,
    ORDERS,
    Answer,
    ByTorch,
    Claim,
    Claimed,
    Finish,
    Leave,
    Meet,
    MeetingRefused,
    NodesFinished,
    NodesMet,
    Open,
    Order,
    Outranked,
    Waiting,
)

POINT = MeetingPoint("dynamic", "", None, "c10d", "alpha:29400", (("join_timeout", "9"),), 1, "10.0.0.1")
MEET = Meet(4, "default")
ORDER_LIST: list[Order] = [
    Open(POINT, "job", 4, "alpha"),
    Claim(41001, "0" * 64, 1),
    MEET,
    Leave(closes=True),
    Finish(),
]
MEETING = Meeting(
    0, 1, (4, 2), "10.0.0.1", 41000, 2, restarts=1, reason="membership", first_role_rank=4, role_size=6
)
CLAIMED = Claimed(1, 2, "10.0.0.1", "alpha", "10.0.0.2", 41001, "0" * 64, "alpha:29400", conducts=True)
ANSWER_LIST: list[Answer] = [
    CLAIMED,
    ByTorch(),
    Outranked(),
    NodesMet(MEETING, ("alpha", "beta")),
    Waiting(),
    MeetingRefused("the job is over", "closed"),
    Notice("info", "waiting for 1 of 2 nodes"),
    NodesFinished(),
]


@pytest.mark.parametrize("kinds, messages", [(ORDERS, ORDER_LIST), (ANSWERS, ANSWER_LIST)])
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_all_messages_are_read_as_they_were_written_however_they_are_cut(
    kinds: tuple[type, ...], messages: list[Any], step: int
) -> None:
    data = b"".join(map(to_line, messages))
    lines = Lines(*kinds)
    found = [one for at in range(0, len(data), step) for one in lines.feed(data[at : at + step])]
    assert found == messages
    assert [type(one) for one in messages] == list(kinds)
    assert data.isascii()
    assert data.count(b"\n") == len(messages)


@pytest.mark.parametrize(
    "changes",
    [
        {"local_world_size": "4"},
        {"local_world_size": 4.0},
        {"local_world_size": 0},
        {"local_world_size": 65_537},
        {"role": 1},
        {"more": 1},
    ],
)
def test_a_damaged_order_is_refused(changes: dict[str, object]) -> None:
    plain = {"Meet": {**json.loads(to_line(MEET))["Meet"], **changes}}
    assert error_of(JobFormatError, Lines(*ORDERS).feed, json.dumps(plain).encode() + b"\n")


def test_an_answer_is_no_order() -> None:
    line = to_line(ANSWER_LIST[0])
    assert error_of(JobFormatError, Lines(*ORDERS).feed, line) == (
        "'Claimed' is none of Open, Claim, Meet, Leave, Finish"
    )


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b2J\r\x00\u202e\udcff"


@pytest.mark.parametrize(
    "answer, field",
    [
        (CLAIMED, "at_address"),
        (ANSWER_LIST[3], "hosts"),
        (ANSWER_LIST[5], "text"),
        (ANSWER_LIST[6], "text"),
    ],
)
def test_what_users_read_is_printable_and_short_whoever_has_written_it(answer: Answer, field: str) -> None:
    plain = json.loads(to_line(answer))
    (fields,) = plain.values()
    text = f"a{ESCAPES}b" + "x" * 100_000
    fields[field] = [text] * len(fields[field]) if isinstance(fields[field], list) else text
    (read,) = Lines(*ANSWERS).feed(json.dumps(plain).encode() + b"\n")
    found = getattr(read, field)
    for one in found if isinstance(found, tuple) else (found,):
        assert one.isprintable()
        assert one.startswith("a \\xffb"), one  # a carriage return is white space
        assert len(one) <= LONGEST_SHOWN
