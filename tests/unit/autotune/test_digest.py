"""`summary.json`: what programs read of a tuning."""

from __future__ import annotations

import json
from typing import Any

from tests.support.summaries import make_summary, make_trial

from dsl._record import replace
from dsl.autotune.digest import differences, summary_json
from dsl.autotune.experiment import Resources, Summary, Tie
from dsl.autotune.section import Section

SIZE = Resources(2, 4, 3, None)


def digest(summary: Summary, **facts: Any) -> dict[str, Any]:
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
    found = digest(
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


def test_nothing_ran() -> None:
    found = digest(make_summary([], is_minimised=True))
    assert (found["best"], found["trials"], found["mode"]) == (None, [], "min")


def test_a_number_that_json_lacks_is_null() -> None:
    trial = make_trial("z0_gas1_tmbspg1", float("nan"))
    summary = replace(make_summary([trial]), value=float("inf"))
    found = digest(summary)
    assert (found["trials"][0]["value"], found["best"]["value"]) == (None, None)


def test_differences_are_what_not_all_configs_have_alike() -> None:
    configs = [
        {"lr": 1, "same": {"x": 0}, "zero": {"stage": 1}, "autotuning": {"a": 1}},
        {"lr": 2, "same": {"x": 0}, "zero": {"stage": 1, "overlap": True}, "empty": {}},
    ]
    assert differences(configs) == [{"lr": 1}, {"lr": 2, "zero.overlap": True, "empty": {}}]
    assert differences(configs[:1]) == [{}]
    assert differences([]) == []
