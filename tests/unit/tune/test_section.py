"""The ``autotuning`` section: DeepSpeed's defaults, ours, and what is refused."""

from __future__ import annotations

import pytest

from dsl.errors import AutotuningError
from dsl.tune.config import Section, find_slips, read_section


def read(**section: object) -> Section:
    return read_section({"autotuning": section})


def test_an_empty_section_has_the_defaults_of_deepspeed() -> None:
    assert read() == Section()
    assert read(enabled=True, fast=None) == Section()


def test_a_config_without_the_section_says_what_to_add() -> None:
    with pytest.raises(AutotuningError, match='no "autotuning" section: add one'):
        read_section({"train_batch_size": 8})


def test_latency_is_minimised_and_everything_else_maximised_unless_the_user_says_so() -> None:
    assert read(metric="latency").mode == "min"
    assert read(metric="step").mode == "min"
    assert read(metric="throughput").mode == "max"
    assert read(metric="val_loss", mode="min").mode == "min"


def test_words_of_arg_mappings_are_stripped() -> None:
    assert read(arg_mappings={" a ": " --b "}).arg_mappings == (("a", "--b"),)


def test_whole_numbers_may_be_written_as_floats_and_sizes_with_a_letter() -> None:
    assert read(tuner_num_trials=1e2, max_train_batch_size=0, device_memory="2K") == Section(
        tuner_num_trials=100, device_memory=2048
    )


def test_a_space_of_any_keys_is_kept_in_its_order() -> None:
    assert read(space={"optim.lr": [0.1, 0.2], "batch": [8]}).space == {"optim.lr": (0.1, 0.2), "batch": (8,)}


@pytest.mark.parametrize(
    "section, message",
    [
        ({"fast": "yes"}, r"autotuning.fast: expected true or false, got 'yes'"),
        ({"results_dir": ""}, r"autotuning.results_dir: expected a word, got ''"),
        ({"results_dir": "a\x1b[31m"}, r"autotuning.results_dir: expected a word, got 'a.x1b"),
        (
            {"max_train_batch_size": 8, "min_train_batch_size": 9},
            r"max_train_batch_size 8 is below min_train_batch_size 9",
        ),
        ({"model_info": {"num_params": "7B"}}, r"model_info.num_params: expected a number .* got '7B'"),
        ({"model_info": {"hidden_size": True}}, r"model_info.hidden_size: expected a number .* got True"),
        ({"metric": 3}, r"autotuning.metric: expected a word, got 3"),
        ({"mode": "up"}, r"autotuning.mode: expected min or max, got 'up'"),
        ({"tuner_type": "grid"}, r"tuner_type: expected one of gridsearch, random, model_based, got 'grid'"),
        ({"tuner_num_trials": 0}, r"tuner_num_trials: expected a whole number from 1 on, got 0"),
        ({"mp_size": 1.5}, r"mp_size: expected a whole number from 1 on, got 1.5"),
        ({"repeats": True}, r"repeats: expected a whole number from 0 on, got True"),
        ({"near": 2}, r"near: expected a share from 0 to 1, got 2"),
        ({"exp_timeout_s": -1}, r"exp_timeout_s: expected a number of seconds, got -1"),
        ({"device_memory": "lots"}, r"device_memory: expected bytes, or a number with K, M or G, got 'lots'"),
        ({"device_memory": 10**400}, r"device_memory: expected bytes, or a number with K, M or G, got 1000"),
        ({"device_memory": "9999999999G"}, r"device_memory: expected bytes, or a number with K, M or G"),
        (
            {"model_info": {"num_params": 10**400}},
            r"model_info.num_params: expected a number from 0 to 1e\+18",
        ),
        (
            {"model_info": {"hidden_size": 1e300}},
            r"model_info.hidden_size: expected a number from 0 to 1e\+18",
        ),
        (
            {"model_info": {"activation_mem_per_gpu": -1}},
            r"model_info.activation_mem_per_gpu: expected a num",
        ),
        ({"end_profile_step": 2}, r"end_profile_step 2 is before start_profile_step 3"),
        (
            {"min_train_micro_batch_size_per_gpu": 9, "max_train_micro_batch_size_per_gpu": 8},
            r"max_train_micro_batch_size_per_gpu 8 is below min_train_micro_batch_size_per_gpu 9",
        ),
        ({"arg_mappings": {"a": 3}}, r"arg_mappings: expected an option of the script for 'a', got 3"),
        ({"arg_mappings": {"a": "-b\0"}}, r"arg_mappings: expected an option of the script for 'a', got "),
        ({"model_info": 3}, r"model_info: expected an object with keys, got 3"),
        ({"space": {}}, r"autotuning.space is empty: name at least one key and its values"),
        ({"space": {"a": 3}}, r"autotuning.space: expected a list of values for 'a', got 3"),
        ({"space": {"a..b": [1]}}, r"autotuning.space: 'a..b' is no key of the config"),
        (
            {"space": {"a": [{"x": 1}], "a.x": [2, 3]}},
            r"space: 'a.x' is a part of 'a', leave one of them out",
        ),
        ({"space": {"a.b.c": [1], "a.b": [1]}}, r"space: 'a.b.c' is a part of 'a.b', leave one of them out"),
        ({"space": {"autotuning.seed": [1]}}, r"autotuning.space: 'autotuning.seed' is no key of the config"),
    ],
)
def test_a_value_that_means_nothing_is_refused_in_one_line(section: dict[str, object], message: str) -> None:
    with pytest.raises(AutotuningError, match=message):
        read(**section)


def test_a_key_that_means_nothing_is_told() -> None:
    section = {"enabled": True, "metric_path": "x", "spcae": {}, "fast": True, "my own": 1}
    spelled, own = find_slips({"autotuning": section})
    assert spelled.line.startswith("warning: autotuning: dsl does not know the key 'spcae'")
    assert spelled.text.endswith("leaves it to the script, did you mean space?")
    assert own.text == "autotuning: dsl does not know the key 'my own' and leaves it to the script"


@pytest.mark.parametrize(
    "section, told",
    [
        ({"metric": "loss"}, 1),
        ({"metric": "loss", "mode": None}, 1),
        ({"metric": "loss", "mode": "min"}, 0),
        ({"metric": "accuracy", "mode": "max"}, 0),
        ({"metric": "latency"}, 0),
        ({"metric": "flops"}, 0),
        ({"metric": "FLOPS_per_gpu"}, 0),
        ({}, 0),
    ],
)
def test_which_end_of_an_own_metric_counts_is_told_where_nobody_said(
    section: dict[str, object], told: int
) -> None:
    notices = find_slips({"autotuning": section})
    assert [one.text for one in notices] == told * [
        'more \'loss\' is better: where less is, say "mode": "min" in autotuning'
    ]
