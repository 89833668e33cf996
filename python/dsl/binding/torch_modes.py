"""``--numa-binding``: each worker gets the CPUs beside its device. The modes are torchrun's.

The device of a worker is the one whose number in CUDA is the worker's local rank. The NUMA node of this
device is the worker's home. Of the CPUs that it would inherit, the worker gets

* ``node``: all CPUs of its home,
* ``socket``: all CPUs of the NUMA nodes in the socket of its home,
* ``exclusive``: its share of the cores of its home; all visible devices there share the cores, and the first
  devices get the cores that are left over,
* ``core-complex``: the CPUs that share one last-level cache in its home; the visible devices there take the
  caches in turn, the cache with most CPUs first.

torchrun gives up if it sees no device. Here the workers are then spread evenly over the NUMA nodes that have
CPUs, in the order of their local ranks, and the rules are the same. Only NVIDIA's devices count so far.
torchrun binds only CPUs; here a worker also prefers the memory of its home if all of its CPUs lie there. It
is only a preference: a worker that is bound to the memory of one node gets killed when that memory is full.
"""

from __future__ import annotations

from dsl._record import record
from dsl.binding.cores import Binding
from dsl.devices.accelerators import hides_all
from dsl.errors import PlacementError
from dsl.lists import format_ranges
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dsl.devices.device_facts import DeviceFacts
    from dsl.devices.nvidia import Device
    from dsl.machine.cpus import Cpus, NumaNode, Topology
    from dsl.model.node import MemoryPolicy

MODES = ("node", "socket", "exclusive", "core-complex")
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


@record
class NumaPlan:
    """A binding for each local rank, and what the user should know about how it was found."""

    bindings: tuple[Binding, ...]
    notices: tuple[Notice, ...] = ()


@record
class _Place:
    """The facts that the rules need."""

    topology: Topology
    nodes: Mapping[int, tuple[int, ...]]
    """Usable CPUs of each NUMA node that has any, by its number."""
    homes: tuple[int, ...]
    """NUMA nodes of the devices; if there are no devices, of the workers."""
    names: tuple[str, ...]
    """What messages call these devices or workers."""
    packages: Sequence[Sequence[int]] = ()
    """CPUs of each socket, only for the mode that needs them: they take many files to read."""
    caches: Sequence[Sequence[int]] = ()
    """CPUs of each last-level cache, likewise."""


def plan_numa(
    mode: str, count: int, environ: Mapping[str, str], devices: DeviceFacts, cpus: Cpus
) -> NumaPlan:
    """Bind ``count`` workers by one of `MODES`, within the affinity mask that they would inherit.

    ``CUDA_VISIBLE_DEVICES`` of ``environ`` says which devices there are, and in which order. Its numbers
    follow the PCI addresses, as CUDA's do for devices of one model. If the machine does not tell the NUMA
    node of a device, it is taken to be the first node that has CPUs, as in torchrun.

    Raises:
        PlacementError: there are devices, but fewer than workers; no CPU beside a worker's device may be
            used; or there are fewer cores than devices to share them exclusively.
    """
    allowed, topology = cpus.allowed, cpus.topology
    nodes = _usable_nodes(topology.numa_nodes, allowed)
    gpus = _visible_gpus(count, environ, devices)
    if gpus:
        first = next(iter(nodes))
        homes = [first if gpu.numa_node is None else gpu.numa_node for gpu in gpus]
        names = [f"device {gpu.address}" for gpu in gpus]
    else:
        distinct: dict[Sequence[int], int] = {}  # fake NUMA nodes have the same CPUs
        for number, members in nodes.items():
            distinct.setdefault(members, number)
        spread = list(distinct.values())
        homes = [spread[rank * len(spread) // count] for rank in range(count)]
        names = [f"local rank {rank}" for rank in range(count)]
    packages = cpus.packages if mode == "socket" else ()
    caches = cpus.caches if mode == "core-complex" else ()
    place = _Place(topology, nodes, tuple(homes), tuple(names), packages, caches)
    bindings = tuple([_bind(mode, rank, place, allowed) for rank in range(count)])
    return NumaPlan(bindings, tuple(_notices(mode, gpus, nodes, environ)))


def _usable_nodes(numa_nodes: Iterable[NumaNode], allowed: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Usable CPUs of each NUMA node that has any; all CPUs are one node if the kernel knows no nodes."""
    may_be_used = frozenset(allowed)
    usable = {node.number: tuple([cpu for cpu in node.cpus if cpu in may_be_used]) for node in numa_nodes}
    return {number: cpus for number, cpus in usable.items() if cpus} or {0: tuple(allowed)}


def _visible_gpus(count: int, environ: Mapping[str, str], devices: DeviceFacts) -> Sequence[Device]:
    """Visible devices in CUDA's order; empty if there are none, or if the user hides them all."""
    value = environ.get(VISIBLE_VARIABLE)
    gpus = () if value is not None and hides_all(value) else devices.gpus
    shown = _shown(value, gpus, devices) if gpus else ()
    if gpus and count > len(shown):
        text = f"{len(shown)} device{'' if len(shown) == 1 else 's'} can be seen"
        where = "" if value is None else f" ({VISIBLE_VARIABLE}={value})"
        raise PlacementError(
            f"--numa-binding: {text}{where}, but each of {count} workers needs one, "
            "start fewer or leave it out"
        )
    return shown


def _shown(value: str | None, gpus: Sequence[Device], devices: DeviceFacts) -> Sequence[Device]:
    from dsl.devices.masks import read_entries
    from dsl.devices.nvidia import visible_devices

    # Only the driver knows all MIG instances. A process sees one, but each worker may show itself another.
    is_divided = (read_entries(value) or ("",))[0].startswith("MIG-")
    return visible_devices(value, devices.survey.devices if is_divided else gpus, alone=is_divided)


def _bind(mode: str, rank: int, place: _Place, allowed: Sequence[int]) -> Binding:
    home = place.homes[rank]
    own = place.nodes.get(home)
    if own is None:
        raise PlacementError(
            f"--numa-binding {mode}: {place.names[rank]} is at NUMA node {home}, none of whose CPUs may be "
            f"used (only {format_ranges(allowed)}), widen the affinity mask or leave it out"
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
    """CPUs of all NUMA nodes in the socket of ``own``. A node is in the socket of its first CPU."""
    package = next((package for package in place.packages if own[0] in package), tuple(own))
    cpus = {cpu for node in place.nodes.values() if node[0] in package for cpu in node}
    return tuple(sorted(cpus))


def _share(rank: int, own: Sequence[int], place: _Place) -> tuple[int, ...]:
    cores = sorted(_cut(place.topology.cores, own).items())
    position, sharers = _position(rank, place)
    if len(cores) < sharers:
        raise PlacementError(
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
    """The part of each group that is in ``own``, by the first CPU of the whole group."""
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
        notices.append(Notice("info", f"--numa-binding {mode}: {text}", is_fallback=True))
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
