"""What a worker can be bound to: CPUs, by whole cores, and the memory beside them."""

from __future__ import annotations

from dsl._record import Record
from dsl.lists import format_ranges, numbered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dsl.machine.cpus import NumaNode, Topology
    from dsl.model.node import MemoryPolicy

    Core = tuple[int, ...]


class Binding(Record):
    """CPUs and memory of one worker."""

    cpus: tuple[int, ...]
    mempolicy: MemoryPolicy | None = None
    """None: the kernel places the memory."""


def allowed_cores(allowed: Collection[int], topology: Topology) -> list[Core]:
    """The usable CPUs of each core, ordered by first CPU. A CPU that is listed in no core counts as one."""
    mine = frozenset(allowed)
    cores = {tuple([cpu for cpu in core if cpu in mine]) for core in topology.cores}
    single = mine.difference([cpu for core in cores for cpu in core])
    return sorted([*[core for core in cores if core], *[(cpu,) for cpu in single]])


def deal(cores: Sequence[Core], count: int) -> list[Sequence[Core]]:
    """Split cores into ``count`` runs; the first runs get leftover cores. Too few cores: all for each."""
    if len(cores) < count:
        return [cores] * count
    each, left = divmod(len(cores), count)
    ends = [rank * each + min(rank, left) for rank in range(count + 1)]
    return [cores[ends[rank] : ends[rank + 1]] for rank in range(count)]


def memory_groups(nodes: Sequence[NumaNode]) -> dict[int, MemoryPolicy]:
    """Memory policy for workers whose cores lie in a NUMA node, by the number of that node.

    Three kinds of machine: as many nodes without cores as with (flat high-bandwidth memory: the i-th node
    with cores prefers the i-th without), nodes with the same cores (fake NUMA: bound to all of them, and
    other nodes of such a machine to none), and everything else (bound to the node itself).
    """
    with_cores = [node for node in nodes if node.cpus]
    without = [node for node in nodes if not node.cpus]
    if without and len(without) == len(with_cores):
        return {
            node.number: ("preferred", (partner.number,))
            for node, partner in zip(with_cores, without, strict=True)
            if partner.usable_memory
        }
    equal = {node.number: [one for one in with_cores if one.cpus == node.cpus] for node in with_cores}
    has_fake = any(len(group) > 1 for group in equal.values())
    policies: dict[int, MemoryPolicy] = {}
    for number, group in equal.items():
        usable = tuple([one.number for one in group if one.usable_memory])
        if usable and (len(group) > 1 or not has_fake):
            policies[number] = ("bind", usable)
    return policies


def memory_policy(mode: str, cpus: Collection[int], topology: Topology) -> MemoryPolicy | None:
    """The policy ``mode`` on the NUMA nodes of some CPUs; None if there is no node to name, or no policy.

    ``beside`` is the policy of `memory_groups` for the node that has all the CPUs. ``preferred`` names only
    one node of it: that node itself, or the high-bandwidth memory beside it.
    """
    if mode == "local":
        return ("local", ())
    near = [node for node in topology.numa_nodes if not set(cpus).isdisjoint(node.cpus)]
    if mode in ("beside", "preferred"):
        groups = memory_groups(topology.numa_nodes)
        whole = [node.number for node in near if node.number in groups and set(cpus) <= set(node.cpus)]
        beside = groups[whole[0]] if whole else None
        return ("preferred", beside[1][:1]) if beside and mode == "preferred" else beside
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
    return [f"{numbered(noun, ranks)}: {describe(bindings[ranks[0] - first])}" for ranks in holders.values()]


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
