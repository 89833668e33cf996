"""The one entry for wishes about placement: which CPUs, memory and device each worker of a node gets.

``--bind_cores_to_rank`` is DeepSpeed's, ``--numa-binding`` torchrun's, ``--bind auto`` ours; at most one of
them is in force. ``--mem-policy`` overrides the memory policy of any of them. A binding also decides how many
threads a worker should start.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.binding.rules import (
    Binding,
    allowed_cores,
    bind_auto,
    bind_workers,
    describe_all,
    memory_policy,
    plan_numa,
)
from dsl.errors import OptionError, PlacementError
from dsl.model.job import Notice
from dsl.words import THREADS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsl.devices.offered import DeviceFacts
    from dsl.facts import Facts
    from dsl.machine.kernel import Topology
    from dsl.model.job import WorkerDevice
    from dsl.model.request import PlacementRequest

AFFINITY_VARIABLE = "KMP_AFFINITY"
"""Tells OpenMP where its threads run, and so undoes a binding."""


class NodeGroup(Record):
    """The workers of a node that are to be placed."""

    count: int
    """Number of workers."""
    env: Mapping[str, str]
    """The environment that all workers share, without the command's own default for the number of threads."""
    own: tuple[Mapping[str, str], ...] = ()
    """Further variables of each worker, if each sees one device alone; empty: all see the same devices."""
    accelerator: str = ""
    """A name in `dsl.devices.ACCELERATORS`; empty: the one that ``workers`` stands for."""
    workers: str = "auto"
    """``--nproc-per-node``, which may name an accelerator."""
    first_rank: int = 0
    """Number of the first worker in messages."""
    noun: str = "local rank"
    """What messages call that number: ``rank`` or ``local rank``."""
    announces: bool = False
    """Whether a message tells how many cores each worker gets."""


class Placement(Record):
    """What each worker of the node gets, by local rank."""

    bindings: tuple[Binding, ...] = ()
    """Empty: no binding is in force."""
    devices: tuple[WorkerDevice | None, ...] = ()
    """Empty: not looked up. None: the worker has no device, or nothing is known about its device."""
    threads: tuple[int, ...] = ()
    """How many threads each worker should start; empty: the binding does not decide that."""
    node_threads: int | None = None
    """How many threads each worker starts, against the user's choice, too; None: the user's choice holds."""
    notices: tuple[Notice, ...] = ()
    """What the user should know, in order."""


def place(wish: PlacementRequest, group: NodeGroup, facts: Facts) -> Placement:
    """Decide the placement of a node's workers by all wishes.

    ``--bind_cores_to_rank`` sets ``node_threads``, as DeepSpeed does; the other bindings set ``threads``,
    unless the user has chosen a number.

    Raises:
        OptionError: two wishes exclude each other.
        PlacementError: the cores cannot be given as asked, or ``KMP_AFFINITY`` would undo the binding.
    """
    options = _bindings_asked_for(wish)
    if len(options) > 1:
        raise OptionError(f"{options[0]} cannot be used with {options[1]}, leave one of them out")
    notices = _unused_options(wish, is_bound=bool(options))
    devices = shown_devices(wish, group, facts.devices)
    if not options:
        return Placement(devices=devices, notices=tuple(notices))
    if AFFINITY_VARIABLE in group.env:
        if wish.numa_binding is None:
            raise PlacementError(
                f"{AFFINITY_VARIABLE} is set and conflicts with {options[0]}, unset one of them"
            )
        notices.append(Notice("warning", f"{AFFINITY_VARIABLE} is set and may undo the binding in OpenMP"))
    chosen, more = _choose_cpus(wish, group, facts, devices)
    topology = facts.cpus.topology
    # Many workers may share the same cores, and then have the same policy: it is made once for all of them.
    mode = wish.memory or ("beside" if wish.bind_cores_to_rank else "preferred")
    made = {cpus: Binding(cpus, memory_policy(mode, cpus, topology)) for cpus in set(chosen)}
    bindings = tuple([made[cpus] for cpus in chosen])
    has_threads = THREADS_VARIABLE in group.env or wish.bind_cores_to_rank
    return Placement(
        bindings,
        devices,
        () if has_threads else _threads(chosen, facts.cpus.allowed, topology),
        len(chosen[0]) if wish.bind_cores_to_rank else None,
        (*more, *notices, *_told(wish, bindings, group)),
    )


def _bindings_asked_for(wish: PlacementRequest) -> list[str]:
    """The options that bind workers, as messages call them."""
    return [
        *([f"--bind {wish.bind}"] if wish.bind != "none" else []),
        *(["--numa-binding"] if wish.numa_binding is not None else []),
        *(["--bind_cores_to_rank"] if wish.bind_cores_to_rank else []),
    ]


def _choose_cpus(
    wish: PlacementRequest, group: NodeGroup, facts: Facts, devices: Sequence[WorkerDevice | None]
) -> tuple[list[tuple[int, ...]], list[Notice]]:
    """The CPUs of each worker, by the one option that is in force."""
    cpus = facts.cpus
    if wish.bind_cores_to_rank:
        return bind_workers(group.count, wish.core_list, cpus.allowed, cpus.topology), []
    if wish.numa_binding is not None:
        return plan_numa(wish.numa_binding, group.count, group.env, facts.devices, cpus)
    homes = [device.numa_node if device else None for device in devices] or [None] * group.count
    return bind_auto(homes, cpus.allowed, cpus.topology, strict=wish.strict)


def shown_devices(
    wish: PlacementRequest, group: NodeGroup, devices: DeviceFacts
) -> tuple[WorkerDevice | None, ...]:
    """The device of each worker: the one whose number in the runtime is the worker's local rank.

    Empty if no wish needs devices: then nothing is looked up.
    """
    if wish.bind != "auto" and not wish.names_devices:
        return ()
    name = group.accelerator
    if not name:
        from dsl.devices.counted import node_accelerator

        name = node_accelerator(group.workers, group.env, devices)
    gpus = devices.gpus if name == "cuda" else ()
    others = () if gpus or name == "cpu" else devices.located(name, group.env)
    if not gpus and not others:
        return (None,) * group.count
    from dsl.devices.others import worker_devices

    return worker_devices(name, group.env, group.count, gpus, others, group.own)


def _threads(
    chosen: Sequence[tuple[int, ...]], allowed: Collection[int], topology: Topology
) -> tuple[int, ...]:
    """Number of physical cores of each worker; a core that n workers share counts as 1/n for each of them."""
    core_of = {cpu: core for core in allowed_cores(allowed, topology) for cpu in core}
    users: dict[tuple[int, ...], int] = {}
    for cpus in chosen:
        users[cpus] = users.get(cpus, 0) + 1
    owned = {cpus: {core_of[cpu] for cpu in cpus} for cpus in users}
    sharers: dict[tuple[int, ...], int] = {}
    for cpus, cores in owned.items():
        for core in cores:
            sharers[core] = sharers.get(core, 0) + users[cpus]
    # Sums of equal parts may fall short of a whole number by a rounding error.
    threads = {
        cpus: max(1, int(sum([1 / sharers[core] for core in cores]) + 1e-6)) for cpus, cores in owned.items()
    }
    return tuple([threads[cpus] for cpus in chosen])


def _unused_options(wish: PlacementRequest, *, is_bound: bool) -> list[Notice]:
    notices = []
    if wish.strict and wish.bind != "auto":
        notices.append(Notice("warning", "--bind-strict has no effect without --bind auto"))
    if wish.memory is not None and wish.bind != "auto" and not is_bound:
        notices.append(Notice("warning", "--mem-policy has no effect without a binding, such as --bind auto"))
    return notices


def _told(wish: PlacementRequest, bindings: Sequence[Binding], group: NodeGroup) -> list[Notice]:
    """How many cores the workers get, if the command announces that, and a table at level debug."""
    table = [Notice("debug", text) for text in describe_all(group.noun, group.first_rank, bindings)]
    if not group.announces:
        return table
    sizes = [len(binding.cpus) for binding in bindings]
    least, most = min(sizes), max(sizes)
    shown = f"{least}" if least == most else f"{least} to {most}"
    # Only DeepSpeed's binding takes one thread of a core without the core's other threads.
    noun = "cores" if wish.bind_cores_to_rank else "CPUs"
    return [Notice("detail", f"{noun} bound to each worker: {shown}"), *table]
