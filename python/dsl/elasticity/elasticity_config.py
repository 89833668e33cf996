"""The ``elasticity`` section of a DeepSpeed config, checked.

Keys, defaults and the order of the checks are those of ``deepspeed.elasticity.config`` (0.19.7).
"""

from __future__ import annotations

from dsl.errors import ElasticityConfigError
from dsl.lists import BEYOND, show

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

ELASTICITY = "elasticity"
"""Key of the section in a config."""

ENABLED = "enabled"
"""Key in the section: whether elasticity is on."""

ENABLED_DEFAULT = False

MAX_BATCH = "max_train_batch_size"
MICRO_BATCHES = "micro_batch_sizes"
LATEST_VERSION = 0.2


class ElasticityConfig:
    """The values of a section, with the names of DeepSpeed's class.

    Raises:
        ElasticityConfigError: a required key is missing, or a value is invalid.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        section = check_section(param_dict)
        self.enabled: bool = is_enabled(section)
        """Whether elasticity is on."""
        for key in (MAX_BATCH, MICRO_BATCHES):
            if self.enabled and key not in section:
                raise ElasticityConfigError(f"elasticity config missing {key}, which an enabled one needs")
        self.max_acceptable_batch_size: int = _whole(section, MAX_BATCH, 2000, None)
        """Most samples of a step, over all workers."""
        self.micro_batches: list[int] = _micro_batches(section)
        """The possible numbers of samples that a worker takes at a time; one of them is chosen."""
        self.min_gpus: int = _whole(section, "min_gpus", 1, 1)
        """Smallest number of devices."""
        self.max_gpus: int = _whole(section, "max_gpus", 10000, 1)
        """Largest number of devices."""
        if self.max_gpus < self.min_gpus:
            raise ElasticityConfigError(
                "elasticity min_gpus cannot be greater than max_gpus: "
                f"min_gpus is {self.min_gpus}, max_gpus is {self.max_gpus}"
            )
        self.model_parallel_size: int = _whole(section, "model_parallel_size", 1, 1)
        """Devices that share one copy of the model."""
        self.num_gpus_per_node: int = _whole(section, "num_gpus_per_node", 1, 1)
        """Number of devices on each node; only version 0.2 uses it."""
        self.min_time: float = _minutes(section)
        """Minutes before a scheduler changes the job again; dsl does not use it."""
        self.version: float = _version(section)
        """Version of the algorithm: 0.1 counts devices, 0.2 counts nodes."""
        self.prefer_larger_batch_size: bool = _flag(section, "prefer_larger_batch", default=True)
        """If batch sizes serve the same number of world sizes, take the larger one."""
        self.ignore_non_elastic_batch_info: bool = _flag(
            section, "ignore_non_elastic_batch_info", default=False
        )
        """Allow other batch sizes elsewhere in the config."""

    def repr(self) -> dict[str, Any]:
        """The values by name."""
        return self.__dict__

    def __repr__(self) -> str:
        from json import dumps

        return dumps(self.__dict__, sort_keys=True, indent=4)


def check_section(value: Any) -> Mapping[str, Any]:
    """The section as a mapping. Raises ElasticityConfigError if it is no mapping."""
    # Check for the methods of a mapping: importing collections.abc for its class takes too long.
    if not hasattr(value, "keys") or not hasattr(value, "get"):
        raise ElasticityConfigError(f"elasticity: expected an object with keys, got {show(value)}")
    section: Mapping[str, Any] = value
    return section


def is_enabled(section: Mapping[str, Any]) -> bool:
    """Whether a section is enabled. Raises ElasticityConfigError if ``enabled`` is neither true nor false."""
    return _flag(section, ENABLED, default=ENABLED_DEFAULT)


def _whole(section: Mapping[str, Any], key: str, default: int, least: int | None) -> int:
    """A whole number of the section. JSON may also write it as 1e4 or 2000.0."""
    value = section.get(key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ElasticityConfigError(f"elasticity {key}: expected a whole number, got {show(value)}")
    if least is not None and value < least:
        raise ElasticityConfigError(f"elasticity {key} must be at least {least}, got {show(value)}")
    if value >= BEYOND:
        raise ElasticityConfigError(f"elasticity {key} must be below {BEYOND}, got {show(value)}")
    return value


def _micro_batches(section: Mapping[str, Any]) -> list[int]:
    value = section.get(MICRO_BATCHES, [2, 4, 6])
    if not isinstance(value, list):
        raise ElasticityConfigError(
            f"elasticity expected {MICRO_BATCHES} to be a list of micro batches, got {show(value)}"
        )
    if not value:
        raise ElasticityConfigError(f"elasticity {MICRO_BATCHES} is empty, name at least one micro batch")
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 < one < BEYOND for one in value):
        raise ElasticityConfigError(
            f"elasticity expected {MICRO_BATCHES} to only contain positive integers below {BEYOND}, "
            f"got {show(value)}"
        )
    return list(value)


def _minutes(section: Mapping[str, Any]) -> float:
    value = section.get("min_time", 0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ElasticityConfigError(f"elasticity min_time needs to be >= 0 minutes, got {show(value)}")
    return value


def _version(section: Mapping[str, Any]) -> float:
    value = section.get("version", LATEST_VERSION)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ElasticityConfigError(f"elasticity version: expected a number, got {show(value)}")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ElasticityConfigError(f"elasticity version: expected a number, got {show(value)}") from None


def _flag(section: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = section.get(key, default)
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ElasticityConfigError(f"elasticity {key}: expected true or false, got {show(value)}")
    return bool(value)
