"""The config among the words of a script, and what an experiment gets in its place."""

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
    fingerprint,
    look_up,
    parse_config,
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
