"""`summary.txt` and `summary.json`: what people and programs read of a tuning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.summaries import make_summary, make_trial

from dsl._record import replace
from dsl.tune.config import Section
from dsl.tune.experiment import Resources, Space, Summary, Tie
from dsl.tune.show import differences, duration, summary_json, summary_table, summary_text

SIZE = Resources(2, 4, 3, None)


def read(summary: Summary, **facts: Any) -> dict[str, Any]:
    text = summary_json(summary, facts.pop("section", Section()), SIZE, 12.34567, **facts)
    assert text.endswith("}\n")
    found: dict[str, Any] = json.loads(text)
    return found


TRIALS = [
    make_trial("profile_model_info", 1.0, kind="profile", config={"a": 1}, space=""),
    make_trial("z0_gas1_tmbspg1", 5.0),
    make_trial("z1_gas1_tmbspg2", 9.0),
    make_trial("z1_gas1_tmbspg4"),
]


def test_the_whole_of_a_tuning() -> None:
    found = read(
        make_summary(TRIALS, ties=(Tie("z1_gas1_tmbspg2", 8.5, 9.5, 2),), notes=("stage 3 is left out",)),
        section=Section(seed=7),
        reused={"z0_gas1_tmbspg1"},
    )
    assert [found[key] for key in ("format", "metric", "mode", "seed")] == [1, "throughput", "max", 7]
    assert (found["elapsed_s"], found["experiments"]) == (12.346, 3)
    assert found["resources"] == {"nodes": 2, "slots_per_node": 4, "side_by_side": 3}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization.stage": 1}
    assert found["best"] == {"name": "z1_gas1_tmbspg2", "space": "z1", "value": 9.0, "config": config}
    assert found["spaces"][1] == {"name": "z1", "configs": 2, "best": "z1_gas1_tmbspg2", "value": 9.0}
    assert found["ties"] == [{"name": "z1_gas1_tmbspg2", "least": 8.5, "most": 9.5, "runs": 2}]
    assert found["notes"] == ["stage 3 is left out"]
    profile, reused, best, failed = found["trials"]
    assert (profile["kind"], profile["space"], profile["config"]) == ("profile", None, {})
    assert (reused["is_reused"], best["is_reused"]) == (True, False)
    assert (best["config"], best["metrics"], best["value"]) == (config, {"throughput": 9.0}, 9.0)
    assert (failed["outcome"], failed["reason"], failed["value"], failed["exit_code"]) == (
        "oom",
        "out of memory",
        None,
        1,
    )


def test_nothing_ran_for_programs() -> None:
    found = read(make_summary([], is_minimised=True))
    assert (found["best"], found["trials"], found["mode"]) == (None, [], "min")


def test_a_number_that_json_lacks_is_null() -> None:
    trial = make_trial("z0_gas1_tmbspg1", float("nan"))
    summary = replace(make_summary([trial]), value=float("inf"))
    found = read(summary)
    assert (found["trials"][0]["value"], found["best"]["value"]) == (None, None)


def test_differences_are_what_not_all_configs_have_alike() -> None:
    configs = [
        {"lr": 1, "same": {"x": 0}, "zero": {"stage": 1}, "autotuning": {"a": 1}},
        {"lr": 2, "same": {"x": 0}, "zero": {"stage": 1, "overlap": True}, "empty": {}},
    ]
    assert differences(configs) == [{"lr": 1}, {"lr": 2, "zero.overlap": True, "empty": {}}]
    assert differences(configs[:1]) == [{}]
    assert differences([]) == []


# What `tabulate(rows, headers, tablefmt="pipe")` of tabulate 0.10.0 makes of the same rows.
ANSWERS = {
    "points below one another": (
        [("z0", 4, "z0_gas1_tmbspg2", 59.0229), ("z1", 12, "z1_gas2_tmbspg16", 1158.1)],
        """\
| tuning_space   |   num_experiments |   best_metric_val | best_exp_name    |
|:---------------|------------------:|------------------:|:-----------------|
| z0             |                 4 |           59.0229 | z0_gas1_tmbspg2  |
| z1             |                12 |         1158.1    | z1_gas2_tmbspg16 |
| global         |                16 |         1158.1    | z1_gas2_tmbspg16 |""",
    ),
    "whole numbers": (
        [("z0", 4, "a", 3.0)],
        """\
| tuning_space   |   num_experiments |   best_metric_val | best_exp_name   |
|:---------------|------------------:|------------------:|:----------------|
| z0             |                 4 |                 3 | a               |
| global         |                 4 |                 3 | a               |""",
    ),
    "small and large": (
        [("z0", 4, "b", 1e-07), ("z1", 4, "a", 123456789.123)],
        """\
| tuning_space   |   num_experiments |   best_metric_val | best_exp_name   |
|:---------------|------------------:|------------------:|:----------------|
| z0             |                 4 |       1e-07       | b               |
| z1             |                 4 |       1.23457e+08 | a               |
| global         |                 8 |       1.23457e+08 | a               |""",
    ),
    "a space in which nothing ran": (
        [("z0", 4, "", None), ("z1", 0, "a", 5.25)],
        """\
| tuning_space   |   num_experiments |   best_metric_val | best_exp_name   |
|:---------------|------------------:|------------------:|:----------------|
| z0             |                 4 |                   |                 |
| z1             |                 0 |              5.25 | a               |
| global         |                 4 |              5.25 | a               |""",
    ),
    "some without a point": (
        [("z0", 4, "a", 100.0), ("z1", 4, "b", 0.25)],
        """\
| tuning_space   |   num_experiments |   best_metric_val | best_exp_name   |
|:---------------|------------------:|------------------:|:----------------|
| z0             |                 4 |            100    | a               |
| z1             |                 4 |              0.25 | b               |
| global         |                 8 |            100    | a               |""",
    ),
}


@pytest.mark.parametrize("rows, table", ANSWERS.values(), ids=list(ANSWERS))
def test_the_table_is_that_of_tabulate(rows: list[tuple[str, int, str, float | None]], table: str) -> None:
    spaces = tuple(Space(name, count, best, value) for name, count, best, value in rows)
    best = max(spaces, key=lambda one: -1.0 if one.value is None else one.value)
    trial = make_trial(best.best, best.value, config={}, space=best.name)
    summary = replace(make_summary([trial]), spaces=spaces)
    assert summary_table(summary) == table


def test_nothing_ran() -> None:
    lines = summary_text(make_summary([]), 0.5).splitlines()
    assert lines[2] == "| global         |                 0 |                   |                 |"
    assert lines[3:] == ["", "Tuning completed in 0:00:00.500000. Total number of experiments: 0."]


def test_a_config_counts_once_and_its_repeats_are_runs() -> None:
    """DeepSpeed counts a config again whenever it is used again, and the profile as a run less one."""
    trials = [
        make_trial("profile_model_info", 1.0, kind="profile", config={}, space=""),
        make_trial("z0_gas1_tmbspg1", 5.0),
        make_trial("z0_gas1_tmbspg2", 9.0),
        make_trial("z0_gas1_tmbspg4"),
        make_trial("z0_gas1_tmbspg2_r1", 8.0, repeat=1, config={}),
    ]
    text = summary_text(make_summary(trials), 3725.25)
    assert [line.split()[3] for line in text.splitlines()[2:4]] == ["3", "3"]
    assert text.endswith("|\n\nTuning completed in 1:02:05.250000. Total number of experiments: 4.\n")


def test_a_name_cannot_break_the_table() -> None:
    trial = make_trial("a|b", 1.0, config={}, space="x|y")
    for line in summary_table(make_summary([trial])).splitlines():
        assert line.replace("\\|", "").count("|") == 5


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0:00:00.000000"), (59.9999999, "0:01:00.000000"), (90_000.000001, "25:00:00.000001")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
