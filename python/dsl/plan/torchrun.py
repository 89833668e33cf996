"""`TorchRequest` -> `Group` -> a `NodePlan` for each attempt: what torchrun decides, without torch.

A `Group` is this node's part of the job, the same in every attempt. What changes from attempt to attempt (the
port where the workers meet, the files they may write, the count that they are told) is `plan_attempt`'s.
"""

from __future__ import annotations

from dsl._record import record, replace
from dsl.errors import OptionError, UnsupportedError
from dsl.model import DEFAULT_MASTER_PORT, NodePlan, Notice, WorkerPlan
from dsl.plan.output import plan_output, run_dirs
from dsl.plan.port import choose_port
from dsl.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.model import SignalMeaning, TorchRequest
    from dsl.plan.binding import Binding
    from dsl.plan.host import Host
    from dsl.plan.output import Console, OutputPlan

LOCAL_ADDRESS = "127.0.0.1"
STATIC = "static"
LOCAL_RANK_MACRO = "${local_rank}"
LOCAL_RANK_OPTIONS = {"": "", "none": "", "dash": "--local-rank", "underscore": "--local_rank"}
# torchrun's default, unless the user has chosen.
THREADS_VARIABLE = "OMP_NUM_THREADS"
NCCL_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@record
class Group:
    """This node's workers, and all that stays the same when they are started again.

    ``command``: the words of each worker, with ``${local_rank}`` where its local rank is to stand.
    ``master_port`` None: a free one is chosen for each attempt. ``run_dir``: directory of this run, which
    goes when the job ends unless the user has named its place (``keeps_run_dir``) or there is something in
    it. ``devices``: the visible device of each worker, if each has its own.
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
    devices: tuple[str, ...] = ()
    bindings: tuple[Binding, ...] = ()
    notices: tuple[Notice, ...] = ()

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
    request: TorchRequest, command: Sequence[str], environ: Mapping[str, str], host: Host
) -> Group:
    """Decide what this node starts. ``command``: the words of a worker, `worker_words` for a script.

    Raises:
        UsageError: of the kind that fits; `UnsupportedError` for a job whose nodes are not fixed.
    """
    _check(request)
    address, port = _meeting_point(request)
    count = local_world_size(request.nproc_per_node, environ, host)
    notices = _notices(request, count, environ)
    asked = request.output.log_dir
    run_id = _run_id(request, host)
    folder = asked or f"{host.temp_dir}/dslrun_{host.random()}"
    name = f"{run_id.replace('/', '_')}_{host.random()[:8]}"
    return Group(
        request=request,
        command=tuple(command),
        node_count=request.max_nodes,
        local_world_size=count,
        master_addr=address,
        master_port=port,
        run_id=run_id,
        run_dir=f"{folder}/{name}" if asked else folder,
        keeps_run_dir=asked is not None,
        host_name=host.name(),
        console=host.console(),
        environ=_group_environment(request, environ, count, run_id),
        devices=_own_devices(request, environ, count),
        bindings=_bindings(request, environ, count, host),
        notices=tuple(notices),
    )


def plan_attempt(group: Group, number: int, host: Host) -> NodePlan:
    """Decide every worker of one attempt, counted from 0.

    Raises:
        PortError: the port that was asked for is taken, or there is no free one.
        OptionError: an output option makes no sense for this job.
    """
    request = group.request
    port, replaced = _port(group, host)
    output = plan_output(
        # Without maps torchrun writes no files, wherever they would lie.
        replace(request.output, log_dir=None),
        group.ranks,
        group.world_size,
        group.console,
        group.environ,
        run_dir=group.run_dir,
        attempt=number,
        role=request.role,
    )
    env = dict(group.environ)
    env["MASTER_ADDR"] = group.master_addr
    env["MASTER_PORT"] = str(port)
    env["TORCHELASTIC_RESTART_COUNT"] = str(number)
    notices = () if number else group.notices
    if replaced and not number:
        notices = (*notices, Notice("info", f"master port {DEFAULT_MASTER_PORT} is taken, using {port}"))
    return NodePlan(
        host=group.host_name,
        node_rank=request.node_rank,
        workers=_workers(group, output, number),
        env=env,
        master_addr=group.master_addr,
        master_port=port,
        world_size=group.world_size,
        grace_s=request.grace_s,
        log_dir=request.output.log_dir,
        run_dirs=run_dirs(group.run_dir, number, group.local_world_size),
        log_max_bytes=request.output.max_bytes,
        collapse=request.output.collapse,
        line_files=output.line_files,
        log_level=request.log_level,
        notices=notices,
        command="dslrun",
        attempt=number,
        signals=_signals(request),
        preempt_signal=request.preempt_signal,
        preempt_grace_s=request.preempt_grace_s,
    )


def worker_words(request: TorchRequest, environ: Mapping[str, str], executable: str) -> tuple[str, ...]:
    """The words of a worker that runs the request's script. ``PYTHON_EXEC`` replaces our own interpreter."""
    option = LOCAL_RANK_OPTIONS[request.local_rank_arg]
    rest = (*([f"{option}={LOCAL_RANK_MACRO}"] if option else []), *request.script_args)
    if request.no_python and not request.run_path:
        return (request.script, *rest)
    module = ("-m",) if request.module and not request.run_path else ()
    return (environ.get("PYTHON_EXEC") or executable, "-u", *module, request.script, *rest)


def _check(request: TorchRequest) -> None:
    if request.no_python and request.module:
        raise OptionError("don't use both the '--no-python' flag and the '--module' flag at the same time")
    if not 1 <= request.min_nodes <= request.max_nodes:
        raise OptionError(
            f"--nnodes {request.min_nodes}:{request.max_nodes}: MIN must be at least 1, and MAX at least MIN"
        )
    if request.max_restarts < 0:
        raise OptionError(f"--max-restarts {request.max_restarts}: it must be 0 or more")
    if request.standalone:
        return
    dynamic = request.rdzv_backend != STATIC
    if request.min_nodes != request.max_nodes or (dynamic and request.max_nodes > 1):
        why = f"--rdzv-backend {request.rdzv_backend}" if dynamic else f"--nnodes {request.min_nodes}:"
        why += "" if dynamic else str(request.max_nodes)
        raise UnsupportedError(
            f"{why}: nodes that find each other are not in this version of dsl; name them with "
            "--nnodes N --node-rank RANK --master-addr ADDRESS --master-port PORT"
        )
    if not 0 <= request.node_rank < request.max_nodes and not dynamic:
        raise OptionError(
            f"--node-rank {request.node_rank}: with {request.max_nodes} node"
            f"{'s' if request.max_nodes > 1 else ''} it must be 0"
            + (f" to {request.max_nodes - 1}" if request.max_nodes > 1 else "")
        )


def _meeting_point(request: TorchRequest) -> tuple[str, int | None]:
    """Address and port where the workers meet. A lone node meets itself, at a port of its choice."""
    if request.standalone or request.rdzv_backend != STATIC:
        return LOCAL_ADDRESS, None
    if request.rdzv_endpoint:
        address, port = _parse_endpoint(request.rdzv_endpoint)
        if port is None:
            raise OptionError(f"--rdzv-endpoint {request.rdzv_endpoint!r}: the port is missing, HOST:PORT")
        return address, port or None
    port = request.master_port
    if request.max_nodes > 1 and port is None:
        port = DEFAULT_MASTER_PORT
    return request.master_addr.strip("[]"), port


def _parse_endpoint(text: str) -> tuple[str, int | None]:
    host, colon, digits = text.strip().rpartition(":")
    if not colon or digits.endswith("]"):
        return text.strip().strip("[]"), None
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 5 and int(digits) < 65536 and host):
        raise OptionError(f"--rdzv-endpoint {text!r}: expected HOST:PORT, with a port below 65536")
    return host.strip("[]"), int(digits)


def local_world_size(text: str, environ: Mapping[str, str], host: Host) -> int:
    """Number of workers on this node from torchrun's ``--nproc-per-node``.

    A number, ``cpu`` (the CPUs that we may use), ``gpu`` (visible CUDA devices), ``auto`` (these, else CPUs).

    Raises:
        OptionError: it is none of these, is not positive, or there is no such device.
    """
    shown = f"--nproc-per-node {text!r}"
    if text.lstrip("-").isascii() and text.lstrip("-").isdecimal() and len(text) <= 9:
        if int(text) < 1:
            raise OptionError(f"{shown}: it must be 1 or more")
        return int(text)
    if text == "cpu":
        return len(set(host.allowed_cpus()))
    if text in ("gpu", "cuda", "auto"):
        from dsl.plan.devices import visible_cuda_count

        devices = visible_cuda_count(environ, host.count_cuda())
        if devices or text == "auto":
            return devices or len(set(host.allowed_cpus()))
        raise OptionError(f"{shown}: no CUDA device can be seen on this machine, give a number or cpu")
    from dsl.plan.devices import ACCELERATORS

    if text in ACCELERATORS:
        raise OptionError(f"{shown}: this version of dsl cannot count {text} devices, give their number")
    raise OptionError(f"{shown}: expected a number, auto, cpu or gpu")


def _run_id(request: TorchRequest, host: Host) -> str:
    own = request.standalone or (
        request.rdzv_backend == STATIC
        and not request.rdzv_endpoint
        and request.master_port is None
        and request.max_nodes == 1
    )
    if not own:
        return request.rdzv_id
    digits = host.random() + host.random()
    return "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]])


def _group_environment(
    request: TorchRequest, environ: Mapping[str, str], count: int, run_id: str
) -> dict[str, str]:
    env = dict(environ)
    nodes = request.max_nodes
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
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join([signal_name(one) for one in request.stop_signals])
    env.setdefault(NCCL_VARIABLE, "1")
    if count > 1:
        env.setdefault(THREADS_VARIABLE, "1")
    return env


def _own_devices(request: TorchRequest, environ: Mapping[str, str], count: int) -> tuple[str, ...]:
    if not request.virtual_local_rank:
        return ()
    value = environ.get(DEVICES_VARIABLE)
    if value is None:
        return tuple(map(str, range(count)))
    entries = [entry.strip() for entry in value.split(",")]
    if len(entries) < count:
        raise OptionError(
            f"--virtual-local-rank: {count} workers need as many devices, but {DEVICES_VARIABLE}={value} "
            f"names {len(entries)}"
        )
    return tuple(entries[:count])


def _bindings(
    request: TorchRequest, environ: Mapping[str, str], count: int, host: Host
) -> tuple[Binding, ...]:
    if request.numa_binding is None:
        return ()
    from dsl.plan.numa import bind_to_devices

    return tuple(bind_to_devices(request.numa_binding, count, environ, host))


def _notices(request: TorchRequest, count: int, environ: Mapping[str, str]) -> list[Notice]:
    notices = []
    if count > 1 and THREADS_VARIABLE not in environ:
        text = f"{THREADS_VARIABLE}=1 for each worker, set it to choose another number of threads"
        notices.append(Notice("info", text))
    is_static = request.rdzv_backend == STATIC and not request.standalone
    if not is_static and request.node_rank != 0:
        notices.append(Notice("warning", "--node-rank is used only with --rdzv-backend static"))
    if not is_static and request.master_port is not None:
        notices.append(Notice("warning", "--master-port is used only with --rdzv-backend static"))
    return notices


def _port(group: Group, host: Host) -> tuple[int, bool]:
    if group.master_port is None:
        return host.ports.pick(), False
    # Rank 0 listens on the first node only: elsewhere the port may well be in use.
    if group.node_count > 1 and group.request.node_rank != 0:
        return group.master_port, False
    return choose_port(group.master_port, shared=group.node_count > 1, probe=host.ports)


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
            env[DEVICES_VARIABLE] = group.devices[local_rank]
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
            )
        )
    return tuple(workers)
