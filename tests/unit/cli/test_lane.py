"""What a lane is told, and how it keeps the time of its experiments."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

from dsl.autotune.experiment import Order, order_to_line
from dsl.cli.lane import OrderChannel

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


@pytest.mark.parametrize("words", ['{"stop": 3.0}', '{"stop": 3.0}\n{"stop": 0.0}'])
def test_an_order_that_is_taken_back_before_it_is_read_is_not_run(
    words: str, pipes: tuple[int, int, OrderChannel]
) -> None:
    write_fd, _, orders = pipes
    os.write(write_fd, order_to_line(ORDER) + f"{words}\n".encode())
    assert orders.first() is None


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
