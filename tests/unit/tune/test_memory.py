"""The memory that a model takes: DeepSpeed's estimate, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from dsl.tune.search import Model, estimate, read_model

MODEL = Model(params=1000, trainable=1000, activation_bytes=0)
CPU = {"device": "cpu"}
HALF = {"fp16": {"enabled": True}}


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, (16_000, 8_000 + 2_000, 4_000 + 3_000, 4_000)),
        (HALF, (20_000, 4_000 + 4_000, 2_000 + 4_500, 5_000)),
        ({"bf16": {"enabled": True}}, (20_000, 8_000, 6_500, 5_000)),
        ({"bfloat16": {"enabled": True}}, (20_000, 8_000, 6_500, 5_000)),
        ({"bf16": {"enabled": False}}, (16_000, 10_000, 7_000, 4_000)),
        ({"optimizer": {"type": "SGD"}}, (8_000, 8_000, 5_000, 2_000)),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, (12_000, 9_000, 6_000, 3_000)),
        ({"optimizer": {"type": "Lion"}}, (12_000, 9_000, 6_000, 3_000)),
        ({"optimizer": {"type": "AdamW"}}, (16_000, 10_000, 7_000, 4_000)),
        (zero(offload_optimizer=CPU), (16_000, 8_000, 5_000, 2_000)),
        (zero(offload_optimizer={"device": "nvme", "ratio": 0.5}), (16_000, 9_000, 6_000, 3_000)),
        (zero(offload_optimizer={"device": "none"}), (16_000, 10_000, 7_000, 4_000)),
        (zero(cpu_offload=True), (16_000, 8_000, 5_000, 2_000)),
        (zero(offload_optimizer=CPU, offload_param=CPU), (16_000, 8_000, 5_000, 1_000)),
    ],
)
def test_each_stage_divides_more_among_four_devices(
    config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert tuple(estimate(MODEL, stage, config, 4, 1) for stage in range(4)) == expected


def test_copies_shared_by_devices_and_frozen_parameters_take_less() -> None:
    assert estimate(MODEL, 0, {}, 4, 2) == 8_000
    assert estimate(Model(1000, 10, 0), 0, {}, 4, 1) == 4_000 + 40 + 80


@pytest.mark.parametrize(
    "facts, model",
    [
        ({"hidden_size": 8}, None),
        *[({"num_params": number}, None) for number in (True, 10**400, 1e300)],
        ({"num_params": 5, "hidden_size": 8}, Model(5, 5, 0, 8)),
        ({"num_params": 5, "trainable_num_params": 2, "activation_mem_per_gpu": 3.5}, Model(5, 2, 3.5)),
        ({"num_params": 5, "hidden_size": 1e30, "trainable_num_params": -1}, Model(5, 5, 0, 0)),
        ({"num_params": 5, "activation_mem_per_gpu": 1e-300}, Model(5, 5, 0, 0)),
    ],
)
def test_a_model_is_known_by_its_parameters_and_by_no_fact_that_none_can_have(
    facts: dict[str, Any], model: Model | None
) -> None:
    assert read_model(facts) == model
