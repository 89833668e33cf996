"""What a lane is told, and what it answers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dsl._record import replace
from dsl.autotune.experiment import Begun, ExperimentOver, Order, StopExperiment
from dsl.autotune.lane import NoMoreOrders, OrderChannel
from dsl.model.codec import to_line
from dsl.model.lines import Lines

ORDER = Order(
    name="a", words=("--num_gpus=1", "t.py"), stdout="", stderr="", end="", limit_s=20.0, grace_s=1.0
)


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, OrderChannel]]:
    """Where orders are written, where answers are read, and who takes the orders."""
    orders_fd, write_fd = os.pipe()
    read_fd, answers_fd = os.pipe()
    yield write_fd, read_fd, OrderChannel(orders_fd, answers_fd)
    for fd in (write_fd, read_fd, answers_fd):
        os.close(fd)


def test_orders_that_arrive_at_once_are_read_one_by_one(pipes: tuple[int, int, OrderChannel]) -> None:
    write_fd, _, orders = pipes
    following = replace(ORDER, name="b", words=("x\udcff",))
    os.write(write_fd, to_line(ORDER) + to_line(StopExperiment(3.0)) + to_line(following))
    assert orders.first() == ORDER
    assert orders.deadline_s == 0.0, "the agent reads what is left before it waits"
    assert orders.read() == (StopExperiment(3.0),)
    assert orders.read() == (following,)
    assert orders.deadline_s is None


def test_a_lane_without_an_order_ends(pipes: tuple[int, int, OrderChannel]) -> None:
    write_fd, _, orders = pipes
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), write_fd)
    assert orders.read() == (NoMoreOrders(),)
    assert orders.fileno() == -1


def test_answers_are_read_as_they_were_given(pipes: tuple[int, int, OrderChannel]) -> None:
    _, read_fd, orders = pipes
    orders.answer(Begun())
    orders.answer(ExperimentOver(3))
    answers = Lines(Begun, ExperimentOver).feed(os.read(read_fd, 100))
    assert answers == [Begun(), ExperimentOver(3)]
