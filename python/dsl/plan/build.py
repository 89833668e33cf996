"""`Request` -> `Plan` -> `NodePlan`, in the order of decisions of DeepSpeed's runner."""

from __future__ import annotations

from dsl.devices.select import find_devices, visible_override, visible_slots, visible_warning
from dsl.devices.table import ACCELERATORS
from dsl.errors import (
    FilterError,
    HostfileError,
    LauncherError,
    MultiNodeError,
    OptionError,
    UnsupportedError,
)
from dsl.lists import THREADS_VARIABLE
from dsl.model import (
    DEFAULT_HOSTFILE,
    DEFAULT_MASTER_PORT,
    Node,
    NodePlan,
    Notice,
    PlacementRequest,
    Plan,
    WorkerPlan,
)
from dsl.output.routes import LogPlace, Shown, needs_run_dir, plan_output
from dsl.plan.environ import POD_ENVIRONMENT_PATH, node_environment, parse_pod_environment, worker_environment
from dsl.plan.program import worker_command
from dsl.rendezvous.port import choose_port
from dsl.resources.filters import apply_filters, trim
from dsl.resources.world import assign_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from dsl.binding.placement import Placement
    from dsl.devices.select import Devices
    from dsl.facts import Facts
    from dsl.model import OutputRequest, Request
    from dsl.output.routes import OutputPlan

LOCAL_NAME = "localhost"
LOCAL_ADDRESS = "127.0.0.1"
LAUNCHERS = ("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi")


def build_plan(request: Request, environ: Mapping[str, str], host: Facts) -> Plan:
    """Decide which hosts and slots take part and where their workers meet.

    Raises:
        UsageError: of the kind that fits; `MultiNodeError` when other hosts would have to be reached.
    """
    _check_options(request)
    notices = _unused_options(request)
    pool = _read_pool(request, host, notices)
    devices = find_devices(environ, host.devices, host.cpus)
    shown = _shown_devices(request, pool, devices, notices)
    _check_counts(request, pool)
    if shown:
        active = {LOCAL_NAME: visible_slots(devices, shown)}
    else:
        active = apply_filters(pool or {LOCAL_NAME: devices.slots}, request.include, request.exclude)
    _refuse_unsupported(request)
    active = trim(
        active,
        request.num_nodes,
        request.num_gpus,
        checked=devices.accelerator != "cpu",
        source=request.hostfile,
    )
    if not any(active.values()):
        raise FilterError(f"nothing is left to start: {_filter_text(request)} leaves no slot")
    node_rank = _own_node_rank(request, list(active), from_hostfile=pool is not None, host=host)
    master_addr = _master_address(request, list(active), from_hostfile=pool is not None, notices=notices)
    master_port = _master_port(request, len(active), node_rank, host, notices)
    return Plan(
        nodes=tuple([Node(name, tuple(slots)) for name, slots in active.items()]),
        node_rank=node_rank,
        accelerator=devices.accelerator,
        master_addr=master_addr,
        master_port=master_port,
        visible_devices=visible_override(devices, shown),
        notices=tuple(notices),
    )


def build_node_plan(request: Request, plan: Plan, environ: Mapping[str, str], host: Facts) -> NodePlan:
    """Decide every worker of this node.

    Raises:
        BindingError: the cores cannot be given to the workers as asked.
    """
    node = plan.nodes[plan.node_rank]
    ranks = assign_ranks([len(each.slots) for each in plan.nodes])[plan.node_rank]
    if not ranks:
        raise FilterError(
            f"host {node.host!r} has no slots in {request.hostfile}, this node has nothing to start"
        )
    env = node_environment(
        plan,
        environ,
        visible_variable=ACCELERATORS[plan.accelerator].visible_variable,
        pod=_pod_environment(host),
    )
    placement = _place(request, plan, env, ranks, host)
    if placement is not None and placement.node_threads is not None:
        env[THREADS_VARIABLE] = str(placement.node_threads)
    log_dir, output = _plan_output(request, plan, ranks, environ, host)
    return NodePlan(
        host=node.host,
        node_rank=plan.node_rank,
        workers=_workers(request, ranks, output, host, placement),
        env=env,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        world_size=plan.world_size,
        grace_s=request.grace_s,
        binding=request.placement.rule(binds_memory=True),
        pid_file=f"{host.names.temp_dir}/{host.names.pid}.deepspeed" if request.save_pid else None,
        log_dir=log_dir,
        run_dirs=output.run_dirs,
        log_max_bytes=request.output.max_bytes,
        collapse=request.output.collapse,
        line_files=output.line_files,
        log_level=request.log_level,
        notices=(
            *plan.notices,
            *(placement.notices if placement else ()),
            *_log_notices(request, output),
        ),
    )


def _plan_output(
    request: Request, plan: Plan, ranks: range, environ: Mapping[str, str], host: Facts
) -> tuple[str | None, OutputPlan]:
    """The directory to make if it is missing, and where output goes."""
    asked: Any = request.output
    each_rank_logs: list[str] = []
    log_dir, run_dir = request.log_dir, None
    if request.log_dir is not None:
        _check_each_rank_log(asked)
        from dsl.output.grammar import rank_log_path

        stamp = host.names.stamp()
        each_rank_logs = [rank_log_path(request.log_dir, stamp, rank) for rank in ranks]
    elif needs_run_dir(asked):
        # Nodes that share the directory may be containers that start in the same second with the same pid.
        node = f"_node{plan.node_rank}" if len(plan.nodes) > 1 else ""
        run = f"{host.names.stamp()}_{host.names.pid}{node}"
        log_dir = asked.log_dir
        run_dir = f"{host.names.temp_dir}/dsl_{run}" if log_dir is None else f"{log_dir}/{run}"
    shown = Shown(ranks, plan.world_size, host.console, environ)
    output = plan_output(asked, shown, LogPlace(run_dir, each_rank_logs=tuple(each_rank_logs)))
    return log_dir, output


def _check_each_rank_log(asked: OutputRequest) -> None:
    """Its files hold both streams joined, so options that ask for single ones make no sense with it."""
    others = {
        "--log-dir": asked.log_dir,
        "--redirects": asked.redirects,
        "--duplicate-stdout-filters": asked.stdout_words,
        "--duplicate-stderr-filters": asked.stderr_words,
    }
    for option, value in others.items():
        if value:
            raise OptionError(
                f"--enable_each_rank_log cannot be used with {option}, leave one of them out "
                "(--log-dir DIR keeps the streams of each worker in files of their own)"
            )


def _log_notices(request: Request, output: OutputPlan) -> tuple[Notice, ...]:
    if request.output.log_dir is not None or not output.run_dirs:
        return ()
    return (Notice("info", f"log files are in {output.run_dirs[0]}"),)


def _workers(
    request: Request,
    ranks: range,
    output: OutputPlan,
    host: Facts,
    placement: Placement | None,
) -> tuple[WorkerPlan, ...]:
    command = worker_command(request, host.names.executable)
    workers = []
    for local_rank, rank in enumerate(ranks):
        own = () if request.no_local_rank else (f"--local_rank={local_rank}",)
        own_variables = placement.variables(local_rank) if placement else {}
        binding = placement.bindings[local_rank] if placement and placement.bindings else None
        stdout, stderr = output.routes[local_rank]
        workers.append(
            WorkerPlan(
                rank,
                local_rank,
                (*command, *own, *request.script_args),
                {**worker_environment(rank, local_rank), **own_variables},
                binding.cpus if binding else None,
                binding.mempolicy if binding else None,
                local_rank == output.stdin,
                stdout,
                stderr,
                output.prefixes[local_rank],
                device=placement.device(local_rank) if placement else None,
            )
        )
    return tuple(workers)


def _check_options(request: Request) -> None:
    if request.no_python and request.module:
        raise OptionError("don't use both the '--no_python' flag and the '--module' flag at the same time")
    if request.elastic_training and not request.master_addr:
        raise OptionError("master addr is required when elastic training is enabled, give --master_addr")
    if request.elastic_training and request.no_local_rank:
        raise OptionError("--no_local_rank cannot be used with --elastic_training, leave one of them out")
    least, most = request.num_nodes, request.max_nodes
    if most is not None and (least is None or not 1 <= least <= most):
        raise OptionError(f"--num_nodes {least}:{most}: MIN must be at least 1, and MAX at least MIN")


def _unused_options(request: Request) -> list[Notice]:
    notices = []
    if request.node_rank is not None and not request.no_ssh:
        notices.append(Notice("warning", "--node_rank has no effect without --no_ssh"))
    if request.bind_core_list is not None and not request.bind_cores_to_rank:
        notices.append(Notice("warning", "--bind_core_list has no effect without --bind_cores_to_rank"))
    asked: Any = request.output
    has_files = request.log_dir is not None or needs_run_dir(asked)
    if request.output.max_bytes is not None and not has_files:
        notices.append(Notice("warning", "--log-max-size has no effect without log files, such as --log-dir"))
    return notices


def _read_pool(request: Request, host: Facts, notices: list[Notice]) -> dict[str, range] | None:
    path = request.hostfile
    try:
        text = host.files.read_text(path)
    except OSError as error:
        raise HostfileError(f"{path}: hostfile cannot be read: {(error.strerror or '').lower()}") from None
    if text is None:
        level = "debug" if path == DEFAULT_HOSTFILE else "warning"
        notices.append(
            Notice(
                level, f"unable to find hostfile {path}, will proceed with training with local resources only"
            )
        )
        return None
    from dsl.resources.hostfile import parse_hostfile

    return {name: range(slots) for name, slots in parse_hostfile(text.split("\n"), path).items()}


def _shown_devices(
    request: Request, pool: Mapping[str, range] | None, devices: Devices, notices: list[Notice]
) -> tuple[str, ...]:
    """Devices that the visible-devices variable picks; none where a hostfile or an option picks them."""
    if pool is not None:
        return ()
    option = _picking_option(request)
    warning = None if option else visible_warning(devices.visible or ())
    if warning:
        notices.append(Notice("warning", warning))
    if devices.visible:
        fate = f"but ignoring it because {option} was given" if option else "and using only those devices"
        notices.append(Notice("info", f"detected {devices.visible_setting} {fate}"))
    elif devices.size_from_environment and not request.num_gpus:
        notices.append(Notice("info", f"LOCAL_SIZE={len(devices.slots)} sets the number of workers"))
    return () if option else devices.visible or ()


def _picking_option(request: Request) -> str:
    if request.include or request.exclude:
        return "--include" if request.include else "--exclude"
    if (request.num_nodes or 0) > 1:
        return "--num_nodes"
    return "--num_gpus" if (request.num_gpus or 0) > 0 else ""


def _check_counts(request: Request, pool: Mapping[str, range] | None) -> None:
    counted = request.num_nodes is not None or request.num_gpus is not None
    if counted and (request.include or request.exclude):
        raise OptionError("cannot specify num_nodes/gpus with include/exclude, give one or the other")
    if pool is None and (request.num_nodes or 0) > 1:
        raise OptionError(
            f"num nodes is >1 but no extra nodes available via hostfile: {request.hostfile} does not exist"
        )


def _filter_text(request: Request) -> str:
    if request.include:
        return f"--include {request.include}"
    return f"--exclude {request.exclude}" if request.exclude else f"hostfile {request.hostfile}"


def _refuse_unsupported(request: Request) -> None:
    for option, given in (("autotuning", request.autotuning), ("elastic_training", request.elastic_training)):
        if given:
            raise UnsupportedError(
                f"--{option} is not in this version of dsl, leave it out to run the job as it is"
            )


def _own_node_rank(request: Request, hosts: Sequence[str], *, from_hostfile: bool, host: Facts) -> int:
    """The node that this command starts itself. Raises MultiNodeError if others have to be reached."""
    if request.no_ssh:
        if request.node_rank is None or not 0 <= request.node_rank < len(hosts):
            given = "none was given" if request.node_rank is None else f"got {request.node_rank}"
            raise OptionError(
                f"launching training without ssh, but --node_rank is not set correctly: "
                f"expected 0 to {len(hosts) - 1}, {given}"
            )
        return request.node_rank
    if (
        len(hosts) == 1
        and not request.force_multi
        and (not from_hostfile or host.names.is_this_machine(hosts[0]))
    ):
        return 0
    if request.launcher.lower() not in LAUNCHERS:
        raise LauncherError(f"unknown launcher {request.launcher!r}, expected one of {', '.join(LAUNCHERS)}")
    if len(hosts) > 1:
        shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        why = f"{len(hosts)} hosts ({shown}) take part"
    else:
        why = "--force_multi was given" if request.force_multi else f"host {hosts[0]!r} is not this machine"
    raise MultiNodeError(
        f"{why}, and starting workers on other hosts is not in this version of dsl; "
        "on each host run the same command with --no_ssh --node_rank RANK --master_addr ADDRESS"
    )


def _master_address(
    request: Request, hosts: Sequence[str], *, from_hostfile: bool, notices: list[Notice]
) -> str:
    asked = request.master_addr
    if not from_hostfile:
        if asked not in ("", LOCAL_NAME, LOCAL_ADDRESS):
            text = f"--master_addr {asked} is not used: without a hostfile it is {LOCAL_ADDRESS}"
            notices.append(Notice("info", text))
        return LOCAL_ADDRESS
    if not asked and len(hosts) > 1:
        raise OptionError(
            f"--no_ssh needs --master_addr, an address of host {hosts[0]!r} that every host can reach"
        )
    return asked or LOCAL_ADDRESS


def _master_port(
    request: Request, node_count: int, node_rank: int, host: Facts, notices: list[Notice]
) -> int:
    # Rank 0 listens on the first node only: elsewhere the port may well be in use.
    port, replaced = choose_port(
        request.master_port, shared=node_count > 1, ports=host.ports, here=node_rank == 0
    )
    if replaced:
        notices.append(Notice("info", f"master port {DEFAULT_MASTER_PORT} is taken, using {port}"))
    return port


def _pod_environment(host: Facts) -> dict[str, str]:
    try:
        text = host.files.read_text(POD_ENVIRONMENT_PATH)
    except OSError:
        return {}
    return parse_pod_environment(text) if text else {}


def _place(
    request: Request, plan: Plan, env: Mapping[str, str], ranks: range, host: Facts
) -> Placement | None:
    """Cores, memory and devices; None if nothing is asked of them."""
    asked = request.placement
    if asked == PlacementRequest() and not request.bind_cores_to_rank:
        return None
    from dsl.binding.placement import NodeGroup, place
    from dsl.model import request as wishes

    wish = wishes.PlacementRequest(
        bind=asked.bind,
        memory=asked.memory,
        strict=asked.strict,
        names_devices=asked.names_devices,
        bind_cores_to_rank=request.bind_cores_to_rank,
        core_list=request.bind_core_list,
    )
    group = NodeGroup(
        len(ranks),
        env,
        accelerator=plan.accelerator,
        first_rank=ranks.start,
        noun="rank",
        announces=True,
    )
    return place(wish, group, host)
