"""With how many workers a job goes on, as its config says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsl.elasticity.solver import accepted_world_sizes, config_path, find_section, job_world_sizes
from dsl.errors import ElasticityConfigError, ElasticityError

SECTION = {"enabled": True, "version": 0.1, "max_train_batch_size": 16, "micro_batch_sizes": [2, 3]}
OTHER = {**SECTION, "max_train_batch_size": 2, "micro_batch_sizes": [1]}
VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
NO_FILES: dict[str, str] = {}


def accepted(most: int, **section: Any) -> tuple[int, ...]:
    return accepted_world_sizes({**SECTION, "version": 0.2, **section}, most)


def test_devices_within_the_bounds_in_version_0_1() -> None:
    assert accepted_world_sizes(SECTION, 100) == (1, 2, 3, 4, 6)
    assert accepted_world_sizes(SECTION, 4) == (1, 2, 3, 4)
    assert accepted_world_sizes(SECTION, 0) == ()
    assert accepted_world_sizes({**SECTION, "min_gpus": 3, "max_gpus": 4}, 100) == (3, 4)
    assert accepted_world_sizes({**SECTION, "min_gpus": 50}, 100) == ()


def test_any_number_that_leaves_a_micro_batch_for_each_in_version_0_2() -> None:
    assert accepted(100, num_gpus_per_node=2) == (1, 2, 3, 4, 5, 6, 7, 8)
    # The smallest batch that DeepSpeed finds has no samples where the largest micro batch does not fit.
    assert accepted(100, num_gpus_per_node=2, prefer_larger_batch=False) == (1, 2, 3, 4, 5, 6)


def test_sizes_that_deepspeed_counts_wrongly_are_left_out() -> None:
    sizes = accepted(200, num_gpus_per_node=7, max_train_batch_size=2000)
    assert 61 not in sizes
    assert {60, 62, 63} <= set(sizes)
    # No number of whole nodes is served: it raises a TypeError.
    assert accepted(9, num_gpus_per_node=1, min_gpus=50, prefer_larger_batch=False) == ()
    assert accepted(9, num_gpus_per_node=1, min_gpus=50) == (1, 2, 3, 4, 5, 6, 7, 8)


def test_a_divided_model_counts_all_workers() -> None:
    """With two devices a copy, DeepSpeed goes on with n copies if n and n // 2 are on its list."""
    sizes = accepted(100, num_gpus_per_node=2, model_parallel_size=2)
    assert sizes == (4, 6, 8, 12)
    assert accepted(7, num_gpus_per_node=2, model_parallel_size=2) == (4, 6)


def test_a_section_that_no_job_accepts_is_an_error() -> None:
    with pytest.raises(ElasticityConfigError, match="does not support model-parallel training"):
        accepted_world_sizes({**SECTION, "model_parallel_size": 2}, 8)
    with pytest.raises(ElasticityConfigError, match=r"version 0\.3"):
        accepted(8, version=0.3)
    with pytest.raises(ElasticityError, match="should be divisible"):
        accepted(8, num_gpus_per_node=3, model_parallel_size=2)


@pytest.mark.parametrize(
    "words, path",
    [
        ("", None),
        ("--deepspeed_config a.json", "a.json"),
        ("--deepspeed_config=a.json --epochs 3", "a.json"),
        ("--deepspeed a.json", "a.json"),
        ("--deepspeed=a.json", "a.json"),
        ("--deepspeed --deepspeed_config a.json", "a.json"),
        ("--deepspeed_config a.json --deepspeed b.json", "a.json"),
        ("--deepspeed a.json --deepspeed b.json", "b.json"),
        ("--deepspeed", None),
        ("--deepspeed --fp16", None),
        ("--deepspeed_config= --x", None),
        ("--deepspeed_configs a.json", None),
        ("deepspeed a.json", None),
    ],
)
def test_the_argument_that_names_the_config(words: str, path: str | None) -> None:
    assert config_path(words.split()) == path


def test_the_scheduler_goes_before_the_file() -> None:
    files = {"a.json": json.dumps({"elasticity": SECTION})}
    words = ["--deepspeed_config", "a.json"]
    assert find_section({}, words, files.get) == SECTION
    assert find_section({VARIABLE: json.dumps(OTHER)}, words, files.get) == OTHER
    assert find_section({VARIABLE: json.dumps(OTHER)}, [], files.get) == OTHER
    for text in (
        "",
        "{",
        "3",
        json.dumps({**OTHER, "enabled": False}),
        json.dumps({**OTHER, "enabled": "x"}),
    ):
        assert find_section({VARIABLE: text}, words, files.get) == SECTION


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[1]",
        "{}",
        '{"elasticity": null}',
        '{"elasticity": {"enabled": false}}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_what_cannot_be_read_is_for_the_job_to_say(text: str | None) -> None:
    assert find_section({}, ["--deepspeed_config", "a.json"], lambda _path: text) is None


def test_a_file_that_may_not_be_read_is_for_the_job_to_say() -> None:
    def read_text(_path: str) -> str:
        raise PermissionError(13, "Permission denied")

    assert job_world_sizes({}, ["--deepspeed", "a.json"], read_text, 8) is None


def test_a_job_without_a_section_takes_any_number() -> None:
    def sizes(section: object) -> tuple[int, ...] | None:
        return job_world_sizes({VARIABLE: json.dumps(section)}, [], NO_FILES.get, 4)

    assert job_world_sizes({}, [], NO_FILES.get, 4) is None
    assert sizes(SECTION) == (1, 2, 3, 4)
    assert sizes({**SECTION, "min_gpus": 6}) == ()
    assert sizes({**SECTION, "micro_batch_sizes": "all"}) is None
