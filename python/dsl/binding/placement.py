"""Options of both commands about cores and memory, over the binding of either: ``--bind``, ``--mem-policy``.

Also what goes with any binding: the device of each worker, and how many threads it should have.
"""

from __future__ import annotations

from dsl._record import record
from dsl.binding.deepspeed import Binding, allowed_cores, memory_groups, refuse_kmp_affinity
from dsl.model import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from dsl.machine.host import Host
    from dsl.machine.topology import Topology
    from dsl.model import MemoryPolicy, PlacementRequest, WorkerDevice

THREADS_VARIABLE = "OMP_NUM_THREADS"
AFFINITY_VARIABLE = "KMP_AFFINITY"


@record
class Placement:
    """By local rank the binding, the device and the number of threads of each worker.

    Each is empty where there is none: no binding is in force, no device was looked up or found, the threads
    are somebody else's choice.
    """

    bindings: tuple[Binding, ...] = ()
    devices: tuple[WorkerDevice | None, ...] = ()
    threads: tuple[int, ...] = ()
    notices: tuple[Notice, ...] = ()

    def variables(self, local_rank: int) -> dict[str, str]:
        """What the worker's environment has of it."""
        return {THREADS_VARIABLE: str(self.threads[local_rank])} if self.threads else {}

    def device(self, local_rank: int) -> WorkerDevice | None:
        """The worker's device, if it is known."""
        return self.devices[local_rank] if self.devices else None


def shown_devices(
    request: PlacementRequest,
    env: Mapping[str, str],
    count: int,
    host: Host,
    accelerator: Callable[[], str],
    own: Sequence[Mapping[str, str]] = (),
) -> tuple[WorkerDevice | None, ...]:
    """The device of each of ``count`` workers: the one that its runtime numbers as its local rank.

    ``env`` is the workers' environment, ``own`` what each has over it if each sees one device alone.
    ``accelerator`` names the devices (as `dsl.devices.select.ACCELERATORS`). Empty where no request needs them:
    then nothing is looked up. None for a worker that has no device, or one of which nothing is known.
    """
    if request.bind != "auto" and not request.names_devices:
        return ()
    name = accelerator()
    gpus = host.gpus() if name == "cuda" else ()
    others = () if gpus or name == "cpu" else host.other_devices(name, env)
    if not gpus and not others:
        return (None,) * count
    from dsl.devices.located import worker_devices

    return worker_devices(name, env, count, gpus, others, own)


def place(
    request: PlacementRequest,
    count: int,
    bindings: Sequence[Binding],
    devices: Sequence[WorkerDevice | None],
    environ: Mapping[str, str],
    host: Host,
    *,
    sizes_threads: bool = True,
) -> Placement:
    """Carry out the options for ``count`` workers.

    ``bindings`` are those of an option of the command's own (empty: none). Its ``sizes_threads`` says whether
    they decide about ``OMP_NUM_THREADS``; those of ``--bind auto`` do. The user's choice is left alone.

    Raises:
        BindingError: ``--bind-strict`` forbids what is left, or ``KMP_AFFINITY`` would undo the binding.
    """
    notices = _unused_options(request, is_bound=bool(bindings))
    is_auto = request.bind == "auto"
    if not is_auto and not bindings:
        return Placement(devices=tuple(devices), notices=tuple(notices))
    allowed = sorted(host.allowed_cpus())
    topology = host.topology(allowed)
    if is_auto:
        from dsl.binding.auto import bind_auto

        refuse_kmp_affinity("--bind auto", environ)
        homes = [device.numa_node if device else None for device in devices] or [None] * count
        bindings, more = bind_auto(homes, allowed, topology, strict=request.strict)
        notices.extend(more)
    elif AFFINITY_VARIABLE in environ and sizes_threads:
        notices.append(Notice("warning", f"{AFFINITY_VARIABLE} is set and may undo the binding in OpenMP"))
    mode = request.memory or ("preferred" if is_auto else None)
    if mode is not None:
        # Workers that share cores are many; what is asked of one holds for them all.
        policies = {cpus: memory_policy(mode, cpus, topology) for cpus in {one.cpus for one in bindings}}
        made = {cpus: Binding(cpus, policy) for cpus, policy in policies.items()}
        bindings = [made[one.cpus] for one in bindings]
    chosen = THREADS_VARIABLE in environ or not (is_auto or sizes_threads)
    threads = () if chosen else _threads(bindings, allowed, topology)
    return Placement(tuple(bindings), tuple(devices), threads, tuple(notices))


def memory_policy(mode: str, cpus: Collection[int], topology: Topology) -> MemoryPolicy | None:
    """The policy ``mode`` on the NUMA nodes of some CPUs; None where it cannot say anything.

    A preference is for one node: that in which all the CPUs lie, or the high-bandwidth memory beside it.
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


def _threads(bindings: Sequence[Binding], allowed: Collection[int], topology: Topology) -> tuple[int, ...]:
    """Physical cores of each worker; a core that several have counts for each as a part of one."""
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


def _unused_options(request: PlacementRequest, *, is_bound: bool) -> list[Notice]:
    notices = []
    if request.strict and request.bind != "auto":
        notices.append(Notice("warning", "--bind-strict has no effect without --bind auto"))
    if request.memory is not None and request.bind != "auto" and not is_bound:
        notices.append(Notice("warning", "--mem-policy has no effect without a binding, such as --bind auto"))
    return notices
