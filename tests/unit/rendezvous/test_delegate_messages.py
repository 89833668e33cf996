"""What an agent and its delegate tell each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.outcome import error_of

from dsl.errors import JobFormatError
from dsl.model.codec import LONGEST_SHOWN, Lines, to_line
from dsl.model.job import Meeting, MeetingPoint, Notice
from dsl.model.judgement import Failed
from dsl.model.nodes import MeetingRefused, NodesFinished, NodesMet, PeerFailure
from dsl.model.outcome import Membership, MembershipChanged
from dsl.rendezvous.delegate_messages import ANSWERS, ORDERS, Answer, Finish, Leave, Meet, Open, Order

POINT = MeetingPoint("dynamic", "", None, "c10d", "alpha:29400", (("join_timeout", "9"),), 1, "10.0.0.1")
FAILED = Failed(
    "rank", "5", 5, 1, 77, 126, 9, exec_stage="exec", exec_errno=13, exec_path="/ü", target="file"
)
MEET = Meet(4, "default", 1, "failure")
ORDER_LIST: list[Order] = [
    Open(POINT, "job", 4, "alpha"),
    MEET,
    PeerFailure("alpha", 3, 137, FAILED, is_final=False),
    Leave(),
    Finish(),
]
MEETING = Meeting(
    0, 1, (4, 2), "10.0.0.1", 41000, 2, restarts=1, reason="membership", first_role_rank=4, role_size=6
)
ANSWER_LIST: list[Answer] = [
    NodesMet(MEETING, ("alpha", "alpha"), ("alpha",), ("beta",)),
    MeetingRefused("the job is over", "closed"),
    MembershipChanged(Membership(2, 1), ("gamma",), has_dropped_us=True),
    PeerFailure("beta", -1, 1, None, is_final=True),
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
        {"restarts": -1},
        {"restarts": 1 << 31},
        {"role": 1},
        {"reason": "boredom"},
        {"more": 1},
    ],
)
def test_a_damaged_order_is_refused(changes: dict[str, object]) -> None:
    plain = {"Meet": {**json.loads(to_line(MEET))["Meet"], **changes}}
    assert error_of(JobFormatError, Lines(*ORDERS).feed, json.dumps(plain).encode() + b"\n") is not None


def test_an_answer_is_no_order() -> None:
    line = to_line(ANSWER_LIST[0])
    assert error_of(JobFormatError, Lines(*ORDERS).feed, line) == (
        "'NodesMet' is none of Open, Meet, PeerFailure, Leave, Finish"
    )


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b2J\r\x00\u202e\udcff"


@pytest.mark.parametrize(
    "answer, field",
    [
        (ANSWER_LIST[0], "hosts"),
        (ANSWER_LIST[1], "text"),
        (ANSWER_LIST[2], "left"),
        (ANSWER_LIST[3], "host"),
        (ANSWER_LIST[4], "text"),
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
