"""Finds the batch size that serves the most world sizes, and these world sizes.

The answers are those of DeepSpeed 0.19.7. It looks for a batch size with many divisors: a micro batch, or the
least common multiple of all micro batches, times a highly composite number. A batch size B serves a world
size of w workers if every worker gets the same number of whole micro batches: B is a multiple of w times a
micro batch.

All world sizes here count data-parallel workers; each of these consists of ``model_parallel_size`` processes.
"""

from __future__ import annotations

from bisect import bisect_right
from math import isqrt, lcm

from dsl._record import Record
from dsl.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsl.elasticity.elasticity_config import ElasticityConfig

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
    return max(found, key=lambda one: (len(one.world_sizes), sign * one.batch_size))


def _served(batch: int, micro_batches: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    sizes = [size for size in _divisors(batch) if least <= size <= most]
    return tuple(sorted([size for size in sizes if _fitting(batch // size, micro_batches)]))


def _divisors(number: int) -> Iterator[int]:
    for one in range(1, isqrt(number) + 1):
        if number % one == 0:
            yield one
            if one * one != number:
                yield number // one


def _fitting(share: int, micro_batches: Sequence[int]) -> list[int]:
    return [size for size in micro_batches if share % size == 0]


def largest_micro_batch(batch_size: int, world_size: int, micro_batches: Sequence[int]) -> int:
    """The largest micro batch that divides a worker's share of a batch."""
    return max(_fitting(batch_size // world_size, micro_batches))


def preferred_micro_batch(batch_size: int, world_size: int, config: ElasticityConfig) -> int:
    """The micro batch of version 0.2 without a given world size: the largest that fits, or the first one."""
    fitting = _fitting(batch_size // world_size, config.micro_batches)
    return max(fitting) if config.prefer_larger_batch_size else fitting[0]
