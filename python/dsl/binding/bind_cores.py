"""``--bind_cores_to_rank``: which CPUs each worker of a node gets.

The cores (``--bind_core_list``, or one CPU of every physical core that may be used) are cut into equal runs
in rank order; cores that are left over stay unused. The rules are DeepSpeed's; DeepSpeed itself has numactl
apply them.
"""

from __future__ import annotations

from dsl.binding.cores import allowed_cores
from dsl.errors import PlacementError
from dsl.lists import format_ranges, parse_range, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from dsl.machine.cpus import Topology

CPU_LIMIT = 65_536
"""CPU numbers are below this: no kernel is built for so many."""


def parse_core_list(text: str) -> list[int]:
    """``"0,2-4"`` -> [0, 2, 3, 4]. Ascending, no overlap.

    Raises:
        PlacementError: names the part that is wrong.
    """
    cores: list[int] = []
    for part in text.split(","):
        ends = parse_range(part)
        if ends is None:
            problem = f"bad range {quote(part)}, expected a number or FIRST-LAST"
        elif max(ends) >= CPU_LIMIT:
            problem = f"{quote(part)} is beyond the last possible cpu, {CPU_LIMIT - 1}"
        elif ends[0] > ends[1]:
            problem = f"range {part!r} ends before it starts"
        elif cores and ends[0] <= cores[-1]:
            problem = f"{part!r} is not after {cores[-1]}, give ascending cores without overlap"
        else:
            cores.extend(range(ends[0], ends[1] + 1))
            continue
        raise PlacementError(f"core list {quote(text)}: {problem}")
    return cores


def bind_workers(
    count: int, core_list: str | None, allowed: Collection[int], topology: Topology
) -> list[tuple[int, ...]]:
    """The CPUs of each of ``count`` local ranks.

    ``allowed`` is the affinity mask that the workers would inherit.

    Raises:
        PlacementError: a malformed core list, a core outside ``allowed``, or fewer cores than workers.
    """
    if core_list is None:
        cores = [core[0] for core in allowed_cores(allowed, topology)]
    else:
        cores = parse_core_list(core_list)
    foreign = sorted(set(cores).difference(allowed))
    if foreign:
        raise PlacementError(
            f"core list {quote(core_list or '')}: this process may not use {format_ranges(foreign)}, "
            f"only {format_ranges(sorted(allowed))}"
        )
    share = len(cores) // count
    if share < 1:
        raise PlacementError(
            f"at least one core needs to be assigned to each rank, but {count} workers share "
            f"{len(cores)} ({format_ranges(cores)}); start fewer or leave out --bind_cores_to_rank"
        )
    return [tuple(cores[share * rank : share * (rank + 1)]) for rank in range(count)]
