"""The one entry for wishes about placement: which CPUs, memory and device each worker of a node gets.

``--bind_cores_to_rank`` is DeepSpeed's, ``--numa-binding`` torchrun's, ``--bind auto`` ours; at most one of
them is in force. ``--mem-policy`` overrides the memory policy of any of them. A binding also decides how many
threads a worker should start.
"""

from __future__ import annotations

from dsl._record import record
from dsl.binding.cores import (
    AFFINITY_VARIABLE,
    Binding,
    allowed_cores,
    describe_all,
    memory_policy,
    refuse_kmp_affinity,
)
from dsl.errors import OptionError
from dsl.lists import THREADS_VARIABLE
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsl.devices.device_facts import DeviceFacts
    from dsl.facts import Facts
    from dsl.machine.cpus import Topology
    from dsl.model.node import WorkerDevice
    from dsl.model.request import PlacementRequest


@record
class NodeGroup:
    """The workers of a node that are to be placed."""

    count: int
    """Number of workers."""
    env: Mapping[str, str]
    """The environment that all workers share, without the command's own default for the number of threads."""
    own: tuple[Mapping[str, str], ...] = ()
    """Further variables of each worker, if each sees one device alone; empty: all see the same devices."""
    accelerator: str = ""
    """A name in `dsl.devices.accelerators.ACCELERATORS`; empty: the one that ``workers`` stands for."""
    workers: str = "auto"
    """``--nproc-per-node``, which may name an accelerator."""
    first_rank: int = 0
    """Number of the first worker in messages."""
    noun: str = "local rank"
    """What messages call that number: ``rank`` or ``local rank``."""
    announces: bool = False
    """Whether a message tells how many cores each worker gets."""


@record
class Placement:
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

    def variables(self, local_rank: int) -> dict[str, str]:
        """Variables that the placement adds to the worker's environment."""
        return {THREADS_VARIABLE: str(self.threads[local_rank])} if self.threads else {}

    def device(self, local_rank: int) -> WorkerDevice | None:
        """The worker's device, if it is known."""
        return self.devices[local_rank] if self.devices else None


def place(wish: PlacementRequest, group: NodeGroup, facts: Facts) -> Placement:
    """Decide the placement of a node's workers by all wishes.

    ``--bind_cores_to_rank`` sets ``node_threads``, as DeepSpeed does; the other bindings set ``threads``,
    unless the user has chosen a number.

    Raises:
        OptionError: two wishes exclude each other.
        PlacementError: the cores cannot be given as asked, or ``KMP_AFFINITY`` would undo the binding.
    """
    _refuse_two_bindings(wish)
    bindings, notices = _by_command(wish, group, facts)
    notices += _unused_options(wish, is_bound=bool(bindings))
    devices = shown_devices(wish, group, facts.devices)
    is_auto = wish.bind == "auto"
    if not is_auto and not bindings:
        return Placement(devices=devices, notices=tuple(notices))
    cpus = facts.cpus
    if is_auto:
        from dsl.binding.auto import bind_auto

        refuse_kmp_affinity("--bind auto", group.env)
        homes = [device.numa_node if device else None for device in devices] or [None] * group.count
        bindings, more = bind_auto(homes, cpus.allowed, cpus.topology, strict=wish.strict)
        notices += more
    elif AFFINITY_VARIABLE in group.env:
        notices.append(Notice("warning", f"{AFFINITY_VARIABLE} is set and may undo the binding in OpenMP"))
    node_threads = len(bindings[0].cpus) if wish.bind_cores_to_rank else None
    chosen = THREADS_VARIABLE in group.env or wish.bind_cores_to_rank
    bindings = _with_memory(wish, bindings, cpus.topology)
    return Placement(
        bindings,
        devices,
        () if chosen else _threads(bindings, cpus.allowed, cpus.topology),
        node_threads,
        (*notices, *_told(wish, bindings, group)),
    )


def _refuse_two_bindings(wish: PlacementRequest) -> None:
    given = []
    if wish.bind != "none":
        given.append(f"--bind {wish.bind}")
    if wish.numa_binding is not None:
        given.append("--numa-binding")
    if wish.bind_cores_to_rank:
        given.append("--bind_cores_to_rank")
    if len(given) > 1:
        raise OptionError(f"{given[0]} cannot be used with {given[1]}, leave one of them out")


def _by_command(
    wish: PlacementRequest, group: NodeGroup, facts: Facts
) -> tuple[tuple[Binding, ...], list[Notice]]:
    """The bindings of DeepSpeed's or torchrun's option; empty if the user gave neither."""
    if wish.bind_cores_to_rank:
        from dsl.binding.bind_cores import bind_workers

        cpus = facts.cpus
        found = bind_workers(group.count, wish.core_list, cpus.allowed, cpus.topology, group.env)
        return tuple(found), []
    if wish.numa_binding is None:
        return (), []
    from dsl.binding.torch_modes import plan_numa

    numa = plan_numa(wish.numa_binding, group.count, group.env, facts.devices, facts.cpus)
    return numa.bindings, list(numa.notices)


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
        from dsl.devices.nproc import node_accelerator

        name = node_accelerator(group.workers, group.env, devices)
    gpus = devices.gpus if name == "cuda" else ()
    others = () if gpus or name == "cpu" else devices.located(name, group.env)
    if not gpus and not others:
        return (None,) * group.count
    from dsl.devices.locations import worker_devices

    return worker_devices(name, group.env, group.count, gpus, others, group.own)


def _with_memory(
    wish: PlacementRequest, bindings: Sequence[Binding], topology: Topology
) -> tuple[Binding, ...]:
    mode = wish.memory or ("preferred" if wish.bind == "auto" else None)
    if mode is None:
        return tuple(bindings)
    # Many workers may share the same cores, and then have the same policy: it is made once for all of them.
    policies = {cpus: memory_policy(mode, cpus, topology) for cpus in {one.cpus for one in bindings}}
    made = {cpus: Binding(cpus, policy) for cpus, policy in policies.items()}
    return tuple([made[one.cpus] for one in bindings])


def _threads(bindings: Sequence[Binding], allowed: Collection[int], topology: Topology) -> tuple[int, ...]:
    """Number of physical cores of each worker; a core that n workers share counts as 1/n for each of them."""
    core_of = {cpu: core for core in allowed_cores(allowed, topology) for cpu in core}
    users: dict[tuple[int, ...], int] = {}
    for binding in bindings:
        users[binding.cpus] = users.get(binding.cpus, 0) + 1
    owned = {cpus: {core_of[cpu] for cpu in cpus} for cpus in users}
    sharers: dict[tuple[int, ...], int] = {}
    for cpus, cores in owned.items():
        for core in cores:
            sharers[core] = sharers.get(core, 0) + users[cpus]
    # Sums of equal parts may fall short of a whole number by a rounding error.
    threads = {
        cpus: max(1, int(sum([1 / sharers[core] for core in cores]) + 1e-6)) for cpus, cores in owned.items()
    }
    return tuple([threads[binding.cpus] for binding in bindings])


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
