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

from dsl.binding.cores import deal
from dsl.devices.accelerators import hides_all
from dsl.errors import PlacementError
from dsl.lists import counted, format_ranges
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dsl.devices.device_facts import DeviceFacts
    from dsl.devices.nvidia import Device
    from dsl.machine.cpus import Cpus

MODES = ("node", "socket", "exclusive", "core-complex")
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


def plan_numa(
    mode: str, count: int, environ: Mapping[str, str], devices: DeviceFacts, cpus: Cpus
) -> tuple[list[tuple[int, ...]], list[Notice]]:
    """The CPUs of ``count`` workers by one of `MODES`, within the affinity mask that they would inherit.

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
