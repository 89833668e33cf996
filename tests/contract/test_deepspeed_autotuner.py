"""What the search decides, against DeepSpeed 0.19.8 (the golden says how each answer was got).

``python -m tests.contract.record_autotuner --compare 300`` asks both about many more machines.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.autotuner_inputs import ask_ours, is_equal
from tests.contract.golden_file import cases

from dsl.tune.config import STAGE, ZERO
from dsl.tune.spaces import zero_grid


@pytest.mark.parametrize("recorded", cases("autotuner"), ids=lambda one: one["case"]["name"])
def test_the_same_experiments_run_in_the_same_order(recorded: dict[str, Any]) -> None:
    assert is_equal(ask_ours(recorded["case"]), recorded["mended"])


def test_the_golden_holds_decisions_of_all_kinds() -> None:
    """Or the test above would say little."""
    ran = [one for recorded in cases("autotuner") for one in recorded["mended"]["ran"]]
    assert len(ran) > 100
    assert any(one.startswith("z3_ap") for one in ran), "a full space"
    # DeepSpeed's look below the largest micro batch reads the metrics of another experiment: it stops, or goes on, by chance.
    assert any(one["raw"]["ran"] != one["mended"]["ran"] for one in cases("autotuner"))


@pytest.mark.parametrize("recorded", cases("autotuner", "spaces"), ids=lambda one: one["space"])
def test_full_spaces_have_deepspeeds_configs_and_names(recorded: dict[str, Any]) -> None:
    stage = recorded["stage"]
    grid = zero_grid(stage, recorded["config"], recorded["sizes"], 8, hidden_size=0, workers=2)
    assert sorted(point.name for point in grid.points) == recorded["names"]
    assert all(point.config[ZERO][STAGE] == stage for point in grid.points)  # type: ignore[index]
    # DeepSpeed names a space before it has read what else the user wants tried.
    assert grid.name.startswith(recorded["space"])
