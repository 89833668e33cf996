"""What a worker can be bound to, CPUs and the memory beside them, and the rules of each way to bind."""

from __future__ import annotations

from dsl._record import Record
from dsl.devices import hides_all
from dsl.errors import PlacementError
from dsl.model.job import Notice
from dsl.words import counted, format_ranges, numbered, parse_range, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dsl.devices.nvidia import Device
    from dsl.devices.offered import DeviceFacts
    from dsl.machine.kernel import Cpus, NumaNode, Topology
    from dsl.model.job import MemoryPolicy

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


def bind_auto(
    homes: Sequence[int | None], allowed: Collection[int], topology: Topology, *, strict: bool
) -> tuple[list[tuple[int, ...]], list[Notice]]:
    """``--bind auto``: CPUs of each worker by the NUMA nodes of their devices (None: unknown, or no device).

    The usable cores of a NUMA node are split evenly among the workers whose devices lie there. If some worker
    has no device with a known node, all cores are split evenly among all workers, in the order of NUMA nodes;
    if an equal split can end where nodes end, it does. A core is never divided: its threads stay together.

    If there are more workers than cores to split, every worker gets all of these cores. With single cores,
    some cores would have more workers than others, the slowest workers would hold up the job, and the kernel
    could not move a worker to an idle core. These workers still keep to NUMA nodes if each node's number of
    workers is then proportional to its cores.

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
        hint = "start fewer workers, or leave out --bind-strict and --strict"
        raise PlacementError(f"--bind auto: {notices[0]}, {hint}")
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
    """``--bind_cores_to_rank``: the CPUs of each of ``count`` local ranks, by DeepSpeed's rules.

    The cores (``--bind_core_list``, or one CPU of every physical core that may be used) are cut into equal
    runs in rank order; cores that are left over stay unused. DeepSpeed itself has numactl apply them.

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


MODES = ("node", "socket", "exclusive", "core-complex")
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


def plan_numa(
    mode: str, count: int, environ: Mapping[str, str], devices: DeviceFacts, cpus: Cpus
) -> tuple[list[tuple[int, ...]], list[Notice]]:
    """``--numa-binding``: the CPUs of each of ``count`` workers by one of `MODES`, which are torchrun's.

    The device of a worker is the one whose number in CUDA is the worker's local rank. The NUMA node of this
    device is the worker's home. Of the CPUs that it would inherit, the worker gets

    * ``node``: all CPUs of its home,
    * ``socket``: all CPUs of the NUMA nodes in the socket of its home,
    * ``exclusive``: its share of the cores of its home; all visible devices there share the cores, and the
      first devices get the cores that are left over,
    * ``core-complex``: the CPUs that share one last-level cache in its home; the visible devices there take
      the caches in turn, the cache with most CPUs first.

    torchrun gives up if it sees no device. Here the workers are then spread evenly over the NUMA nodes that
    have CPUs, in the order of their local ranks, and the rules are the same. Only NVIDIA's devices count so
    far. torchrun binds only CPUs; here a worker also prefers the memory of its home if all of its CPUs lie
    there. It is only a preference: a worker that is bound to the memory of one node gets killed when that
    memory is full.

    ``CUDA_VISIBLE_DEVICES`` of ``environ`` says which devices there are, and in which order. Its numbers
    follow the PCI addresses, as CUDA's do for devices of one model. If the machine does not tell the NUMA
    node of a device, it is taken to be the first node that has CPUs, as in torchrun.

    Raises:
        PlacementError: there are devices, but fewer than workers; no CPU beside a worker's device may be
            used; or there are fewer cores than devices to share them exclusively.
    """
    nodes = _usable_nodes(cpus)
    gpus = _visible_gpus(count, environ, devices)
    if gpus:
        first = next(iter(nodes))
        homes = [first if gpu.numa_node is None else gpu.numa_node for gpu in gpus]
    else:
        distinct: dict[Sequence[int], int] = {}  # fake NUMA nodes have the same CPUs
        for number, members in nodes.items():
            distinct.setdefault(members, number)
        spread = list(distinct.values())
        homes = [spread[rank * len(spread) // count] for rank in range(count)]
    sharers = {home: homes.count(home) for home in set(homes)}
    placed = dict.fromkeys(sharers, 0)
    found = []
    for rank, home in enumerate(homes[:count]):
        name = f"device {gpus[rank].address}" if gpus else f"local rank {rank}"
        if home not in nodes:
            raise PlacementError(
                f"--numa-binding {mode}: {name} is at NUMA node {home}, none of whose CPUs may be used "
                f"(only {format_ranges(cpus.allowed)}), widen the affinity mask or leave it out"
            )
        chosen = _choose(mode, home, placed[home], sharers[home], nodes, cpus)
        placed[home] += 1
        if not chosen:
            cores = len(_cut(cpus.topology.cores, nodes[home]))
            raise PlacementError(
                f"--numa-binding {mode}: {name} is one of {sharers[home]} at NUMA node {home}, which has "
                f"{counted(cores, 'core')} that may be used, choose another mode"
            )
        found.append(chosen)
    return found, _notices(mode, gpus, nodes, environ)


def _choose(
    mode: str, home: int, position: int, sharers: int, nodes: Mapping[int, tuple[int, ...]], cpus: Cpus
) -> tuple[int, ...]:
    """CPUs of the device at this position among all devices of its home; empty if there are too few cores."""
    own = nodes[home]
    if mode == "socket":  # a node is in the socket of its first CPU
        package = next((package for package in cpus.packages if own[0] in package), own)
        return tuple(sorted({cpu for node in nodes.values() if node[0] in package for cpu in node}))
    if mode == "exclusive":
        cores = [core for _, core in sorted(_cut(cpus.topology.cores, own).items())]
        mine = deal(cores, sharers)[position] if len(cores) >= sharers else ()
        return tuple(sorted([cpu for core in mine for cpu in core]))
    if mode == "core-complex":
        caches = sorted(_cut(cpus.caches, own).items(), key=lambda item: (-len(item[1]), item[0]))
        # The kernel of some virtual machines names no cache.
        return caches[position % len(caches)][1] if caches else own
    return own


def _usable_nodes(cpus: Cpus) -> dict[int, tuple[int, ...]]:
    """Usable CPUs of each NUMA node that has any; all CPUs are one node if the kernel knows no nodes."""
    nodes = {node.number: node.cpus for node in cpus.topology.numa_nodes}
    return _cut_each(nodes, cpus.allowed) or {0: tuple(cpus.allowed)}


def _visible_gpus(count: int, environ: Mapping[str, str], devices: DeviceFacts) -> Sequence[Device]:
    """Visible devices in CUDA's order; empty if there are none, or if the user hides them all."""
    value = environ.get(VISIBLE_VARIABLE)
    gpus = () if value is not None and hides_all(value) else devices.gpus
    if not gpus:
        return ()
    from dsl.devices.masks import read_entries
    from dsl.devices.nvidia import visible_devices

    # Only the driver knows all MIG instances. A process sees one, but each worker may show itself another.
    is_divided = (read_entries(value) or ("",))[0].startswith("MIG-")
    shown = visible_devices(value, devices.survey.devices if is_divided else gpus, alone=is_divided)
    if count > len(shown):
        text = f"{counted(len(shown), 'device')} can be seen"
        where = "" if value is None else f" ({VISIBLE_VARIABLE}={value})"
        raise PlacementError(
            f"--numa-binding: {text}{where}, but each of {counted(count, 'worker')} needs one, "
            "start fewer or leave it out"
        )
    return shown


def _cut(groups: Iterable[Sequence[int]], own: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The part of each group that is in ``own``, by the first CPU of the whole group."""
    return _cut_each({group[0]: group for group in groups}, own)


def _cut_each(groups: Mapping[int, Sequence[int]], own: Sequence[int]) -> dict[int, tuple[int, ...]]:
    mine = frozenset(own)
    found = {key: tuple([cpu for cpu in group if cpu in mine]) for key, group in groups.items()}
    return {key: cpus for key, cpus in found.items() if cpus}


def _notices(
    mode: str, gpus: Sequence[Device], nodes: Mapping[int, Sequence[int]], environ: Mapping[str, str]
) -> list[Notice]:
    notices = []
    if not gpus:
        over = counted(len(nodes), "NUMA node")
        text = f"no NVIDIA device can be seen, workers are spread over {over}"
        notices.append(Notice("info", f"--numa-binding {mode}: {text}", is_fallback=True))
    lost = [gpu.address for gpu in gpus if gpu.numa_node is None]
    if lost and len(nodes) > 1:
        text = f"the machine does not tell the NUMA node of {len(lost)} of {counted(len(gpus), 'device')}"
        notices.append(Notice("warning", f"--numa-binding {mode}: {text}, {next(iter(nodes))} is taken"))
    is_numbered = not environ.get(VISIBLE_VARIABLE, "0").startswith(("GPU-", "MIG-"))
    models = {gpu.model for gpu in gpus}
    if len(models) > 1 and is_numbered and environ.get(ORDER_VARIABLE) != "PCI_BUS_ID":
        text = f"devices of {len(models)} models are taken in the order of their PCI addresses"
        notices.append(
            Notice("warning", f"--numa-binding {mode}: {text}, set {ORDER_VARIABLE}=PCI_BUS_ID to be sure")
        )
    return notices
