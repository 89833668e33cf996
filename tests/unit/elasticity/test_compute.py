"""Batch and world sizes of elastic jobs: the numbers of DeepSpeed's documentation and tests, and what it does not catch.

Right numbers are held by the answers of DeepSpeed in tests/contract."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from dsl.elasticity import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from dsl.elasticity.solver import accepted_world_sizes, config_path, find_section, job_world_sizes

TARGET = "0.19.7"
DOCUMENTED = {
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
}
SMALL = {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
DIVIDED = {**DOCUMENTED, "num_gpus_per_node": 8, "model_parallel_size": 4}


def solve(section: dict[str, Any], *asked: Any, version: Any = 0.1, target: str = TARGET) -> tuple[Any, ...]:
    return compute_elastic_config(
        {"elasticity": {"enabled": True, "version": version, **section}}, target, *asked
    )


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "DEEPSPEED_ELASTICITY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_the_largest_numbers_take_no_time() -> None:
    section = {
        "max_train_batch_size": 999_999_999,
        "micro_batch_sizes": [1, 2, 3, 5, 7, 11, 13],
        "max_gpus": 999_999_999,
    }
    batch, sizes = solve(section)
    assert batch <= 999_999_999
    assert all(batch % size == 0 for size in sizes)
    assert len(sizes) > 500


def test_a_world_size_beyond_the_largest_batch_is_refused() -> None:
    section = {**SMALL, "num_gpus_per_node": 8}
    with pytest.raises(
        ElasticityIncompatibleWorldSize, match=r"^world size 1001 is not valid: the smallest micro batch"
    ):
        solve(section, 1001, version=0.2)


def test_seven_devices_a_node_count_exactly() -> None:
    """In floating point 61 / 7 * 7 is less than 61."""
    assert solve({**SMALL, "num_gpus_per_node": 7}, 61, version=0.2) == (1952, [61], 4)


@pytest.mark.parametrize("workers", ["0", "2", "18"])
def test_workers_that_make_no_copies_of_the_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", workers)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=rf"^WORLD_SIZE {workers} is not valid"):
        solve(DIVIDED, version=0.2)


@pytest.mark.parametrize("text", [None, "", "x", "-4", "4.0", "²"])
def test_a_world_size_that_nobody_tells(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    if text is not None:
        monkeypatch.setenv("WORLD_SIZE", text)
    for asked in ((0, False, 0.2), (0, True, 0.2), (0, True, 0.1)):
        with pytest.raises(
            ElasticityConfigError, match="needs a world size here: give one, or set WORLD_SIZE"
        ):
            solve(SMALL, *asked[:2], version=asked[2])


def test_the_micro_batch_of_version_0_1_needs_a_world_size_that_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    assert solve(SMALL, 0, True)[2] == 4
    monkeypatch.setenv("WORLD_SIZE", "13")
    with pytest.raises(
        ElasticityIncompatibleWorldSize, match=r"^world size 13 is not valid, valid are 1, 2, 3"
    ):
        solve(SMALL, 0, True)


def test_a_whole_number_with_a_fraction_of_nothing_is_one() -> None:
    """JSON writes 10000 also as 1e4, and other kinds of parallelism divide the world size."""
    assert solve({**DOCUMENTED, "max_train_batch_size": 1e4}, 64.0) == solve(DOCUMENTED, 64)


@pytest.mark.parametrize("size", [-1, 4.5, float("inf"), float("nan"), "4", None])
def test_what_is_no_number_of_workers_is_refused(size: Any) -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize, match="is not a number of workers"):
        solve(SMALL, size)


def test_a_batch_that_serves_no_world_size_is_refused() -> None:
    section = {"max_train_batch_size": 100, "micro_batch_sizes": [8], "min_gpus": 50, "max_gpus": 60}
    with pytest.raises(ElasticityConfigError, match="batch size 96 serves no world size of 50 to 60 GPUs"):
        solve(section)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="batch size 96 serves no world size"):
        solve(section, 52)


@pytest.mark.parametrize(
    "config, error, text",
    [
        (None, ElasticityConfigError, "expected ds_config to be a dictionary, got None"),
        ("x", ElasticityConfigError, "expected ds_config to be a dictionary, got 'x'"),
        ({}, ElasticityConfigError, "elasticity is missing from the config"),
        ({"elasticity": None}, ElasticityConfigError, "elasticity: expected an object with keys, got None"),
        ({"elasticity": []}, ElasticityConfigError, r"elasticity: expected an object with keys, got \[\]"),
        ({"elasticity": {}}, ElasticityConfigError, "elasticity is disabled, set enabled to true"),
        ({"elasticity": {"enabled": "no"}}, ElasticityConfigError, "enabled: expected true or false, got 'no'"),
        ({"elasticity": {"enabled": True}}, ElasticityConfigError, "elasticity config missing max_train_batch_size"),
        ({"elasticity": {"enabled": True, "max_train_batch_size": 4}}, ElasticityConfigError, "missing micro_batch_sizes"),
    ],
)  # fmt: skip
def test_configs_without_a_section_to_solve(config: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}|{text}") as caught:
        compute_elastic_config(config, TARGET)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "key, value, text",
    [
        ("micro_batch_sizes", 5, "to be a list of micro batches, got 5"),
        ("micro_batch_sizes", [], "is empty, name at least one micro batch"),
        ("micro_batch_sizes", ["a", None, 0.5], "to only contain positive integers"),
        ("micro_batch_sizes", [2, 0.5, 4], "to only contain positive integers"),
        ("micro_batch_sizes", [2, -4], "to only contain positive integers"),
        ("micro_batch_sizes", [True], "to only contain positive integers"),
        ("micro_batch_sizes", [4000], "all micro batches must be at most 2000"),
        ("max_train_batch_size", "2000", "expected a whole number, got '2000'"),
        ("max_train_batch_size", 2000.5, "expected a whole number, got 2000.5"),
        ("max_train_batch_size", 10**9, "must be below 1000000000"),
        ("max_train_batch_size", 0, "all micro batches must be at most 0"),
        ("max_train_batch_size", "x\ny" * 100, "expected a whole number, got 'x"),
        ("min_gpus", -1, "min_gpus must be at least 1, got -1"),
        ("max_gpus", -1, "max_gpus must be at least 1, got -1"),
        ("min_gpus", 20000, "min_gpus cannot be greater than max_gpus"),
        ("min_gpus", None, "expected a whole number, got None"),
        ("model_parallel_size", 0, "model_parallel_size must be at least 1"),
        ("num_gpus_per_node", 0, "num_gpus_per_node must be at least 1"),
        ("min_time", -1, "min_time needs to be >= 0"),
        ("min_time", "soon", "min_time needs to be >= 0"),
        ("version", "x", "expected a number, got 'x'"),
        ("version", 0.3, "version 0.3: expected 0.1 or 0.2"),
        ("version", "0.3", "version 0.3: expected 0.1 or 0.2"),
        ("version", 0.15, "version 0.15: expected 0.1 or 0.2"),
        ("version", True, "expected a number, got True"),
        ("version", "nan", "version nan: expected 0.1 or 0.2"),
        ("version", 10**400, "expected a number, got 1000"),
        ("prefer_larger_batch", "false", "expected true or false, got 'false'"),
        ("ignore_non_elastic_batch_info", [], "expected true or false"),
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_one_line(key: str, value: Any, text: str) -> None:
    section = {**SMALL, "version": 0.1, key: value}
    with pytest.raises(ElasticityConfigError) as caught:
        compute_elastic_config({"elasticity": {"enabled": True, **section}}, TARGET)
    assert text in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


def test_a_divided_model_needs_version_0_2_and_nodes_that_can_be_divided() -> None:
    with pytest.raises(ElasticityConfigError, match=r"version 0\.1 does not support model-parallel training"):
        solve({**SMALL, "model_parallel_size": 2})
    section = {**SMALL, "num_gpus_per_node": 8, "model_parallel_size": 16}
    with pytest.raises(
        ElasticityError, match=r"per node \(8\) should be divisible by model parallel size \(16\)"
    ):
        solve(section, 16, version=0.2)


@pytest.mark.parametrize("target", ["0.2", "0.3.8rc1", "latest", "", "²"])
def test_versions_without_elasticity(target: str) -> None:
    with pytest.raises(ElasticityError, match=r"is not compatible with elasticity, which came with 0\.3\.8$"):
        solve(SMALL, target=target)


def test_the_config_object_has_the_names_of_deepspeed() -> None:
    config = ElasticityConfig({})
    assert (config.enabled, config.max_acceptable_batch_size, config.micro_batches) == (
        False,
        2000,
        [2, 4, 6],
    )
    assert (config.min_gpus, config.max_gpus, config.min_time, config.version) == (1, 10000, 0, 0.2)
    assert (config.num_gpus_per_node, config.model_parallel_size) == (1, 1)
    assert (config.prefer_larger_batch_size, config.ignore_non_elastic_batch_info) == (True, False)
    assert '"max_acceptable_batch_size": 2000' in repr(config)
    assert config.repr()["micro_batches"] == [2, 4, 6]


def test_whether_a_config_is_elastic() -> None:
    assert not elasticity_enabled({})
    assert not elasticity_enabled({"elasticity": {}})
    assert elasticity_enabled({"elasticity": {"enabled": True}}) is True
    with pytest.raises(ElasticityConfigError, match="expected an object with keys"):
        elasticity_enabled({"elasticity": 3})


def test_a_scheduler_that_has_seen_another_config(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"enabled": True, **SMALL}
    monkeypatch.setenv(
        "DEEPSPEED_ELASTICITY_CONFIG",
        '{"enabled": true, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4], "version": "0.2"}',
    )
    with pytest.raises(
        ElasticityConfigError,
        match=r"^elastic config micro_batches=\[2, 4\] seen by resource scheduler does not match config passed "
        r"to runtime micro_batches=\[2, 4, 6\]$",
    ):
        ensure_immutable_elastic_config(section)
    ensure_immutable_elastic_config({**section, "micro_batch_sizes": [2, 4], "max_gpus": 7})


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"enabled": true}'])
def test_a_scheduler_that_writes_no_section_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", text)
    with pytest.raises(ElasticityConfigError, match=r"^DEEPSPEED_ELASTICITY_CONFIG: ") as caught:
        ensure_immutable_elastic_config({"enabled": True, **SMALL})
    assert str(caught.value).isprintable()


def test_a_scheduler_that_says_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dsl"):
        ensure_immutable_elastic_config({"enabled": True, **SMALL})
    assert "DEEPSPEED_ELASTICITY_CONFIG is not set" in caplog.text


SECTION = {"enabled": True, "version": 0.1, "max_train_batch_size": 16, "micro_batch_sizes": [2, 3]}
OTHER = {**SECTION, "max_train_batch_size": 2, "micro_batch_sizes": [1]}
VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
NO_FILES: dict[str, str] = {}


def accepted(most: int, **section: Any) -> tuple[int, ...]:
    return accepted_world_sizes({**SECTION, "version": 0.2, **section}, most)


def test_sizes_that_deepspeed_counts_wrongly_are_left_out() -> None:
    sizes = accepted(200, num_gpus_per_node=7, max_train_batch_size=2000)
    assert 61 not in sizes
    assert {60, 62, 63} <= set(sizes)
    # No number of whole nodes is served: it raises a TypeError.
    assert accepted(9, num_gpus_per_node=1, min_gpus=50, prefer_larger_batch=False) == ()
    assert accepted(9, num_gpus_per_node=1, min_gpus=50) == (1, 2, 3, 4, 5, 6, 7, 8)


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
