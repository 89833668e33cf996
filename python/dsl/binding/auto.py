"""``--bind auto``: cores of its own for each worker, beside its device if all workers have devices.

The usable cores of a NUMA node are split evenly among the workers whose devices lie there. If some worker has
no device with a known node, all cores are split evenly among all workers, in the order of NUMA nodes; if an
equal split can end where nodes end, it does. A core is never divided: its threads stay together.

If there are more workers than cores to split, every worker gets all of these cores. With single cores, some
cores would have more workers than others, the slowest workers would hold up the job, and the kernel could not
move a worker to an idle core. These workers still keep to NUMA nodes if each node's number of workers is then
proportional to its cores.
"""

from __future__ import annotations

from dsl.binding.cores import allowed_cores, deal
from dsl.errors import PlacementError
from dsl.lists import format_ranges
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsl.binding.cores import Core
    from dsl.machine.cpus import Topology


def bind_auto(
    homes: Sequence[int | None], allowed: Collection[int], topology: Topology, *, strict: bool
) -> tuple[list[tuple[int, ...]], list[Notice]]:
    """CPUs of each worker by the NUMA nodes of their devices (None: no device, or its node is not known).

    ``allowed`` is the affinity mask that the workers would inherit. Memory is not bound here.

    Raises:
        PlacementError: ``strict``, and workers would share cores or get cores away from their device.
    """
    nodes = _cores_by_node(allowed, topology)
    owners = _owners(topology, nodes)
    notices = []
    places = [None if home is None else owners.get(home) for home in homes]
    lost = [rank for rank, place in enumerate(places) if place is None and homes[rank] is not None]
    if lost:
        notices.append(
            f"the device of local rank {lost[0]} is at NUMA node {homes[lost[0]]}, none of whose CPUs may be "
            f"used (only {format_ranges(sorted(allowed))})"
        )
    elif None in places and set(places) != {None} and len(nodes) > 1:
        notices.append("the NUMA node of some workers' devices is not known, all cores are split evenly")
    known = [place for place in places if place is not None]
    cores = _beside(known, nodes) if len(known) == len(places) else _split(len(homes), nodes)
    runs = {own[0]: own for own in cores}  # shares that begin at the same core are equal
    if len(runs) < len(cores):
        total = sum(map(len, nodes.values()))
        notices.append(f"{len(homes)} workers share cores, {total} may be used")
    if strict and notices:
        raise PlacementError(f"--bind auto: {notices[0]}, start fewer workers or leave out --bind-strict")
    made = {first: tuple(sorted([cpu for core in own for cpu in core])) for first, own in runs.items()}
    warnings = [Notice("warning", f"--bind auto: {text}") for text in notices]
    return [made[own[0]] for own in cores], warnings


def _cores_by_node(allowed: Collection[int], topology: Topology) -> dict[int, list[Core]]:
    """Usable cores of each NUMA node that has some, in the order of nodes; -1: cores in no node."""
    node_of: dict[int, int] = {}
    for node in topology.numa_nodes:
        for cpu in node.cpus:
            node_of.setdefault(cpu, node.number)  # fake NUMA nodes have the same CPUs
    nodes: dict[int, list[Core]] = {}
    for core in allowed_cores(allowed, topology):
        nodes.setdefault(node_of.get(core[0], -1), []).append(core)
    return dict(sorted(nodes.items()))


def _owners(topology: Topology, nodes: Mapping[int, Sequence[Core]]) -> dict[int, int]:
    """For each NUMA node, by number: the node under which its cores are listed in ``nodes``."""
    owner_of = {cpu: number for number, cores in nodes.items() for core in cores for cpu in core}
    owners = {}
    for node in topology.numa_nodes:
        owner = next((owner_of[cpu] for cpu in node.cpus if cpu in owner_of), None)
        if owner is not None:
            owners[node.number] = owner
    return owners


def _beside(places: Sequence[int], nodes: Mapping[int, Sequence[Core]]) -> list[Sequence[Core]]:
    dealt = {place: iter(deal(nodes[place], places.count(place))) for place in set(places)}
    return [next(dealt[place]) for place in places]


def _split(count: int, nodes: Mapping[int, Sequence[Core]]) -> list[Sequence[Core]]:
    groups = list(nodes.values())
    numbers = _workers_of_nodes(count, [len(cores) for cores in groups])
    if numbers:
        pairs = zip(groups, numbers, strict=True)
        return [own for cores, number in pairs for own in deal(cores, number)]
    return _whole_nodes(count, groups) or deal([core for cores in groups for core in cores], count)


def _workers_of_nodes(count: int, sizes: Sequence[int]) -> list[int]:
    """How many workers go to each node, if no worker needs two nodes and shares differ by at most one core.

    Empty if that is impossible. If there are more workers than cores, the shares must be exactly equal.
    """
    total = sum(sizes)
    least, more = divmod(total, count)
    if not least:
        numbers = [size * count // total for size in sizes]
        return numbers if sum(numbers) == count else []
    most = least + bool(more)
    numbers = [-(-size // most) for size in sizes]
    room = [size // least - number for size, number in zip(sizes, numbers, strict=True)]
    missing = count - sum(numbers)
    if min(room) < 0 or not 0 <= missing <= sum(room):
        return []
    for place, free in enumerate(room):
        taken = min(free, missing)
        numbers[place] += taken
        missing -= taken
    return numbers


def _whole_nodes(count: int, groups: Sequence[Sequence[Core]]) -> list[Sequence[Core]]:
    """Whole neighbouring nodes for each worker, if the shares then differ by at most one core; else empty."""
    least = sum(map(len, groups)) // count
    shares: list[list[Core]] = [[]]
    for cores in groups:
        if len(shares[-1]) >= max(least, 1):
            shares.append([])
        shares[-1].extend(cores)
    sizes = [len(share) for share in shares]
    return list(shares) if len(shares) == count and max(sizes) - min(sizes) <= 1 else []
