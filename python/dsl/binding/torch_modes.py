"""``--numa-binding``: each worker gets the CPUs beside its device. The modes are torchrun's.

The device of a worker is the one that CUDA numbers as its local rank. It lies at a NUMA node, its home, and
the worker gets of the CPUs that it would inherit

* ``node``: all of its home,
* ``socket``: all of the NUMA nodes in the socket of its home,
* ``exclusive``: its share of the cores of its home, which are dealt to all visible devices there, the first
  ones get what is left over,
* ``core-complex``: those that share one last-level cache in its home; the visible devices there take the
  caches in turn, the one with most CPUs first.

torchrun gives up where it sees no device. Here the workers are then spread evenly over the NUMA nodes that
have CPUs, in the order of their local ranks, and the rules are the same. Only NVIDIA's devices count so far.
torchrun binds CPUs alone; here a worker also prefers the memory of its home if none of its CPUs lies
elsewhere. It is a preference: where a worker is bound to the memory of a node, a full node gets it killed.
"""

from __future__ import annotations

from dsl._record import record
from dsl.binding.deepspeed import Binding, format_core_list
from dsl.devices.select import visible_entries
from dsl.errors import BindingError
from dsl.model import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dsl.devices.nvidia import Device
    from dsl.machine.host import Host
    from dsl.machine.topology import NumaNode, Topology
    from dsl.model import MemoryPolicy

MODES = ("node", "socket", "exclusive", "core-complex")
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


@record
class NumaPlan:
    """A binding for each local rank, and what the user should know of how it was found."""

    bindings: tuple[Binding, ...]
    notices: tuple[Notice, ...] = ()


@record
class _Place:
    """What the rules need to know.

    ``nodes``: CPUs that may be used of each NUMA node that has any, by its number. ``homes`` and ``names`` of
    the devices, or of the workers where there is none. ``packages`` and ``caches`` only for the modes that
    mean them: they take many files to read.
    """

    topology: Topology
    nodes: Mapping[int, tuple[int, ...]]
    homes: tuple[int, ...]
    names: tuple[str, ...]
    packages: Sequence[Sequence[int]] = ()
    caches: Sequence[Sequence[int]] = ()


def plan_numa(mode: str, count: int, environ: Mapping[str, str], host: Host) -> NumaPlan:
    """Bind ``count`` workers by one of `MODES`, within the affinity mask that they would inherit.

    ``CUDA_VISIBLE_DEVICES`` of ``environ`` says which devices there are, and in which order. Its numbers
    follow the PCI addresses, as CUDA's do for devices of one model. A device whose NUMA node the machine
    does not tell is taken to lie at the first that has CPUs, as torchrun does.

    Raises:
        BindingError: there are devices, but fewer than workers; no CPU beside a worker's device may be used;
            or there are fewer cores than devices to share them exclusively.
    """
    allowed = tuple(sorted(host.allowed_cpus()))
    topology = host.topology(allowed)
    nodes = _usable_nodes(topology.numa_nodes, allowed)
    gpus = _visible_gpus(count, environ, host)
    if gpus:
        first = next(iter(nodes))
        homes = [first if gpu.numa_node is None else gpu.numa_node for gpu in gpus]
        names = [f"device {gpu.address}" for gpu in gpus]
    else:
        distinct: dict[Sequence[int], int] = {}  # fake NUMA nodes have the same CPUs
        for number, cpus in nodes.items():
            distinct.setdefault(cpus, number)
        spread = list(distinct.values())
        homes = [spread[rank * len(spread) // count] for rank in range(count)]
        names = [f"local rank {rank}" for rank in range(count)]
    packages = host.packages(allowed) if mode == "socket" else ()
    caches = host.caches(allowed) if mode == "core-complex" else ()
    place = _Place(topology, nodes, tuple(homes), tuple(names), packages, caches)
    bindings = tuple([_bind(mode, rank, place, allowed) for rank in range(count)])
    return NumaPlan(bindings, tuple(_notices(mode, gpus, nodes, environ)))


def _usable_nodes(numa_nodes: Iterable[NumaNode], allowed: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """CPUs that may be used of each NUMA node that has any; all are one node if the kernel knows none."""
    may_be_used = frozenset(allowed)
    usable = {node.number: tuple([cpu for cpu in node.cpus if cpu in may_be_used]) for node in numa_nodes}
    return {number: cpus for number, cpus in usable.items() if cpus} or {0: tuple(allowed)}


def _visible_gpus(count: int, environ: Mapping[str, str], host: Host) -> list[Device]:
    """Devices in CUDA's order. Like CUDA, nothing is read beyond an entry that is no device here."""
    entries = visible_entries(environ.get(VISIBLE_VARIABLE))
    gpus = [] if entries == () else list(host.gpus())
    if not gpus:
        return []
    shown = gpus
    if entries is not None:
        shown = []
        for entry in entries:
            gpu = _find(entry, gpus, host)
            if gpu is None:
                break
            shown.append(gpu)
    if count > len(shown):
        devices = f"{len(shown)} device{'' if len(shown) == 1 else 's'} can be seen"
        where = f" ({VISIBLE_VARIABLE}={environ[VISIBLE_VARIABLE]})" if entries is not None else ""
        raise BindingError(
            f"--numa-binding: {devices}{where}, but each of {count} workers needs one, "
            "start fewer or leave it out"
        )
    return shown


def _find(entry: str, gpus: Sequence[Device], host: Host) -> Device | None:
    """The device that an entry of ``CUDA_VISIBLE_DEVICES`` means, by number or the beginning of its UUID."""
    if entry.isascii() and entry.isdigit():
        return gpus[int(entry)] if len(entry) < 9 and int(entry) < len(gpus) else None
    if entry.startswith("MIG-") and not entry.startswith("MIG-GPU-"):
        address = host.mig_parent(entry)
        return next((gpu for gpu in gpus if gpu.address == address), None)
    # Older drivers name a partition after its device: MIG-GPU-<uuid>/<instance>/<instance>.
    name = entry.removeprefix("MIG-").partition("/")[0].lower()
    matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(name)] if name.startswith("gpu-") else []
    return matches[0] if len(matches) == 1 else None


def _bind(mode: str, rank: int, place: _Place, allowed: Sequence[int]) -> Binding:
    home = place.homes[rank]
    own = place.nodes.get(home)
    if own is None:
        raise BindingError(
            f"--numa-binding {mode}: {place.names[rank]} is at NUMA node {home}, none of whose CPUs may be "
            f"used (only {format_core_list(allowed)}), widen the affinity mask or leave it out"
        )
    if mode == "socket":
        cpus = _socket(own, place)
    elif mode == "exclusive":
        cpus = _share(rank, own, place)
    elif mode == "core-complex":
        cpus = _complex(rank, own, place)
    else:
        cpus = own
    return Binding(cpus, _memory(cpus, home, place.topology.numa_nodes))


def _socket(own: Sequence[int], place: _Place) -> tuple[int, ...]:
    """A NUMA node is in the socket of its first CPU."""
    package = next((package for package in place.packages if own[0] in package), tuple(own))
    cpus = {cpu for node in place.nodes.values() if node[0] in package for cpu in node}
    return tuple(sorted(cpus))


def _share(rank: int, own: Sequence[int], place: _Place) -> tuple[int, ...]:
    cores = sorted(_cut(place.topology.cores, own).items())
    position, sharers = _position(rank, place)
    if len(cores) < sharers:
        raise BindingError(
            f"--numa-binding exclusive: {place.names[rank]} is one of {sharers} at NUMA node "
            f"{place.homes[rank]}, which has {len(cores)} core{'' if len(cores) == 1 else 's'} that may be "
            "used, choose another mode"
        )
    each, left = divmod(len(cores), sharers)
    begin = position * each + min(position, left)
    end = begin + each + (position < left)
    return tuple(sorted([cpu for _, core in cores[begin:end] for cpu in core]))


def _complex(rank: int, own: Sequence[int], place: _Place) -> tuple[int, ...]:
    caches = sorted(_cut(place.caches, own).items(), key=lambda item: (-len(item[1]), item[0]))
    if not caches:
        return tuple(own)  # the kernel names none, as in some virtual machines
    return caches[_position(rank, place)[0] % len(caches)][1]


def _cut(groups: Iterable[Sequence[int]], own: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """What each group has of some CPUs, by the first CPU of the whole group."""
    mine = frozenset(own)
    found = {group[0]: tuple([cpu for cpu in group if cpu in mine]) for group in groups}
    return {first: cpus for first, cpus in found.items() if cpus}


def _position(rank: int, place: _Place) -> tuple[int, int]:
    """Place of a worker's device among the devices of its NUMA node, and their number."""
    home = place.homes[rank]
    return place.homes[:rank].count(home), place.homes.count(home)


def _memory(cpus: Iterable[int], home: int, numa_nodes: Iterable[NumaNode]) -> MemoryPolicy | None:
    for node in numa_nodes:
        if node.number == home and node.usable_memory and set(cpus) <= set(node.cpus):
            return ("preferred", (home,))
    return None


def _notices(
    mode: str, gpus: Sequence[Device], nodes: Mapping[int, Sequence[int]], environ: Mapping[str, str]
) -> list[Notice]:
    notices = []
    if not gpus:
        over = f"{len(nodes)} NUMA node{'' if len(nodes) == 1 else 's'}"
        text = f"no NVIDIA device can be seen, workers are spread over {over}"
        notices.append(Notice("info", f"--numa-binding {mode}: {text}"))
    lost = [gpu.address for gpu in gpus if gpu.numa_node is None]
    if lost and len(nodes) > 1:
        text = f"the machine does not tell the NUMA node of {len(lost)} of {len(gpus)} devices"
        notices.append(Notice("warning", f"--numa-binding {mode}: {text}, {next(iter(nodes))} is taken"))
    is_numbered = not environ.get(VISIBLE_VARIABLE, "0").startswith(("GPU-", "MIG-"))
    models = {gpu.model for gpu in gpus}
    if len(models) > 1 and is_numbered and environ.get(ORDER_VARIABLE) != "PCI_BUS_ID":
        text = f"devices of {len(models)} models are taken in the order of their PCI addresses"
        notices.append(
            Notice("warning", f"--numa-binding {mode}: {text}, set {ORDER_VARIABLE}=PCI_BUS_ID to be sure")
        )
    return notices
