"""The plot: what is decided before anything is drawn, and that it can be drawn."""

from __future__ import annotations

import builtins
import struct
from typing import Any

import pytest
from tests.support.summaries import make_summary, make_trial

from dsl.autotune.plot import Line, draw, make_picture
from dsl.errors import DslError

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
    assert (picture.across, picture.up) == ("micro batch of a worker", "throughput (more is better)")
    assert picture.lines == (
        Line("ZeRO stage 0", ((1, 5.0), (4, 7.0), (4, 8.0)), ((1, 5.0), (4, 8.0)), (16,)),
        Line("ZeRO stage 1", ((8, 9.0),), ((8, 9.0),), ()),
    )
    assert picture.best == (8, 9.0)


def test_the_best_of_a_metric_that_is_minimised_is_the_least() -> None:
    picture = make_picture(make_summary(TRIALS, is_minimised=True))
    assert picture.lines[0].tops == ((1.0, 5.0), (4.0, 7.0))
    assert picture.up.endswith("(less is better)")


@pytest.mark.parametrize("key", ["lr", "train_micro_batch_size_per_gpu"])
def test_other_spaces_are_shown_in_their_order(key: str) -> None:
    values = [3.0, None, 4.0]
    trials = [
        make_trial(f"lr{place}", value, config={key: place * 0.1}, space="own")
        for place, value in enumerate(values)
    ]
    picture = make_picture(make_summary(trials))
    assert picture.across == "experiment"
    assert picture.lines == (Line("own", ((1, 3.0), (3, 4.0)), ((1, 3.0), (3, 4.0)), (2,)),)
    assert picture.best == (3, 4.0)


@pytest.mark.parametrize("trials", [TRIALS, TRIALS[:1], TRIALS[4:5], []])
def test_a_picture_can_be_drawn_whatever_ran(trials: list[Any]) -> None:
    data = draw(make_picture(make_summary(trials)))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (960, 600)


def test_without_matplotlib_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DslError, match=r"^no plot: matplotlib is not installed \(pip install matplotlib\)$"):
        draw(make_picture(make_summary(TRIALS)))
