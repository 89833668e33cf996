"""The line by which a lane is told of an experiment."""

from __future__ import annotations

import json

from dsl._record import replace
from dsl.autotune.experiment import Order, order_of, order_to_line

ORDER = Order(
    name="z1_tmbspg2",
    argv=("python", "-c", "run"),
    env={"TOKEN": "secret"},
    words=("--num_gpus=1", "train.py", "ü b"),
    stdout="out",
    stderr="err",
    limit_s=60.5,
    grace_s=2.0,
    lane=("lane",),
)


def test_a_lane_reads_the_order_as_it_was_written_but_for_what_is_its_own() -> None:
    line = order_to_line(ORDER)
    assert line.endswith(b"\n")
    assert order_of(json.loads(line)) == replace(ORDER, argv=(), env={}, lane=())


def test_a_lane_is_not_told_of_the_environment_that_it_has() -> None:
    assert b"secret" not in order_to_line(ORDER)
