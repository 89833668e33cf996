"""Lanes and signals of runners, without any process: what runs an order is made up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from kit.waiting import until

from dsl._record import record, replace
from dsl.autotune import trials
from dsl.autotune.experiment import Order
from dsl.autotune.trials import Runners

if TYPE_CHECKING:
    from collections.abc import Iterator

ORDER = Order(name="a", argv=(), env={}, words=(), stdout="", stderr="", limit_s=60, lane=("lane",))
TIMEOUT_S = 30.0


@record
class Output:
    """Only a supervisor makes the real ones."""

    data: bytes
    """As there."""
    stream: int = 1
    """As there."""


class Started:
    """The same of the event that the lane runs."""


class Lane:
    """In place of the agent that supervises a lane: it ends when the test says so."""

    def __init__(self) -> None:
        self.leash: Any = None
        self.listener: Any = None
        self.orders_fd = -1
        self.is_there = threading.Event()
        self.is_over = threading.Event()
        self.code = 1

    def run(self, _order: Order, leash: Any, listeners: Any, orders_fd: int) -> tuple[int, str]:
        self.leash, self.listener = leash, listeners[0]
        self.orders_fd = os.dup(orders_fd)
        self.listener.hear(Started())
        self.is_there.set()
        assert self.is_over.wait(TIMEOUT_S)
        if self.orders_fd >= 0:
            os.close(self.orders_fd)
        return self.code, ""

    def answer(self, **words: object) -> None:
        self.listener.hear(Output(json.dumps(words).encode() + b"\n"))


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lane]]:
    """The lanes that were started."""
    made: list[Lane] = []

    def run(*args: Any) -> tuple[int, str]:
        made.append(Lane())
        return made[-1].run(*args)

    monkeypatch.setattr(trials, "run_order", run)
    monkeypatch.setattr(trials, "Output", Output)
    monkeypatch.setattr(trials, "Started", Started)
    yield made
    for lane in made:
        lane.is_over.set()


def started(runners: Runners, lanes: list[Lane], order: Order = ORDER, count: int = 1) -> Lane:
    runners.start(order, "slot")
    until(lambda: len(lanes) == count)
    assert lanes[-1].is_there.wait(TIMEOUT_S)
    return lanes[-1]


@pytest.fixture
def runners(lanes: list[Lane]) -> Iterator[Runners]:
    made = Runners()
    yield made
    for lane in lanes:
        lane.is_over.set()
    made.close()


def ended(runners: Runners) -> list[tuple[str, int, str]]:
    done, signals = runners.wait()
    assert signals == []
    return [(one.order.name, one.exit_code, one.stop) for one in done]


def test_a_lane_runs_one_order_after_the_other(runners: Runners, lanes: list[Lane]) -> None:
    lane = started(runners, lanes)
    lane.answer(begun=True)
    lane.answer(code=0, stop="")
    assert ended(runners) == [("a", 0, "")]
    runners.start(replace(ORDER, name="b"), "slot")
    lane.answer(code=3, stop="timeout")
    assert ended(runners) == [("b", 3, "timeout")]
    assert len(lanes) == 1


def test_a_lane_that_has_ended_while_it_was_idle_gets_no_order(runners: Runners, lanes: list[Lane]) -> None:
    """Whoever looked first and gave then would wait for ever."""
    lane = started(runners, lanes)
    lane.answer(code=0, stop="")
    assert ended(runners) == [("a", 0, "")]
    (thread,) = [one for one in threading.enumerate() if one.name == "lane of a"]
    lane.is_over.set()
    thread.join(TIMEOUT_S)
    again = started(runners, lanes, replace(ORDER, name="b"), 2)
    again.answer(code=0, stop="")
    assert ended(runners) == [("b", 0, "")]


def test_a_lane_that_dies_with_an_order_tells_of_it(runners: Runners, lanes: list[Lane]) -> None:
    started(runners, lanes).is_over.set()
    assert ended(runners) == [("a", 1, "")]


def test_an_order_that_nobody_reads_any_more_blocks_nobody(runners: Runners, lanes: list[Lane]) -> None:
    """It is longer than what a pipe holds, and the lane is gone while its end is not known."""
    lane = started(runners, lanes)
    lane.answer(code=0, stop="")
    assert ended(runners) == [("a", 0, "")]
    os.close(lane.orders_fd)
    lane.orders_fd = -1
    runners.start(replace(ORDER, name="b", words=("x" * 1_000_000,)), "slot")
    lane.is_over.set()
    assert ended(runners) == [("b", 1, "")]


def test_an_end_that_was_asked_for_is_not_put_off_by_a_late_begin(
    runners: Runners, lanes: list[Lane]
) -> None:
    lane = started(runners, lanes)
    runners.stop()
    soon = lane.leash.deadline_s
    lane.answer(begun=True)
    assert lane.leash.deadline_s == soon
    lane.answer(code=143, stop="stopped")
    assert lane.leash.deadline_s is None
    assert ended(runners) == [("a", 143, "stopped")]
    runners.start(replace(ORDER, name="b"), "slot")
    lane.answer(begun=True)
    assert lane.leash.deadline_s > soon


def test_signals_are_heard_without_a_wait_and_an_end_beside_them_is_not_lost(
    runners: Runners, lanes: list[Lane]
) -> None:
    assert runners.heard() == []
    lane = started(runners, lanes)
    os.write(runners.bell_fd, b"\x0f")
    assert runners.wait() == ([], [15])
    lane.answer(code=0, stop="")
    os.write(runners.bell_fd, b"\x02")
    assert runners.heard() == [2]
    assert ended(runners) == [("a", 0, "")]


@pytest.mark.parametrize("limit_s", [20.0, 0.0])
def test_the_time_of_an_experiment_stands_still_while_it_is_stopped(limit_s: float) -> None:
    leash = trials.Leash(replace(ORDER, limit_s=limit_s))
    deadlines = [leash.deadline_s]
    leash.pause()
    deadlines.append(leash.deadline_s)
    leash.go_on()
    deadlines.append(leash.deadline_s)
    leash.close()
    before, meanwhile, after = deadlines
    assert meanwhile is None
    assert (before is None) == (after is None) == (limit_s == 0)
    assert before is None or after is None or before <= after <= time.monotonic() + limit_s


def test_a_second_ctrl_z_before_the_first_is_heard_is_the_same(runners: Runners) -> None:
    os.write(runners.bell_fd, bytes([signal.SIGTSTP, signal.SIGTSTP, 15, 15]))
    assert runners.heard() == [signal.SIGTSTP, 15, 15]
