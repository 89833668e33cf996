"""The counterpart of ``deepspeed.elasticity``: batch sizes that serve many world sizes.

::

    from dsl.elasticity import compute_elastic_config

    batch, world_sizes = compute_elastic_config(config, "0.19.7")
    batch, world_sizes, micro_batch = compute_elastic_config(config, "0.19.7", world_size=16)
"""

from __future__ import annotations

from dsl.elasticity.solver import (
    ELASTICITY,
    ENABLED,
    ENABLED_DEFAULT,
    SECTION_VARIABLE,
    ElasticityConfig,
    Solution,
    check_section,
    check_version,
    is_enabled,
    largest_micro_batch,
    preferred_micro_batch,
    solve_devices,
    solve_for,
)
from dsl.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from dsl.words import MOST_DIGITS, parse_number, shorten, show

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = [
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]

ALGORITHM = "0.19.7"
"""The version of DeepSpeed that gives the same answers."""

MINIMUM = (0, 3, 8)
"""The first version of DeepSpeed with elasticity."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a config has an ``elasticity`` section that is enabled.

    Raises:
        ElasticityConfigError: the section is no object, or ``enabled`` is neither true nor false.
    """
    return ELASTICITY in ds_config and is_enabled(check_section(ds_config[ELASTICITY]))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compare a section with the one that the scheduler has seen (``DEEPSPEED_ELASTICITY_CONFIG``).

    Without that variable it logs a warning to the logger ``dsl``.

    Raises:
        ElasticityConfigError: largest batch, micro batches or version differ, or the variable has no JSON.
    """
    from os import environ

    text = environ.get(SECTION_VARIABLE)
    if text is None:
        from logging import getLogger

        getLogger("dsl").warning(
            "%s is not set: nobody can tell whether the scheduler scales this job to world sizes that fit",
            SECTION_VARIABLE,
        )
        return
    from json import loads

    try:
        seen = ElasticityConfig(loads(text))
    except (ElasticityConfigError, ValueError, RecursionError) as error:
        raise ElasticityConfigError(f"{SECTION_VARIABLE}: {error}") from None
    config = ElasticityConfig(runtime_elastic_config_dict)
    for name in ("max_acceptable_batch_size", "micro_batches", "version"):
        theirs, ours = getattr(seen, name), getattr(config, name)
        if theirs != ours:
            raise ElasticityConfigError(
                f"elastic config {name}={show(theirs)} seen by resource scheduler does not match config "
                f"passed to runtime {name}={show(ours)}"
            )


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: float = 0,
    return_microbatch: bool = False,  # noqa: FBT001, FBT002  DeepSpeed's signature
) -> tuple[Any, ...]:
    """The batch size of an elastic job, and the world sizes that it serves.

    World sizes count data-parallel workers. Version 0.2 and ``return_microbatch`` need a world size. If
    ``world_size`` is not given, it follows from ``WORLD_SIZE``, the number of all workers.

    Returns the batch size (int) and the world sizes (list of int, ascending); with ``world_size`` or
    ``return_microbatch`` also the micro batch of a worker (int).

    Raises:
        ElasticityConfigError: the section is missing, disabled or malformed, or serves no world size; or a
            world size is needed, and neither ``world_size`` nor ``WORLD_SIZE`` gives it.
        ElasticityIncompatibleWorldSize: the world size is not served.
        ElasticityError: the target version has no elasticity, or the devices of a node cannot be divided
            evenly among copies of the model.
    """
    config = _checked(ds_config, target_deepspeed_version)
    given = _whole_size(world_size)
    if config.version == 0.1:
        solution = solve_devices(config)
        size = given or (_inherited_size(config) if return_microbatch else 0)
        _check_served(config, solution, size)
    else:
        size = given or _inherited_size(config)
        solution = solve_for(config, size)
    answer = (solution.batch_size, list(solution.world_sizes))
    if given or (return_microbatch and config.version == 0.1):
        return (*answer, largest_micro_batch(solution.batch_size, size, config.micro_batches))
    if return_microbatch:
        return (*answer, preferred_micro_batch(solution.batch_size, size, config))
    return answer


def _checked(ds_config: Mapping[str, Any], target: str) -> ElasticityConfig:
    if not hasattr(ds_config, "keys"):
        raise ElasticityConfigError(f"expected ds_config to be a dictionary, got {show(ds_config)}")
    if ELASTICITY not in ds_config:
        raise ElasticityConfigError("elasticity is missing from the config, which an elastic job needs")
    section = check_section(ds_config[ELASTICITY])
    if not is_enabled(section):
        raise ElasticityConfigError("elasticity is disabled, set enabled to true in its section")
    config = ElasticityConfig(section)
    check_version(config)
    if not _has_elasticity(target):
        raise ElasticityError(
            f"target deepspeed version {show(target)} is not compatible with elasticity, which came with "
            f"{'.'.join(map(str, MINIMUM))}"
        )
    return config


def _has_elasticity(version: object) -> bool:
    """Whether a version of DeepSpeed, such as ``0.14.1+ffb53c25``, has elasticity at all."""
    release, suffix = [], ""
    for part in str(version).strip().removeprefix("v").partition("+")[0].split("."):
        suffix = part.lstrip("0123456789")
        digits = part.removesuffix(suffix)
        release += [int(digits[:MOST_DIGITS])] if digits else []
        if suffix:
            break
    # `8rc1` and `dev0` come before a release, `post1` comes after it.
    is_before = suffix != "" and not suffix.startswith("post")
    return tuple(release) > MINIMUM or (tuple(release) == MINIMUM and not is_before)


def _whole_size(world_size: object) -> int:
    """The world size as an int; a division by other kinds of parallelism leaves a float that is whole."""
    if isinstance(world_size, int | float) and world_size == world_size // 1 and world_size >= 0:
        return int(world_size)
    raise ElasticityIncompatibleWorldSize(f"world size {show(world_size)} is not a number of workers")


def _inherited_size(config: ElasticityConfig) -> int:
    """The number of data-parallel workers of this job, from ``WORLD_SIZE``."""
    from os import environ

    text = environ.get("WORLD_SIZE")
    workers = None if text is None else parse_number(text)
    if workers is None:
        found = "is not set" if text is None else f"is {show(text)}"
        raise ElasticityConfigError(
            f"elasticity version {config.version:g} needs a world size here: give one, or set WORLD_SIZE, "
            f"which {found}"
        )
    size, rest = divmod(workers, config.model_parallel_size)
    if rest or not size:
        raise ElasticityIncompatibleWorldSize(
            f"WORLD_SIZE {workers} is not valid: it must be a positive multiple of "
            f"model_parallel_size {config.model_parallel_size}"
        )
    return size


def _check_served(config: ElasticityConfig, solution: Solution, size: int) -> None:
    """Refuse a solution that serves no world size, or not ``size``; size 0 accepts any world size."""
    if not solution.world_sizes:
        kind = ElasticityIncompatibleWorldSize if size else ElasticityConfigError
        raise kind(
            f"elasticity: batch size {solution.batch_size} serves no world size of {config.min_gpus} to "
            f"{config.max_gpus} GPUs, widen min_gpus and max_gpus"
        )
    if size and size not in solution.world_sizes:
        valid = shorten(", ".join(map(str, solution.world_sizes)), 400)
        raise ElasticityIncompatibleWorldSize(f"world size {size} is not valid, valid are {valid}")
