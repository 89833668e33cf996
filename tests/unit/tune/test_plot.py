"""The plot: what it shows, and that it can be drawn."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tests.support.summaries import make_summary, make_trial

from dsl.tune.experiment import Summary
from dsl.tune.show import FAILED_HEIGHT, draw, make_figure

pytestmark = pytest.mark.needs_package("matplotlib")
TRIALS = [
    make_trial("profile_model_info", 1.0, kind="profile", config={}, space=""),
    make_trial("z0_gas1_tmbspg4", 7.0),
    make_trial("z0_gas1_tmbspg1", 5.0),
    make_trial("z0_gas2_tmbspg4", 8.0),
    make_trial("z0_gas1_tmbspg16"),
    make_trial("z1_gas1_tmbspg8", 9.0),
]


class Drawn:
    """What a figure shows: its texts, and where each line and mark is, by its label."""

    def __init__(self, summary: Summary) -> None:
        figure = make_figure(summary)
        (axes,) = figure.axes
        self.title = figure.get_suptitle()
        self.across, self.up = axes.get_xlabel(), axes.get_ylabel()
        self.names = [one.get_text() for one in axes.get_xticklabels()]
        self.points: list[list[tuple[float, float]]] = []
        """Of what has no label: every run that has a value, where a line joins the best."""
        self.marks: dict[str, list[tuple[float, float]]] = {}
        for line in axes.get_lines():
            label, places = str(line.get_label()), [(float(x), float(y)) for x, y in line.get_xydata()]
            if label.startswith("_"):
                self.points.append(places)
            else:
                self.marks[label] = places


def test_a_line_for_each_stage_over_the_micro_batch() -> None:
    drawn = Drawn(make_summary(TRIALS))
    assert (drawn.across, drawn.up) == ("train_micro_batch_size_per_gpu", "throughput (more is better)")
    assert drawn.title == "throughput of 5 experiments, the best: z1_gas1_tmbspg8 with 9"
    assert drawn.points == [[(1, 5.0), (4, 7.0), (4, 8.0)], [(8, 9.0)]]
    assert drawn.marks == {
        "ZeRO stage 0": [(1, 5.0), (4, 8.0)],
        "ZeRO stage 0, failed": [(16, FAILED_HEIGHT)],
        "ZeRO stage 1": [(8, 9.0)],
        "best": [(8, 9.0)],
    }


def test_the_best_of_a_metric_that_is_minimised_is_the_least() -> None:
    drawn = Drawn(make_summary(TRIALS, is_minimised=True))
    assert drawn.marks["ZeRO stage 0"] == [(1.0, 5.0), (4.0, 7.0)]
    assert drawn.up.endswith("(less is better)")


def own_trials(*configs: dict[str, Any]) -> list[Any]:
    """Runs of a space of the user's own, the second of which failed."""
    return [
        make_trial(f"n{place}", None if place == 1 else place + 3.0, config=config, space="own")
        for place, config in enumerate(configs)
    ]


@pytest.mark.parametrize("key", ["lr", "train_micro_batch_size_per_gpu"])
def test_one_number_that_varies_is_the_axis(key: str) -> None:
    configs = [{"optimizer": {key: value}, "same": 1} for value in (0.4, 0.2, 0.1)]
    drawn = Drawn(make_summary(own_trials(*configs)))
    assert drawn.across == f"optimizer.{key}"
    assert drawn.points == [[(0.1, 5.0), (0.4, 3.0)]]
    assert drawn.marks == {
        "own": [(0.1, 5.0), (0.4, 3.0)],
        "own, failed": [(0.2, FAILED_HEIGHT)],
        "best": [(0.1, 5.0)],
    }


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
    drawn = Drawn(make_summary(own_trials(*configs)))
    assert (drawn.across, drawn.names) == (across, ["n0", "n1", "n2"])
    assert drawn.points == []
    assert drawn.marks == {
        "own": [(1, 3.0), (3, 5.0)],
        "own, failed": [(2, FAILED_HEIGHT)],
        "best": [(3, 5.0)],
    }


def test_names_of_many_configs_are_left_out() -> None:
    drawn = Drawn(make_summary(own_trials(*[{"a": n, "b": n} for n in range(99)])))
    assert drawn.across == "a, b (in the order of the experiments)"
    assert "n1" not in drawn.names


ODD = [*own_trials({"$x": "a" * 200}, {"$x": "$\\frac"}, {"$x": 3})]


@pytest.mark.parametrize("trials", [TRIALS, TRIALS[:1], TRIALS[4:5], [], ODD])
def test_a_picture_can_be_drawn_whatever_ran(trials: list[Any]) -> None:
    data = draw(make_summary(trials, metric="$loss_{"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (960, 600)
