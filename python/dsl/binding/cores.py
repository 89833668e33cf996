"""What a worker can be bound to: CPUs, by whole cores, and the memory beside them."""

from __future__ import annotations

from dsl._record import record
from dsl.errors import PlacementError
from dsl.lists import format_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsl.machine.cpus import NumaNode, Topology
    from dsl.model.node import MemoryPolicy

    Core = tuple[int, ...]

AFFINITY_VARIABLE = "KMP_AFFINITY"
"""Tells OpenMP where its threads run."""


@record
class Binding:
    """CPUs and memory of one worker."""

    cpus: tuple[int, ...]
    mempolicy: MemoryPolicy | None = None
    """None: the kernel places the memory."""


def refuse_kmp_affinity(option: str, environ: Mapping[str, str]) -> None:
    """Raise PlacementError if ``KMP_AFFINITY`` is set: OpenMP would undo the option's binding."""
    if AFFINITY_VARIABLE in environ:
        raise PlacementError(f"{AFFINITY_VARIABLE} is set and conflicts with {option}, unset one of them")


def allowed_cores(allowed: Collection[int], topology: Topology) -> list[Core]:
    """The usable CPUs of each core, ordered by first CPU. A CPU that is listed in no core counts as one."""
    mine = frozenset(allowed)
    cores = {tuple([cpu for cpu in core if cpu in mine]) for core in topology.cores}
    single = mine.difference([cpu for core in cores for cpu in core])
    return sorted([*[core for core in cores if core], *[(cpu,) for cpu in single]])


def memory_groups(nodes: Sequence[NumaNode]) -> dict[int, MemoryPolicy]:
    """Memory policy for workers whose cores lie in a NUMA node, by the number of that node.

    Three kinds of machine: as many nodes without cores as with (flat high-bandwidth memory: the i-th node
    with cores prefers the i-th without), neighbours with the same cores (fake NUMA: bound to all of them),
    and everything else (bound to the node itself).
    """
    with_cores = [node for node in nodes if node.cpus]
    without = [node for node in nodes if not node.cpus]
    if without and len(without) == len(with_cores):
        return {
            node.number: ("preferred", (partner.number,))
            for node, partner in zip(with_cores, without, strict=True)
            if partner.usable_memory
        }
    fake = _fake_numa_groups(nodes)
    if not fake:
        return {node.number: ("bind", (node.number,)) for node in with_cores if node.usable_memory}
    policies: dict[int, MemoryPolicy] = {}
    for group in fake:
        usable = tuple([node.number for node in group if node.usable_memory])
        if usable:
            policies.update({node.number: ("bind", usable) for node in group})
    return policies


def _fake_numa_groups(nodes: Sequence[NumaNode]) -> list[list[NumaNode]]:
    groups: list[list[NumaNode]] = []
    for node in nodes:
        if node.cpus and groups and groups[-1][-1].cpus == node.cpus:
            groups[-1].append(node)
        else:
            groups.append([node])
    return [group for group in groups if len(group) > 1]


def memory_policy(mode: str, cpus: Collection[int], topology: Topology) -> MemoryPolicy | None:
    """The policy ``mode`` on the NUMA nodes of some CPUs; None if there is no node to name, or no policy.

    ``preferred`` names one node: the node that has all the CPUs, or the high-bandwidth memory beside it.
    """
    if mode == "local":
        return ("local", ())
    near = [node for node in topology.numa_nodes if not set(cpus).isdisjoint(node.cpus)]
    if mode == "preferred":
        groups = memory_groups(topology.numa_nodes)
        for node in near:
            if node.number in groups and set(cpus) <= set(node.cpus):
                return ("preferred", groups[node.number][1][:1])
        return None
    numbers = tuple([node.number for node in near if node.usable_memory])
    if not numbers or mode == "none":
        return None
    return ("bind", numbers) if mode == "bind" else ("interleave", numbers)


def describe_all(noun: str, first: int, bindings: Sequence[Binding]) -> list[str]:
    """A line for each different binding: ``"ranks 0-3: cores 0-7, memory not bound"``.

    ``noun`` is the word for one worker, ``first`` the number of the first worker.
    """
    holders: dict[tuple[tuple[int, ...], MemoryPolicy | None], list[int]] = {}
    for rank, binding in enumerate(bindings, first):
        holders.setdefault((binding.cpus, binding.mempolicy), []).append(rank)
    texts = []
    for ranks in holders.values():
        plural = "s" if len(ranks) > 1 else ""
        texts.append(f"{noun}{plural} {format_ranges(ranks)}: {describe(bindings[ranks[0] - first])}")
    return texts


def describe(binding: Binding) -> str:
    """``"cores 0-3, memory bound to numa node 0"``."""
    text = f"cores {format_ranges(binding.cpus)}"
    if binding.mempolicy is None:
        return f"{text}, memory not bound"
    mode, numbers = binding.mempolicy
    if mode == "local":
        return f"{text}, memory local"
    verb = {"preferred": "preferred on", "interleave": "interleaved over"}.get(mode, "bound to")
    return f"{text}, memory {verb} numa node {format_ranges(numbers)}"
