"""The numbers of workers that a job's ``elasticity`` section accepts; dsl does not start any other number.

In DeepSpeed every worker checks its number of data-parallel workers with the solver.
"""

from __future__ import annotations

from dsl.elasticity.elasticity_config import (
    ELASTICITY,
    LATEST_VERSION,
    ElasticityConfig,
    check_section,
    is_enabled,
)
from dsl.elasticity.solver import solve_devices, solve_nodes
from dsl.errors import ElasticityConfigError, ElasticityError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

SECTION_VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
"""Variable with the section that the scheduler has seen, in JSON."""

CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed")
"""Arguments by which scripts name their config: DeepSpeed's own, and the one of Hugging Face's Trainer."""

VERSIONS = (0.1, LATEST_VERSION)


def job_world_sizes(
    environ: Mapping[str, str],
    arguments: Sequence[str],
    read_text: Callable[[str], str | None],
    most: int,
) -> tuple[int, ...] | None:
    """The numbers of workers up to ``most`` that a job accepts, ascending; None: any, as far as known.

    ``environ``: that of the workers. ``arguments``: those of the script. ``read_text``: reads a file, as
    `dsl.machine.this_process.read_text` does. An empty tuple means that the job would refuse every number.
    For a config with mistakes the answer is None: the job itself reports them.
    """
    section = find_section(environ, arguments, read_text)
    if section is None:
        return None
    try:
        return accepted_world_sizes(section, most)
    except ElasticityError:
        return None


def accepted_world_sizes(section: Mapping[str, Any], most: int) -> tuple[int, ...]:
    """The numbers of workers up to ``most`` that an enabled section accepts, ascending.

    The numbers count all workers, as ``WORLD_SIZE`` does. With a ``model_parallel_size`` only multiples of it
    are accepted. Version 0.2 also accepts numbers outside its list, each with a batch size of its own, unless
    ``model_parallel_size`` is above 1. Numbers that DeepSpeed 0.19.7 refuses by mistake are left out, too
    (docs/compat.md).

    Raises:
        ElasticityError: the section is malformed, or no batch size satisfies it.
    """
    config = ElasticityConfig(section)
    check_version(config)
    if config.version != LATEST_VERSION:
        return tuple([size for size in solve_devices(config).world_sizes if size <= most])
    common = solve_nodes(config)
    listed = frozenset(common.world_sizes)
    model = config.model_parallel_size
    if model > 1:
        return tuple(
            [size * model for size in sorted(listed) if size * model <= most and size // model in listed]
        )
    smallest = min(config.micro_batches) * config.num_gpus_per_node
    if not listed and (common.batch_size == smallest or not config.prefer_larger_batch_size):
        # If the batch size serves no number of whole nodes, DeepSpeed fails.
        return ()
    return tuple([size for size in range(1, most + 1) if size in listed or _serves_alone(config, size)])


def _serves_alone(config: ElasticityConfig, size: int) -> bool:
    """Whether DeepSpeed finds a batch size for a world size that its list does not have."""
    largest = config.max_acceptable_batch_size
    # DeepSpeed takes the largest of the batch sizes that it finds, or the smallest one, which may be 0.
    looked_at = min if config.prefer_larger_batch_size else max
    # DeepSpeed computes in floating point: with 7 devices on a node, 61 workers become 60.
    is_found = int(size / config.num_gpus_per_node * config.num_gpus_per_node) == size
    return is_found and looked_at(config.micro_batches) * size <= largest


def check_version(config: ElasticityConfig) -> None:
    """Refuse an unknown version of the algorithm, and model parallelism with version 0.1.

    Raises:
        ElasticityConfigError: the version does not fit.
    """
    if config.model_parallel_size > 1 and config.version != LATEST_VERSION:
        raise ElasticityConfigError(
            f"elasticity version {config.version:g} does not support model-parallel training, "
            f"set version to {LATEST_VERSION}, or model_parallel_size to 1"
        )
    if config.version not in VERSIONS:
        raise ElasticityConfigError(f"elasticity version {config.version:g}: expected 0.1 or 0.2")


def find_section(
    environ: Mapping[str, str], arguments: Sequence[str], read_text: Callable[[str], str | None]
) -> Mapping[str, Any] | None:
    """The enabled ``elasticity`` section of a job: the scheduler's from its variable, or else the config's.

    None if there is no such section, or it cannot be read: the job itself reports mistakes in it.
    """
    text = environ.get(SECTION_VARIABLE)
    section = _enabled(_load(text)) if text else None
    if section is not None:
        return section
    path = config_path(arguments)
    if path is None:
        return None
    try:
        text = read_text(path)
    except OSError:
        return None
    config = _load(text) if text else None
    return _enabled(config.get(ELASTICITY)) if isinstance(config, dict) else None


def config_path(arguments: Sequence[str]) -> str | None:
    """The config file in the arguments of a script; if an option is repeated, the last one counts."""
    for option in CONFIG_OPTIONS:
        joined = f"{option}="
        for index in reversed(range(len(arguments))):
            word, following = arguments[index], arguments[index + 1 : index + 2]
            path = word.removeprefix(joined) if word.startswith(joined) else ""
            if word == option and following and not following[0].startswith("-"):
                path = following[0]
            if path:
                return path
    return None


def _load(text: str) -> object:
    from json import loads

    try:
        value: object = loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _enabled(section: object) -> Mapping[str, Any] | None:
    try:
        found = check_section(section)
        return found if is_enabled(found) else None
    except ElasticityConfigError:
        return None
