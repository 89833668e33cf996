"""`TorchRequest` -> `Group` -> a `NodePlan` for each attempt: what torchrun decides, without torch.

A `Group` is this node's part of the job, the same in every attempt. What changes from attempt to attempt (the
port where the workers meet, the files they may write, the count that they are told) is `plan_attempt`'s.
"""

from __future__ import annotations

from dsl._record import record, replace
from dsl.devices.own import local_world_size, own_devices
from dsl.errors import OptionError
from dsl.lists import THREADS_VARIABLE
from dsl.model import NodePlan, Notice, PlacementRequest, WorkerPlan
from dsl.output.routes import TEMPLATE_VARIABLE, LogPlace, Shown, needs_run_dir, plan_output, run_dirs
from dsl.rendezvous.static import (
    attempt_port,
    check_meeting,
    meeting_notices,
    meeting_point,
    node_count,
    run_id,
)
from dsl.signals import SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from dsl.binding.cores import Binding
    from dsl.binding.placement import Placement
    from dsl.facts import Facts
    from dsl.machine.console import Console
    from dsl.model import SignalMeaning, TorchRequest
    from dsl.output.plugin import LogsPlugin
    from dsl.output.routes import OutputPlan

LOCAL_RANK_MACRO = "${local_rank}"
HOST_MACRO = "${hostname}"
LOCAL_RANK_OPTIONS = {"": "", "none": "", "dash": "--local-rank", "underscore": "--local_rank"}
NCCL_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@record
class Group:
    """This node's workers, and all that stays the same when they are started again.

    ``command``: the words of each worker, with ``${local_rank}`` where its local rank is to stand.
    ``master_port`` None: a free one is chosen for each attempt. ``run_dir``: directory of this run, which
    goes when the job ends unless the user has named its place (``keeps_run_dir``) or there is something in
    it. ``devices``: the variables by which each worker sees a device of its own, if it does.
    """

    request: TorchRequest
    command: tuple[str, ...]
    node_count: int
    local_world_size: int
    master_addr: str
    master_port: int | None
    run_id: str
    run_dir: str
    keeps_run_dir: bool
    host_name: str
    console: Console
    environ: Mapping[str, str]
    devices: tuple[Mapping[str, str], ...] = ()
    bindings: tuple[Binding, ...] = ()
    notices: tuple[Notice, ...] = ()
    plugin: LogsPlugin | None = None
    placement: Placement | None = None

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return self.node_count * self.local_world_size

    @property
    def ranks(self) -> range:
        """Global ranks of this node's workers."""
        first = self.request.node_rank * self.local_world_size if self.node_count > 1 else 0
        return range(first, first + self.local_world_size)


def build_group(
    request: TorchRequest, command: Sequence[str], environ: Mapping[str, str], host: Facts
) -> Group:
    """Decide what this node starts. ``command``: the words of a worker, `worker_words` for a script.

    Raises:
        UsageError: of the kind that fits; `UnsupportedError` for a job whose nodes are not fixed.
    """
    check_meeting(request)
    if request.max_restarts < 0:
        raise OptionError(f"--max-restarts {request.max_restarts}: it must be 0 or more")
    address, port = meeting_point(request)
    count = local_world_size(request.nproc_per_node, environ, host, alone=request.virtual_local_rank)
    job = run_id(request, host.names)
    log_dir = request.output.log_dir
    # A name of the user's may be longer than that of a file can be, and have slashes.
    folder = f"{job.replace('/', '_')[:128]}_{host.names.random()[:8]}"
    run_dir = f"{log_dir}/{folder}" if log_dir else f"{host.names.temp_dir}/dslrun_{host.names.random()}"
    devices: tuple[Mapping[str, str], ...] = ()
    if request.virtual_local_rank:
        devices = own_devices(request.nproc_per_node, environ, count, host.devices)
    placement = _place(request, environ, count, devices, host)
    return Group(
        request=request,
        command=tuple(command),
        node_count=node_count(request),
        local_world_size=count,
        master_addr=address,
        master_port=port,
        run_id=job,
        run_dir=run_dir,
        keeps_run_dir=log_dir is not None,
        host_name=host.names.host,
        console=host.console,
        environ=_group_environment(request, environ, count, job),
        devices=devices,
        bindings=placement.bindings if placement else (),
        notices=(
            *_notices(request, count, environ, run_dir, sizes_threads=bool(placement and placement.threads)),
            *(placement.notices if placement else ()),
        ),
        plugin=_plugin(request),
        placement=placement,
    )


def plan_attempt(group: Group, number: int, host: Facts) -> NodePlan:
    """Decide every worker of one attempt, counted from 0.

    Raises:
        PortError: the port that was asked for is taken, or there is no free one.
        OptionError: an output option makes no sense for this job.
    """
    request = group.request
    port = attempt_port(group.master_port, request, host.ports, again=number > 0)
    # Without maps torchrun writes no files, wherever they would lie.
    asked: Any = replace(request.output, log_dir=None)
    if group.plugin is not None:
        from dsl.output.plugin import plan_with_plugin
        from dsl.output.routes import without_files

        asked = without_files(asked)
    shown = Shown(
        group.ranks, group.world_size, group.console, _console_environment(group), role=request.role
    )
    output = plan_output(asked, shown, LogPlace(group.run_dir, number))
    env = dict(group.environ)
    env["MASTER_ADDR"] = group.master_addr
    env["MASTER_PORT"] = str(port)
    env["TORCHELASTIC_RESTART_COUNT"] = str(number)
    plan = NodePlan(
        host=group.host_name,
        node_rank=request.node_rank if group.node_count > 1 else 0,
        workers=_workers(group, output, number),
        env=env,
        master_addr=group.master_addr,
        master_port=port,
        world_size=group.world_size,
        grace_s=request.grace_s,
        # torchrun's binding leaves memory alone; ours must not fail where that would do.
        binding=request.placement.rule(binds_memory=False),
        log_dir=request.output.log_dir,
        run_dirs=run_dirs(group.run_dir, number, group.local_world_size),
        log_max_bytes=request.output.max_bytes,
        collapse=request.output.collapse,
        line_files=output.line_files,
        log_level=request.log_level,
        notices=() if number else group.notices,
        command="dslrun",
        name=request.script,
        attempt=number,
        signals=_signals(request),
        preempt_signal=request.preempt_signal,
        preempt_grace_s=request.preempt_grace_s,
    )
    return plan if group.plugin is None else plan_with_plugin(group.plugin, plan, group.console)


def _console_environment(group: Group) -> Mapping[str, str]:
    """The environment that decides about prefixes, with this node's name filled in."""
    template = group.environ.get(TEMPLATE_VARIABLE, "")
    if HOST_MACRO not in template:
        return group.environ
    return {**group.environ, TEMPLATE_VARIABLE: template.replace(HOST_MACRO, group.host_name)}


def worker_words(request: TorchRequest, environ: Mapping[str, str], executable: str) -> tuple[str, ...]:
    """The words of a worker that runs the request's script. ``PYTHON_EXEC`` replaces our own interpreter.

    Raises:
        OptionError: a program would have to be a module.
    """
    if request.no_python and request.module:
        raise OptionError("don't use both the '--no-python' flag and the '--module' flag at the same time")
    option = LOCAL_RANK_OPTIONS[request.local_rank_arg]
    rest = (*([f"{option}={LOCAL_RANK_MACRO}"] if option else []), *request.script_args)
    if request.no_python:
        return (request.script, *rest)
    module = ("-m",) if request.module else ()
    return (environ.get("PYTHON_EXEC") or executable, "-u", *module, request.script, *rest)


def _group_environment(
    request: TorchRequest, environ: Mapping[str, str], count: int, run_id: str
) -> dict[str, str]:
    env = dict(environ)
    nodes = node_count(request)
    world_size = str(nodes * count)
    env["GROUP_RANK"] = str(request.node_rank if nodes > 1 else 0)
    env["GROUP_WORLD_SIZE"] = str(nodes)
    env["LOCAL_WORLD_SIZE"] = str(count)
    env["WORLD_SIZE"] = env["ROLE_WORLD_SIZE"] = world_size
    env["ROLE_NAME"] = request.role
    env["TORCHELASTIC_MAX_RESTARTS"] = str(request.max_restarts)
    env["TORCHELASTIC_RUN_ID"] = run_id
    # Rank 0 holds the store: the launcher has no torch to hold it with.
    env["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    names = [SIGNALS.get(number, str(number)) for number in request.stop_signals]
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(names)
    env.setdefault(NCCL_VARIABLE, "1")
    if count > 1:
        env.setdefault(THREADS_VARIABLE, "1")
    return env


def _place(
    request: TorchRequest,
    environ: Mapping[str, str],
    count: int,
    own: tuple[Mapping[str, str], ...],
    host: Facts,
) -> Placement | None:
    """Cores, memory and devices of the workers; None if nothing is asked of them. ``own``: a device each."""
    asked = request.placement
    if request.numa_binding is None and asked == PlacementRequest():
        return None
    from dsl.binding.placement import NodeGroup, place
    from dsl.model import request as wishes

    wish = wishes.PlacementRequest(
        bind=asked.bind,
        memory=asked.memory,
        strict=asked.strict,
        names_devices=asked.names_devices,
        numa_binding=request.numa_binding,
        virtual_local_rank=request.virtual_local_rank,
    )
    return place(wish, NodeGroup(count, environ, own, workers=request.nproc_per_node), host)


def _plugin(request: TorchRequest) -> LogsPlugin | None:
    if request.logs_specs is None:
        return None
    from dsl.output.plugin import load_plugin

    output: Any = request.output
    return load_plugin(request.logs_specs, output)


def _notices(
    request: TorchRequest, count: int, environ: Mapping[str, str], run_dir: str, *, sizes_threads: bool
) -> list[Notice]:
    notices = meeting_notices(request)
    if count > 1 and not sizes_threads and THREADS_VARIABLE not in environ:
        text = f"{THREADS_VARIABLE}=1 for each worker, set it to choose another number of threads"
        notices.append(Notice("info", text))
    output: Any = replace(request.output, log_dir=None)
    if request.logs_specs is None and needs_run_dir(output):
        notices.append(Notice("info", f"log files are in {run_dir}"))
    elif request.logs_specs is None and request.output.max_bytes is not None:
        notices.append(Notice("warning", "--log-max-size has no effect without log files, such as --tee 3"))
    if request.preempt_grace_s is not None and request.preempt_signal is None:
        notices.append(Notice("warning", "--preempt-grace has no effect without --preempt-signal"))
    return notices


def _signals(request: TorchRequest) -> dict[int, SignalMeaning]:
    signals: dict[int, SignalMeaning] = dict.fromkeys(request.stop_signals, "stop")
    signals.update(dict.fromkeys(request.forward_signals, "forward"))
    if request.preempt_signal is not None:
        signals[request.preempt_signal] = "preempt"
    return signals


def _workers(group: Group, output: OutputPlan, attempt: int) -> tuple[WorkerPlan, ...]:
    has_macro = any(LOCAL_RANK_MACRO in word for word in group.command)
    folder = f"{group.run_dir}/attempt_{attempt}"
    workers = []
    for local_rank, rank in enumerate(group.ranks):
        argv = group.command
        if has_macro:
            argv = tuple([word.replace(LOCAL_RANK_MACRO, str(local_rank)) for word in argv])
        error_file = f"{folder}/{local_rank}/error.json"
        env = {"RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        env["TORCHELASTIC_ERROR_FILE"] = error_file
        if group.devices:
            env["LOCAL_RANK"] = "0"
            env.update(group.devices[local_rank])
        if group.placement is not None:
            env.update(group.placement.variables(local_rank))
        binding = group.bindings[local_rank] if group.bindings else None
        stdout, stderr = output.routes[local_rank]
        workers.append(
            WorkerPlan(
                rank,
                local_rank,
                argv,
                env,
                binding.cpus if binding else None,
                binding.mempolicy if binding else None,
                local_rank == output.stdin,
                stdout,
                stderr,
                output.prefixes[local_rank],
                error_file,
                group.placement.device(local_rank) if group.placement is not None else None,
            )
        )
    return tuple(workers)
