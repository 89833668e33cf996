"""``--bind_cores_to_rank``: which CPUs and which NUMA memory each worker of a node gets.

The cores (``--bind_core_list``, or one CPU of every physical core that may be used) are cut into equal runs
in rank order; what does not divide stays unused. A worker whose cores lie in one NUMA node also gets that
node's memory. The rules are DeepSpeed's, which asks the numactl program to carry them out.
"""

from __future__ import annotations

from dsl._record import record
from dsl.errors import BindingError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsl.machine.topology import NumaNode, Topology
    from dsl.model import MemoryPolicy

    Core = tuple[int, ...]

CPU_LIMIT = 65_536
"""CPU numbers end below this; no kernel is built for as many."""


@record
class Binding:
    """CPUs of one worker, and its memory policy if its CPUs lie in one NUMA node."""

    cpus: tuple[int, ...]
    mempolicy: MemoryPolicy | None = None


def parse_core_list(text: str) -> list[int]:
    """``"0,2-4"`` -> [0, 2, 3, 4]. Ascending, no overlap.

    Raises:
        BindingError: names the part that is wrong.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, last = _parse_range(part, text)
        if cores and first <= cores[-1]:
            raise BindingError(
                f"core list {text!r}: {part!r} is not after {cores[-1]}, give ascending cores without overlap"
            )
        cores.extend(range(first, last + 1))
    return cores


def _parse_range(part: str, text: str) -> tuple[int, int]:
    ends = [end.strip() for end in part.split("-")]
    if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
        raise BindingError(f"core list {text!r}: bad range {part!r}, expected a number or FIRST-LAST")
    if any(len(end) > 9 or int(end) >= CPU_LIMIT for end in ends):
        raise BindingError(f"core list {text!r}: {part!r} is beyond the last possible cpu, {CPU_LIMIT - 1}")
    first, last = int(ends[0]), int(ends[-1])
    if first > last:
        raise BindingError(f"core list {text!r}: range {part!r} ends before it starts")
    return first, last


def format_core_list(cores: Sequence[int]) -> str:
    """[0, 2, 3, 4] -> ``"0,2-4"``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join([f"{first}" if first == last else f"{first}-{last}" for first, last in runs])


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
        BindingError: a malformed core list, a core outside ``allowed``, fewer cores than workers, or
            ``KMP_AFFINITY`` in the environment, which would undo the binding in OpenMP.
    """
    refuse_kmp_affinity("--bind_cores_to_rank", environ)
    cores = _physical_cpus(allowed, topology) if core_list is None else parse_core_list(core_list)
    foreign = sorted(set(cores).difference(allowed))
    if foreign:
        raise BindingError(
            f"core list {core_list!r}: this process may not use {format_core_list(foreign)}, "
            f"only {format_core_list(sorted(allowed))}"
        )
    share = len(cores) // count
    if share < 1:
        raise BindingError(
            f"at least one core needs to be assigned to each rank, but {count} workers share "
            f"{len(cores)} ({format_core_list(cores)}); start fewer or leave out --bind_cores_to_rank"
        )
    groups = memory_groups(topology.numa_nodes)
    bindings = []
    for rank in range(count):
        cpus = tuple(cores[share * rank : share * (rank + 1)])
        bindings.append(Binding(cpus, _memory_policy(cpus, topology.numa_nodes, groups)))
    return bindings


def refuse_kmp_affinity(option: str, environ: Mapping[str, str]) -> None:
    """Raise BindingError if OpenMP is told where its threads run, which would undo the option's binding."""
    if "KMP_AFFINITY" in environ:
        raise BindingError(f"KMP_AFFINITY is set and conflicts with {option}, unset one of them")


def _physical_cpus(allowed: Collection[int], topology: Topology) -> list[int]:
    """The first allowed CPU of each physical core, ascending."""
    first_of_core: dict[int, int] = {}
    core_of = {cpu: number for number, core in enumerate(topology.cores) for cpu in core}
    for cpu in sorted(allowed):
        first_of_core.setdefault(core_of.get(cpu, -1 - cpu), cpu)
    return list(first_of_core.values())


def allowed_cores(allowed: Collection[int], topology: Topology) -> list[Core]:
    """What may be used of each core, by its first CPU. A CPU that the kernel names in no core is one."""
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


def _memory_policy(
    cpus: Sequence[int], nodes: Sequence[NumaNode], policies: Mapping[int, MemoryPolicy]
) -> MemoryPolicy | None:
    for node in nodes:
        if node.number in policies and set(cpus) <= set(node.cpus):
            return policies[node.number]
    return None


def describe_all(noun: str, first: int, bindings: Sequence[Binding]) -> list[str]:
    """A line for each different binding: ``"ranks 0-3: cores 0-7, memory not bound"``.

    ``noun`` is the word for one of them, ``first`` the number of the first.
    """
    holders: dict[tuple[tuple[int, ...], MemoryPolicy | None], list[int]] = {}
    for rank, binding in enumerate(bindings, first):
        holders.setdefault((binding.cpus, binding.mempolicy), []).append(rank)
    texts = []
    for ranks in holders.values():
        plural = "s" if len(ranks) > 1 else ""
        texts.append(f"{noun}{plural} {format_core_list(ranks)}: {describe(bindings[ranks[0] - first])}")
    return texts


def describe(binding: Binding) -> str:
    """``"cores 0-3, memory bound to numa node 0"``."""
    text = f"cores {format_core_list(binding.cpus)}"
    if binding.mempolicy is None:
        return f"{text}, memory not bound"
    mode, numbers = binding.mempolicy
    if mode == "local":
        return f"{text}, memory local"
    verb = {"preferred": "preferred on", "interleave": "interleaved over"}.get(mode, "bound to")
    return f"{text}, memory {verb} numa node {format_core_list(numbers)}"
