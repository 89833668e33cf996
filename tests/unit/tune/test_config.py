"""The config among the words of a script, its section about tuning, and what an experiment gets in its place."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode

import pytest

from dsl.errors import AutotuningError
from dsl.tune.config import (
    ConfigWord,
    Section,
    encode,
    experiment_words,
    find_config,
    find_slips,
    fingerprint,
    look_up,
    parse_config,
    read_section,
    resolve_auto,
    without_tuning,
)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--deepspeed_config a.json", ConfigWord("--deepspeed_config", 1, "a.json", True)),
        ("--deepspeed_config=a.json", ConfigWord("--deepspeed_config", 0, "a.json", True)),
        ("--deepspeed a.json -x", ConfigWord("--deepspeed", 1, "a.json", True)),
        ("--deepspeed --deepspeed_config a", ConfigWord("--deepspeed_config", 2, "a", True)),
        ("--deepspeed x --config c.json", ConfigWord("--config", 3, "c.json", False)),
        ("--deepspeed=a.json", ConfigWord("--deepspeed", 0, "a.json", True)),
        (
            "--deepspeed_config a.json --deepspeed_config b.json",
            ConfigWord("--deepspeed_config", 3, "b.json", True),
        ),
    ],
)
def test_the_config_is_found_where_the_script_reads_it(words: str, expected: ConfigWord) -> None:
    assert find_config(words.split()) == expected


@pytest.mark.parametrize("words", ["", "--deepspeed", "--deepspeed x", "--deepspeed_config", "--config big"])
def test_words_without_a_config_are_refused(words: str) -> None:
    with pytest.raises(AutotuningError, match="autotuning needs the config of the script"):
        find_config(words.split())


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1]", r"c.json: expected a JSON object, got \[1\]"),
        ('{"a": 1, "a": 2}', "c.json: duplicate key 'a': keep one of them"),
        ('{"a": NaN}', "c.json: NaN is no JSON: write a number"),
        ("{", "c.json: Expecting property name"),
        ('{"a": 1e400}', "^c.json: 1e400 is beyond all numbers: write a smaller one$"),
        ('{"a": -1e400}', "^c.json: -1e400 is beyond all numbers"),
        ('{"a": 1' + 400 * "0" + "}", "^c.json: 10+...0+ is beyond all numbers"),
        ('{"a": 1' + 5000 * "0" + "}", "^c.json: 10+...0+ is beyond all numbers"),
        ('{"a": ' + 950 * '{"a": ' + "1" + 951 * "}", "^c.json: more than 100 objects or lists inside one"),
        ('{"a": ' + 100_000 * "[" + "1" + 100_000 * "]" + "}", "^c.json: more than 100 objects or lists"),
        (
            r'{"autotuning": {"results_dir": "\ud800x"}}',
            r"^c.json: '\\ud800' is no text: write it in UTF-8$",
        ),
        (r'{"a": [{"\udfff": 1}]}', r"^c.json: '\\udfff' is no text"),
    ],
)
def test_a_config_that_is_no_strict_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(AutotuningError, match=message):
        parse_config(text, "c.json")


def test_a_config_may_be_deep_and_hold_any_text_and_large_numbers() -> None:
    text = r'{"a": [1e308, -1e308, 1' + 300 * "0" + r', "\ud83d\ude00 é"], "b": ' + 98 * "[" + 98 * "]" + "}"
    assert parse_config(text, "c.json")["a"] == [1e308, -1e308, 10**300, "\U0001f600 é"]


def test_deepspeed_gets_url_safe_base64_and_other_scripts_a_path() -> None:
    config: dict[str, object] = {"note": "\xff\xfe???>>>"}
    words = ["--deepspeed_config=a.json", "--note", "a b"]
    own = experiment_words(words, find_config(words), config, "/r/x.json", Section())
    option, _, encoded = own[0].partition("=")
    assert (option, own[1:]) == ("--deepspeed_config", ("--note", "a b"))
    assert json.loads(urlsafe_b64decode(encoded)) == config
    assert encoded == encode(config)
    assert words[0] == "--deepspeed_config=a.json", "experiments do not share and change one list of words"
    assert experiment_words(
        ["--config", "a.json"], find_config(["--config", "a.json"]), config, "/r/x.json", Section()
    ) == ("--config", "/r/x.json")


def test_options_of_arg_mappings_follow_the_config() -> None:
    section = Section(
        arg_mappings=(
            ("train_micro_batch_size_per_gpu", "--batch"),
            ("gradient_accumulation_steps", "--gas"),
            ("zero_optimization.stage", "--stage"),
            ("lr", "--lr"),
            ("absent", "--absent"),
            ("train_batch_size", "--total"),
        )
    )
    words = ["--config", "a.json", "--batch", "1", "--gas=1"]
    config: dict[str, object] = {
        "autotuning": {"lr": 3},
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 0},
        "optimizer": {"params": {"lr": 0.1}},
        "train_batch_size": "auto",
    }
    own = experiment_words(words, find_config(words), config, "p", section)
    assert " ".join(own) == "--config p --batch 8 --gas=2 --stage 0 --lr 0.1"


def test_auto_takes_the_numbers_of_the_scripts_options() -> None:
    section = Section(
        arg_mappings=(("train_micro_batch_size_per_gpu", "--b"), ("gradient_accumulation_steps", "--g"))
    )
    words = ["--b", "4", "--g=x"]
    assert resolve_auto({"gradient_accumulation_steps": "auto"}, section, words) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
    }
    given: dict[str, object] = {"train_micro_batch_size_per_gpu": 2}
    assert resolve_auto(given, section, words) == given


def test_a_fingerprint_tells_content_and_not_order() -> None:
    assert fingerprint({"a": 1, "b": 2}, ["x"]) == fingerprint({"b": 2, "a": 1}, ["x"])
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})


def test_the_config_to_train_with_is_not_that_of_an_experiment() -> None:
    assert without_tuning({"autotuning": {"enabled": True}, "a": 1}) == {"a": 1}


def test_a_key_is_found_dotted_or_in_a_section_and_never_in_the_section_about_tuning() -> None:
    config: dict[str, object] = {"autotuning": {"x": 0}, "s": {"x": 1, "t": {"y": 2}}}
    assert [look_up(config, key) for key in ("x", "s.x", "y", "s.t.y", "z")] == [1, 1, 2, 2, None]


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
        ({"model_info": {"num_params": 10**400}}, r"num_params: expected a number from 0 to 1e\+18"),
        ({"model_info": {"hidden_size": 1e300}}, r"hidden_size: expected a number from 0 to 1e\+18"),
        (
            {"model_info": {"activation_mem_per_gpu": -1}},
            r"model_info.activation_mem_per_gpu: expected a num",
        ),
        ({"end_profile_step": 2}, r"end_profile_step 2 is before start_profile_step 3"),
        ({"arg_mappings": {"a": 3}}, r"arg_mappings: expected an option of the script for 'a', got 3"),
        ({"arg_mappings": {"a": "-b\0"}}, r"arg_mappings: expected an option of the script for 'a', got "),
        ({"model_info": 3}, r"model_info: expected an object with keys, got 3"),
        ({"space": {}}, r"autotuning.space is empty: name at least one key and its values"),
        ({"space": {"a": 3}}, r"autotuning.space: expected a list of values for 'a', got 3"),
        ({"space": {"a..b": [1]}}, r"autotuning.space: 'a..b' is no key of the config"),
        ({"space": {"a": [{"x": 1}], "a.x": [2]}}, r"space: 'a.x' is a part of 'a', leave one of them out"),
        ({"space": {"a.b.c": [1], "a.b": [1]}}, r"space: 'a.b.c' is a part of 'a.b', leave one of them out"),
        ({"space": {"autotuning.seed": [1]}}, r"autotuning.space: 'autotuning.seed' is no key of the config"),
    ],
)
def test_a_value_that_means_nothing_is_refused_in_one_line(section: dict[str, object], message: str) -> None:
    with pytest.raises(AutotuningError, match=message):
        read(**section)


@pytest.mark.parametrize("name", ["train_batch_size", "train_micro_batch_size_per_gpu"])
def test_a_most_that_is_below_its_least_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(AutotuningError, match=rf"max_{name} 8 is below min_{name} 9"):
        read(**{f"min_{name}": 9, f"max_{name}": 8})


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
        *[({"metric": known}, 0) for known in ("latency", "flops", "FLOPS_per_gpu")],
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
