"""What a lane is told, and how it keeps the time of its experiments."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

from dsl._record import replace
from dsl.autotune.experiment import Order, order_to_line
from dsl.autotune.lane import OrderChannel

if TYPE_CHECKING:
    from collections.abc import Iterator

ORDER = Order(
    name="a", argv=(), env={}, words=("--num_gpus=1", "t.py"), stdout="", stderr="", limit_s=20.0, grace_s=1.0
)


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, OrderChannel]]:
    """Where orders are written, where answers are read, and who takes the orders."""
    orders_fd, write_fd = os.pipe()
    read_fd, answers_fd = os.pipe()
    yield write_fd, read_fd, OrderChannel(orders_fd, answers_fd)
    for fd in (orders_fd, write_fd, read_fd, answers_fd):
        os.close(fd)


def test_an_order_is_read_as_it_was_given(pipes: tuple[int, int, OrderChannel]) -> None:
    write_fd, read_fd, orders = pipes
    os.write(write_fd, order_to_line(ORDER))
    assert orders.first() == ORDER
    orders.begin(ORDER)
    assert json.loads(os.read(read_fd, 100)) == {"begun": True}


STOP = b'{"stop": 3.0}\n'
NEXT = replace(ORDER, name="b")


@pytest.mark.parametrize(
    "lines, first, ended",
    [
        (order_to_line(ORDER) + STOP + order_to_line(NEXT), NEXT, 1),
        (order_to_line(ORDER) + STOP + STOP + order_to_line(NEXT), NEXT, 1),
        (STOP + order_to_line(NEXT), NEXT, 0),
        (order_to_line(ORDER) + STOP + order_to_line(ORDER) + STOP + order_to_line(NEXT), NEXT, 2),
    ],
)
def test_an_order_that_is_stopped_before_it_begins_is_answered_and_only_the_next_one_runs(
    lines: bytes, first: Order, ended: int, pipes: tuple[int, int, OrderChannel]
) -> None:
    """All messages may arrive at once."""
    write_fd, read_fd, orders = pipes
    os.write(write_fd, lines)
    assert orders.first() == first
    orders.begin(first)
    orders.end(0)
    answers = [json.loads(line) for line in os.read(read_fd, 1000).splitlines()]
    stopped = {"code": 143, "stop": "stopped"}
    assert answers == [*[stopped] * ended, {"begun": True}, {"code": 0, "stop": ""}]


def test_a_lane_whose_only_order_was_stopped_ends_when_no_other_follows() -> None:
    orders_fd, write_fd = os.pipe()
    read_fd, answers_fd = os.pipe()
    os.write(write_fd, order_to_line(ORDER) + STOP)
    os.close(write_fd)
    assert OrderChannel(orders_fd, answers_fd).first() is None
    assert json.loads(os.read(read_fd, 100)) == {"code": 143, "stop": "stopped"}
    for fd in (read_fd, answers_fd):
        os.close(fd)


def test_the_limit_of_an_experiment_stands_still_while_it_is_stopped(
    pipes: tuple[int, int, OrderChannel],
) -> None:
    _, _, orders = pipes
    orders.begin(ORDER)
    deadlines = [orders.deadline_s]
    for change in (orders.pause, orders.go_on, orders.pause, lambda: orders.end(0), orders.go_on):
        change()
        deadlines.append(orders.deadline_s)
    before, meanwhile, after, *ended = deadlines
    assert before is not None
    assert after is not None
    assert before <= after <= time.monotonic() + ORDER.limit_s
    assert (meanwhile, ended) == (None, [None, None, None]), "nor is it that of another experiment"
