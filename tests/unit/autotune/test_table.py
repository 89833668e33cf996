"""`summary.txt`: the table that DeepSpeed's users know, with true counts."""

from __future__ import annotations

import pytest
from tests.support.summaries import make_summary, make_trial

from dsl._record import replace
from dsl.autotune.experiment import Space
from dsl.autotune.table import duration, summary_table, summary_text

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
