"""``--bind_cores_to_rank``: which CPUs and which NUMA memory each worker of a node gets.

The cores (``--bind_core_list``, or one CPU of every physical core that may be used) are cut into equal runs
in rank order; cores that are left over stay unused. A worker whose cores lie in one NUMA node also gets that
node's memory. The rules are DeepSpeed's; DeepSpeed itself has numactl apply them.
"""

from __future__ import annotations

from dsl.binding.cores import Binding, memory_groups, refuse_kmp_affinity
from dsl.errors import PlacementError
from dsl.lists import format_ranges, parse_range, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsl.machine.cpus import NumaNode, Topology
    from dsl.model.node import MemoryPolicy

CPU_LIMIT = 65_536
"""CPU numbers are below this: no kernel is built for so many."""


def parse_core_list(text: str) -> list[int]:
    """``"0,2-4"`` -> [0, 2, 3, 4]. Ascending, no overlap.

    Raises:
        PlacementError: names the part that is wrong.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, last = _core_range(part, text)
        if cores and first <= cores[-1]:
            raise PlacementError(
                f"core list {quote(text)}: {part!r} is not after {cores[-1]}, "
                "give ascending cores without overlap"
            )
        cores.extend(range(first, last + 1))
    return cores


def _core_range(part: str, text: str) -> tuple[int, int]:
    ends = parse_range(part)
    if ends is None:
        raise PlacementError(
            f"core list {quote(text)}: bad range {quote(part)}, expected a number or FIRST-LAST"
        )
    if max(ends) >= CPU_LIMIT:
        raise PlacementError(
            f"core list {quote(text)}: {quote(part)} is beyond the last possible cpu, {CPU_LIMIT - 1}"
        )
    if ends[0] > ends[1]:
        raise PlacementError(f"core list {quote(text)}: range {part!r} ends before it starts")
    return ends


def bind_workers(
    count: int,
    core_list: str | None,
    allowed: Collection[int],
    topology: Topology,
    environ: Mapping[str, str],
) -> list[Binding]:
    """Return the binding of each of ``count`` local ranks.

    ``allowed`` is the affinity mask that the workers would inherit.

    Raises:
        PlacementError: a malformed core list, a core outside ``allowed``, fewer cores than workers, or
            ``KMP_AFFINITY`` in the environment, which would undo the binding in OpenMP.
    """
    refuse_kmp_affinity("--bind_cores_to_rank", environ)
    cores = _physical_cpus(allowed, topology) if core_list is None else parse_core_list(core_list)
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
    groups = memory_groups(topology.numa_nodes)
    bindings = []
    for rank in range(count):
        cpus = tuple(cores[share * rank : share * (rank + 1)])
        bindings.append(Binding(cpus, _memory_policy(cpus, topology.numa_nodes, groups)))
    return bindings


def _physical_cpus(allowed: Collection[int], topology: Topology) -> list[int]:
    """The first allowed CPU of each physical core, ascending."""
    first_of_core: dict[int, int] = {}
    core_of = {cpu: number for number, core in enumerate(topology.cores) for cpu in core}
    for cpu in sorted(allowed):
        first_of_core.setdefault(core_of.get(cpu, -1 - cpu), cpu)
    return list(first_of_core.values())


def _memory_policy(
    cpus: Sequence[int], nodes: Sequence[NumaNode], policies: Mapping[int, MemoryPolicy]
) -> MemoryPolicy | None:
    for node in nodes:
        if node.number in policies and set(cpus) <= set(node.cpus):
            return policies[node.number]
    return None
