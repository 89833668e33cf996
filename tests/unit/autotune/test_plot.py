"""The plot: what is decided before anything is drawn, and that it can be drawn."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tests.support.summaries import make_summary, make_trial

from dsl.autotune.plot import Line, draw, make_picture

TRIALS = [
    make_trial("profile_model_info", 1.0, kind="profile", config={}, space=""),
    make_trial("z0_gas1_tmbspg4", 7.0),
    make_trial("z0_gas1_tmbspg1", 5.0),
    make_trial("z0_gas2_tmbspg4", 8.0),
    make_trial("z0_gas1_tmbspg16"),
    make_trial("z1_gas1_tmbspg8", 9.0),
]


def test_a_line_for_each_stage_over_the_micro_batch() -> None:
    picture = make_picture(make_summary(TRIALS))
    assert (picture.across, picture.up) == ("train_micro_batch_size_per_gpu", "throughput (more is better)")
    assert picture.title == "throughput of 5 experiments, the best: z1_gas1_tmbspg8 with 9"
    assert picture.lines == (
        Line("ZeRO stage 0", ((1, 5.0), (4, 7.0), (4, 8.0)), ((1, 5.0), (4, 8.0)), (16,)),
        Line("ZeRO stage 1", ((8, 9.0),), ((8, 9.0),), ()),
    )
    assert picture.best == (8, 9.0)


def test_the_best_of_a_metric_that_is_minimised_is_the_least() -> None:
    picture = make_picture(make_summary(TRIALS, is_minimised=True))
    assert picture.lines[0].tops == ((1.0, 5.0), (4.0, 7.0))
    assert picture.up.endswith("(less is better)")


def own_trials(*configs: dict[str, Any]) -> list[Any]:
    """Runs of a space of the user's own, the second of which failed."""
    return [
        make_trial(f"n{place}", None if place == 1 else place + 3.0, config=config, space="own")
        for place, config in enumerate(configs)
    ]


@pytest.mark.parametrize("key", ["lr", "train_micro_batch_size_per_gpu"])
def test_one_number_that_varies_is_the_axis(key: str) -> None:
    configs = [{"optimizer": {key: value}, "same": 1} for value in (0.4, 0.2, 0.1)]
    picture = make_picture(make_summary(own_trials(*configs)))
    assert (picture.across, picture.names) == (f"optimizer.{key}", ())
    assert picture.lines == (Line("own", ((0.1, 5.0), (0.4, 3.0)), ((0.1, 5.0), (0.4, 3.0)), (0.2,)),)
    assert picture.best == (0.1, 5.0)


@pytest.mark.parametrize(
    "values, across",
    [
        ([("adam",), ("sgd",), ("lion",)], "k0"),
        ([(True,), (False,), (1,)], "k0"),
        ([(1, 1), (1, 2), (2, 2)], "k0, k1"),
        ([(1,), (1,), (1,)], "experiment"),
    ],
)
def test_no_line_joins_configs_that_have_no_order(values: list[tuple[Any, ...]], across: str) -> None:
    configs = [{f"k{place}": one for place, one in enumerate(each)} for each in values]
    picture = make_picture(make_summary(own_trials(*configs)))
    assert (picture.across, picture.names) == (across, ("n0", "n1", "n2"))
    assert picture.lines == (Line("own", ((1, 3.0), (3, 5.0)), (), (2,)),)
    assert picture.best == (3, 5.0)


def test_names_of_many_configs_are_left_out() -> None:
    picture = make_picture(make_summary(own_trials(*[{"a": n, "b": n} for n in range(99)])))
    assert (picture.across, picture.names) == ("a, b (in the order of the experiments)", ())


ODD = [*own_trials({"$x": "a" * 200}, {"$x": "$\\frac"}, {"$x": 3})]


@pytest.mark.parametrize("trials", [TRIALS, TRIALS[:1], TRIALS[4:5], [], ODD])
def test_a_picture_can_be_drawn_whatever_ran(trials: list[Any]) -> None:
    data = draw(make_picture(make_summary(trials, metric="$loss_{")))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (960, 600)
