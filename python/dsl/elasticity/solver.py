"""The ``elasticity`` section of a config, the batch size that it leads to, and the world sizes served.

Keys, defaults, the order of the checks and all answers are those of DeepSpeed 0.19.7. It looks for a batch
size with many divisors: a micro batch, or the least common multiple of all micro batches, times a highly
composite number. A batch size B serves a world size of w workers if every worker gets the same number of
whole micro batches: B is a multiple of w times a micro batch.

World sizes count data-parallel workers; each of these consists of ``model_parallel_size`` processes. In
DeepSpeed every worker checks this number. `job_world_sizes` counts all workers of a job; dsl starts no number
that the job would refuse.
"""

from __future__ import annotations

from bisect import bisect_right
from math import isqrt, lcm

from dsl._record import Record
from dsl.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from dsl.words import BEYOND, show

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560),
    *(10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200),
    *(332640, 498960, 554400, 665280, 720720),
)
"""Numbers with more divisors than any smaller number (OEIS A002182), up to the last one in DeepSpeed."""


class Solution(Record):
    """A batch size and the world sizes that it serves."""

    batch_size: int
    """Samples of a step, over all workers."""
    world_sizes: tuple[int, ...]
    """All world sizes that the batch size serves, ascending."""


def solve_devices(config: ElasticityConfig) -> Solution:
    """Version 0.1: any number of devices. The solution may serve no world size.

    Raises:
        ElasticityConfigError: a micro batch is larger than the largest batch.
    """
    return _best(config, config.max_acceptable_batch_size, config.min_gpus, config.max_gpus)


def solve_nodes(config: ElasticityConfig) -> Solution:
    """Version 0.2: only whole nodes. The solution may serve no world size.

    Raises:
        ElasticityError: the devices of a node cannot be divided evenly among copies of the model.
        ElasticityConfigError: a micro batch is larger than the largest batch divided by a node's workers.
    """
    devices, model = config.num_gpus_per_node, config.model_parallel_size
    if devices % model:
        raise ElasticityError(
            f"elasticity: the number of GPUs per node ({devices}) should be divisible by model parallel size "
            f"({model}), set num_gpus_per_node to a multiple of it"
        )
    workers = devices // model
    of_node = _best(
        config,
        config.max_acceptable_batch_size // workers,
        config.min_gpus // devices,
        config.max_gpus // devices,
    )
    return Solution(of_node.batch_size * workers, tuple([nodes * workers for nodes in of_node.world_sizes]))


def solve_for(config: ElasticityConfig, world_size: int) -> Solution:
    """Version 0.2 for one world size: the common solution, or else a solution for this world size alone.

    Raises:
        ElasticityError: as for `solve_nodes`.
        ElasticityIncompatibleWorldSize: not even one micro batch for each worker fits into the largest batch.
    """
    common = solve_nodes(config)
    if world_size in common.world_sizes:
        return common
    steps = [(size, config.max_acceptable_batch_size // (size * world_size)) for size in config.micro_batches]
    batches = [size * count * world_size for size, count in steps if count]
    if not batches:
        raise ElasticityIncompatibleWorldSize(
            f"world size {world_size} is not valid: the smallest micro batch for each worker is more than "
            f"max_train_batch_size {config.max_acceptable_batch_size}"
        )
    best = max(batches) if config.prefer_larger_batch_size else min(batches)
    return Solution(best, (world_size,))


def _best(config: ElasticityConfig, largest: int, least: int, most: int) -> Solution:
    """The batch size up to ``largest`` that serves the most world sizes.

    ``least``, ``most``: bounds of the world sizes; 0: no bound.
    """
    micro_batches = sorted(set(config.micro_batches))
    if micro_batches[-1] > largest:
        raise ElasticityConfigError(
            f"elasticity: all micro batches must be at most {largest}, which max_train_batch_size leaves for "
            f"them, but there is {micro_batches[-1]}"
        )
    least, most = least or 1, most or largest // micro_batches[0]
    bases = [base for base in (*micro_batches, lcm(*micro_batches)) if base <= largest]
    batches = {base * HIGHLY_COMPOSITE[bisect_right(HIGHLY_COMPOSITE, largest // base) - 1] for base in bases}
    found = [Solution(batch, _served(batch, micro_batches, least, most)) for batch in batches]
    sign = 1 if config.prefer_larger_batch_size else -1
    return max(found, key=lambda solution: (len(solution.world_sizes), sign * solution.batch_size))


def _served(batch: int, micro_batches: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    small = [size for size in range(1, isqrt(batch) + 1) if batch % size == 0]
    divisors = sorted({size for divisor in small for size in (divisor, batch // divisor)})
    return tuple(
        [size for size in divisors if least <= size <= most and _fitting(batch // size, micro_batches)]
    )


def _fitting(share: int, micro_batches: Sequence[int]) -> list[int]:
    return [size for size in micro_batches if share % size == 0]


def largest_micro_batch(batch_size: int, world_size: int, micro_batches: Sequence[int]) -> int:
    """The largest micro batch that divides a worker's share of a batch."""
    return max(_fitting(batch_size // world_size, micro_batches))


def preferred_micro_batch(batch_size: int, world_size: int, config: ElasticityConfig) -> int:
    """The micro batch of version 0.2 without a given world size: the largest that fits, or the first one."""
    fitting = _fitting(batch_size // world_size, config.micro_batches)
    return max(fitting) if config.prefer_larger_batch_size else fitting[0]


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
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < BEYOND for size in value):
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
    `dsl.machine.read_text` does. An empty tuple means that the job would refuse every number.
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
