"""How much memory of a device a model needs before any activation: parameters, gradients and optimizer.

DeepSpeed's estimate, corrected where it ignores the config: bfloat16, offload and the optimizer count.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsl._record import Record
from dsl.tune.ds_config import ZERO
from dsl.tune.section import MOST_BYTES, is_number

# Numbers of four bytes that an optimizer keeps for each parameter. Adam and its like keep two.
_STATES = {"sgd": 0, "lion": 1, "muon": 1, "adagrad": 1}
_ADAM = 2
_OFF_DEVICE = ("cpu", "nvme")


class Model(Record):
    """What is known about a model."""

    params: float
    """Parameters, over all workers that share a copy."""
    trainable: float
    """Parameters that are trained, and so have gradients and a place in the optimizer."""
    activation_bytes: float
    """Memory that a forward pass of one sample takes; 0: unknown."""
    hidden_size: int = 0
    """Width of a layer; 0: unknown."""


def read_model(facts: Mapping[str, object]) -> Model | None:
    """The model from a profile's file or ``model_info``; None if its size is unknown."""
    params = _count(facts, "num_params")
    if not params:
        return None
    return Model(
        params=params,
        trainable=_count(facts, "trainable_num_params") or params,
        activation_bytes=_count(facts, "activation_mem_per_gpu"),
        hidden_size=int(_count(facts, "hidden_size")),
    )


def estimate(model: Model, stage: int, config: Mapping[str, object], devices: int, mp_size: int) -> float:
    """Bytes of one device that a ZeRO stage needs to hold the model, without activations.

    Args:
        model: what is known about it.
        stage: 0 to 3.
        config: we use its precision, optimizer and offload.
        devices: devices of the job; a stage divides its share of the memory among them.
        mp_size: how many devices share a copy of the model.
    """
    zero = _section(config, ZERO)
    is_half = any(_section(config, key).get("enabled") is True for key in ("fp16", "bf16", "bfloat16"))
    width = 2 if is_half else 4
    # Half precision keeps a full copy of parameters and gradients beside the states.
    states = _states(config) * 4 + (8 if is_half else 0)
    params = model.params * width
    gradients = model.trainable * width
    optimizer = model.trainable * states
    if stage >= 1:
        optimizer *= _share_on_device(zero, "offload_optimizer", "cpu_offload") / devices
    if stage >= 2:
        gradients /= devices
    if stage >= 3:
        params *= _share_on_device(zero, "offload_param", "cpu_offload_params") / devices
    return (params + gradients + optimizer) / mp_size


def _states(config: Mapping[str, object]) -> int:
    optimizer = _section(config, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    momentum = _section(optimizer, "params").get("momentum")
    if kind == "sgd" and is_number(momentum) and momentum > 0:
        return 1
    return _STATES.get(kind, _ADAM)


def _share_on_device(zero: Mapping[str, object], key: str, old_key: str) -> float:
    """The share that is not offloaded. Newer configs have a section for it, older ones a switch."""
    section = _section(zero, key)
    if section.get("device") in _OFF_DEVICE:
        ratio = section.get("ratio", 1)
        return 1 - min(max(float(ratio), 0), 1) if is_number(ratio) else 0
    return 0 if zero.get(old_key) is True else 1


def _section(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _count(facts: Mapping[str, object], key: str) -> float:
    """A number about a model; 0: it is missing or impossible."""
    value = facts.get(key)
    return float(value) if is_number(value) and 1 <= value <= MOST_BYTES else 0
