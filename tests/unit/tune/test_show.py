"""What people and programs read of a tuning: `summary.txt` and `summary.json`, the bar while it runs, and the picture."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsl._record import replace
from dsl.errors import AutotuningError
from dsl.machine.files import Folder
from dsl.tune.config import Section
from dsl.tune.experiment import Experiment, Resources, Result, Space, Summary, Tie, Trial
from dsl.tune.show import (
    FAILED_HEIGHT,
    Progress,
    differences,
    draw,
    duration,
    make_figure,
    summary_json,
    summary_table,
    summary_text,
)

SIZE = Resources(2, 4, 3, None)


def make_trial(
    name: str,
    value: float | None = None,
    *,
    config: dict[str, Any] | None = None,
    metric: str = "throughput",
    **facts: Any,
) -> Trial:
    """A run of the experiment ``z1_gas2_tmbspg8`` and such; without a value it was out of memory."""
    space = facts.pop("space", name.partition("_")[0])
    kind = facts.pop("kind", "run")
    if config is None:
        stage, size = int(space[1:]), int(name.rpartition("tmbspg")[2])
        config = {"train_micro_batch_size_per_gpu": size, "zero_optimization": {"stage": stage}}
    experiment = Experiment(name, config, kind, space, facts.pop("repeat", 0))
    metrics = {} if value is None else {metric: value}
    outcome, reason = ("ok", "") if value is not None else ("oom", "out of memory")
    result = Result(outcome, metrics, reason, 0 if value is not None else 1, 1.5)  # type: ignore[arg-type]
    return Trial(experiment, result, value)


def make_summary(trials: Sequence[Trial], *, is_minimised: bool = False, **facts: Any) -> Summary:
    """What a search that has run just these would say."""
    runs = [one for one in trials if one.experiment.kind == "run"]
    names = list(dict.fromkeys(one.experiment.space for one in runs))
    better = min if is_minimised else max

    def best_of(members: list[Trial]) -> Trial | None:
        found = [one for one in members if one.value is not None]
        return better(found, key=lambda one: one.value or 0.0) if found else None

    spaces = []
    for name in names:
        members = [one for one in runs if one.experiment.space == name and not one.experiment.repeat]
        best = best_of(members)
        spaces.append(
            Space(name, len(members), best.experiment.name if best else "", best.value if best else None)
        )
    best = best_of([one for one in runs if not one.experiment.repeat])
    return Summary(
        metric=facts.pop("metric", "throughput"),
        is_minimised=is_minimised,
        best=best.experiment if best else None,
        value=best.value if best else None,
        spaces=tuple(spaces),
        ties=facts.pop("ties", ()),
        trials=tuple(trials),
        ended=facts.pop("ended", "all stages are tried"),
        notes=facts.pop("notes", ()),
    )


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
    trials = [make_trial("profile_model_info", 1.0, kind="profile", config={}, space="")]
    trials += [make_trial("z0_gas1_tmbspg1", 5.0), make_trial("z0_gas1_tmbspg2", 9.0)]
    trials += [make_trial("z0_gas1_tmbspg4"), make_trial("z0_gas1_tmbspg2_r1", 8.0, repeat=1, config={})]
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


class Told:
    """A progress without a terminal, and what it has said."""

    def __init__(self, folder: Path, **section: Any) -> None:
        self.lines: list[str] = []
        self.progress = Progress(
            lambda notice: self.lines.append(notice.line),
            Section(**section),
            Folder(str(folder), AutotuningError),
            Resources(1, 2, 1, None),
            is_quiet=True,
        )

    def run(self, *trials: Trial, is_reused: bool = False) -> list[str]:
        for one in trials:
            self.progress.began(one.experiment)
            self.progress.ended(one.experiment, one.result, is_reused=is_reused)
        return self.lines


def test_a_line_for_each_experiment_with_the_best_so_far(tmp_path: Path) -> None:
    lines = Told(tmp_path).run(
        make_trial("profile_model_info", 1.0, kind="profile", config={}, space=""),
        make_trial("z0_gas1_tmbspg1", 5.0),
        make_trial("z0_gas1_tmbspg2", 4.0),
        make_trial("z0_gas1_tmbspg4", 6.0),
        make_trial("z0_gas1_tmbspg8"),
    )
    assert lines == [
        "profile_model_info: done",
        "z0_gas1_tmbspg1: throughput 5, the best so far",
        "z0_gas1_tmbspg2: throughput 4",
        "z0_gas1_tmbspg4: throughput 6, the best so far",
        "z0_gas1_tmbspg8: oom, out of memory",
    ]


def test_latency_is_best_where_it_is_least_and_flops_have_two_names(tmp_path: Path) -> None:
    trials = [make_trial(f"z0_gas1_tmbspg{n}", value, metric="latency") for n, value in ((1, 5.0), (2, 4.0))]
    assert (
        Told(tmp_path, metric="latency", mode="min").run(*trials)[-1].endswith("latency 4, the best so far")
    )
    trial = make_trial("z0_gas1_tmbspg1", 5.0, metric="FLOPS_per_gpu")
    assert Told(tmp_path, metric="FLOPS").run(trial)[-1].endswith("FLOPS 5, the best so far")


def test_what_an_experiment_says_is_harmless_and_a_reused_one_is_named(tmp_path: Path) -> None:
    trial = make_trial("z0_gas1_tmbspg1")
    told = Told(tmp_path)
    from dsl._record import replace

    (line,) = told.run(replace(trial, result=replace(trial.result, reason="no\x1b[2Jway")), is_reused=True)
    assert line == "z0_gas1_tmbspg1: oom, noway, known from before: remove its folder to run it again"


@pytest.mark.needs_package("matplotlib")
def test_what_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials = [make_trial("z0_gas1_tmbspg1", 5.0), make_trial("z0_gas1_tmbspg2", 4.0)]
    told = Told(tmp_path)
    told.run(trials[0], is_reused=True)
    told.run(trials[1])
    told.progress.finish(make_summary(trials, notes=("stage 3 is left out",)))
    text = (tmp_path / "summary.txt").read_text()
    assert capsys.readouterr().out == text.partition("\n\n")[0] + "\n"
    found = json.loads((tmp_path / "summary.json").read_text())
    assert [one["is_reused"] for one in found["trials"]] == [True, False]
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["summary.json", "summary.png", "summary.txt"]
    assert told.lines[-3:] == [
        "stage 3 is left out",
        "all stages are tried",
        f"summary.txt, summary.json, summary.png in {tmp_path}",
    ]


def test_a_closed_stdout_costs_nothing_but_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path)
    monkeypatch.setattr("sys.stdout", None)  # as Python has it where it was closed before the start
    told.progress.finish(make_summary([make_trial("z0_gas1_tmbspg1", 5.0)]))
    assert (tmp_path / "summary.txt").exists()


def test_without_matplotlib_a_line_says_so_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = Told(tmp_path)
    assert told.lines == [
        "warning: matplotlib is not installed, so there will be no plot: pip install matplotlib"
    ]
    told.progress.finish(make_summary([]))
    assert told.lines[1:] == ["all stages are tried", f"summary.txt, summary.json in {tmp_path}"]


def test_what_cannot_be_written_is_said_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_picture: object) -> bytes:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("dsl.tune.show.draw", broken)
    (tmp_path / "summary.json.new").mkdir()
    told = Told(tmp_path)
    told.progress.finish(make_summary([]))
    assert told.lines[1:] == [
        f"warning: cannot write {tmp_path}/summary.json: Is a directory",
        f"warning: {tmp_path}/summary.png was not made: RuntimeError: no fonts",
        f"summary.txt in {tmp_path}",
    ]


TRIALS_PLOT = [
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


@pytest.mark.needs_package("matplotlib")
def test_a_line_for_each_stage_over_the_micro_batch() -> None:
    drawn = Drawn(make_summary(TRIALS_PLOT))
    assert (drawn.across, drawn.up) == ("train_micro_batch_size_per_gpu", "throughput (more is better)")
    assert drawn.title == "throughput of 5 experiments, the best: z1_gas1_tmbspg8 with 9"
    assert drawn.points == [[(1, 5.0), (4, 7.0), (4, 8.0)], [(8, 9.0)]]
    assert drawn.marks == {
        "ZeRO stage 0": [(1, 5.0), (4, 8.0)],
        "ZeRO stage 0, failed": [(16, FAILED_HEIGHT)],
        "ZeRO stage 1": [(8, 9.0)],
        "best": [(8, 9.0)],
    }


@pytest.mark.needs_package("matplotlib")
def test_the_best_of_a_metric_that_is_minimised_is_the_least() -> None:
    drawn = Drawn(make_summary(TRIALS_PLOT, is_minimised=True))
    assert drawn.marks["ZeRO stage 0"] == [(1.0, 5.0), (4.0, 7.0)]
    assert drawn.up.endswith("(less is better)")


def own_trials(*configs: dict[str, Any]) -> list[Any]:
    """Two runs of the user's own space. The second one failed."""
    return [
        make_trial(f"n{place}", None if place == 1 else place + 3.0, config=config, space="own")
        for place, config in enumerate(configs)
    ]


@pytest.mark.needs_package("matplotlib")
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


@pytest.mark.needs_package("matplotlib")
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


@pytest.mark.needs_package("matplotlib")
def test_names_of_many_configs_are_left_out() -> None:
    drawn = Drawn(make_summary(own_trials(*[{"a": n, "b": n} for n in range(99)])))
    assert drawn.across == "a, b (in the order of the experiments)"
    assert "n1" not in drawn.names


ODD = [*own_trials({"$x": "a" * 200}, {"$x": "$\\frac"}, {"$x": 3})]


@pytest.mark.needs_package("matplotlib")
@pytest.mark.parametrize("trials", [TRIALS_PLOT, TRIALS_PLOT[:1], TRIALS_PLOT[4:5], [], ODD])
def test_a_picture_can_be_drawn_whatever_ran(trials: list[Any]) -> None:
    data = draw(make_summary(trials, metric="$loss_{"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (960, 600)
