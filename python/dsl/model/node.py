"""The data that flows from the command line to the engine: `Request` -> `Plan` -> `NodePlan`.

All of it is frozen, and none of it touches the machine.
"""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal, TypeAlias

    MemoryMode: TypeAlias = Literal["bind", "preferred", "interleave", "local"]
    MemoryPolicy: TypeAlias = tuple[MemoryMode, Sequence[int]]
    BindingRule: TypeAlias = Literal["required", "cpus_required", "wanted"]
    SignalMeaning: TypeAlias = Literal["stop", "forward", "preempt"]
    LineFile: TypeAlias = tuple[Literal[1, 2], str, tuple[str, ...]]

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_MASTER_PORT = 29500
DEFAULT_GRACE_S = 30.0

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Words of ``--log_level`` and how much each weighs."""


@record
class Notice:
    """Something to tell the user before the workers start.

    ``level`` is a word of `LEVELS`; ``text`` one line.
    """

    level: str
    text: str


@record
class OutputRequest:
    """What the user asked for about the workers' output and input, as it was written.

    ``redirects`` and ``tee`` are stream maps (``3``, ``0:1,2:3``), ``local_ranks`` a comma list of those that
    the console shows, the words a comma list each, ``stdin`` a rank or ``none``; empty means "not said".
    ``max_bytes`` caps each log file.
    """

    log_dir: str | None = None
    redirects: str = ""
    tee: str = ""
    local_ranks: str = ""
    stdout_words: str = ""
    stderr_words: str = ""
    tag: str = "auto"
    collapse: bool = False
    stdin: str = ""
    max_bytes: int | None = None


@record
class PlacementRequest:
    """What the user asked for about CPUs and memory, with options that both commands have.

    ``bind`` is ``auto`` or ``none``; ``memory`` a policy or ``none`` (None: the binding's own); ``strict``:
    nothing less than what ``auto`` stands for. ``names_devices``: the device of each worker is to be
    shown.
    """

    bind: str = "none"
    memory: str | None = None
    strict: bool = False
    names_devices: bool = False

    def rule(self, *, binds_memory: bool) -> BindingRule:
        """What of the bindings is a condition. Only ``auto`` makes do with what there is.

        ``binds_memory``: the memory policy belongs to what the user asked for, even if ``memory`` is None.
        """
        if self.bind == "auto":
            return "required" if self.strict else "wanted"
        return "required" if binds_memory or self.memory is not None else "cpus_required"


@record
class Request:
    """What the user asked for, before anything is looked up. None means "not said"."""

    script: str
    script_args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    hostfile: str = DEFAULT_HOSTFILE
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    max_nodes: int | None = None
    num_gpus: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    node_rank: int | None = None
    launcher: str = "pdsh"
    launcher_args: str = ""
    no_ssh: bool = False
    no_ssh_check: bool = False
    force_multi: bool = False
    ssh_port: int | None = None
    venv_script: str | None = None
    save_pid: bool = False
    log_dir: str | None = None
    autotuning: str = ""
    elastic_training: bool = False
    min_elastic_nodes: int | None = None
    max_elastic_nodes: int | None = None
    bind_cores_to_rank: bool = False
    bind_core_list: str | None = None
    log_level: str = "info"
    grace_s: float = DEFAULT_GRACE_S
    output: OutputRequest = OutputRequest()
    placement: PlacementRequest = PlacementRequest()


@record
class TorchRequest:
    """What the user of ``dslrun`` asked for: torchrun's options, and ours. None means "not said".

    ``nproc_per_node`` and ``rdzv_conf`` are as they were written. ``local_rank_arg`` is the option by which a
    script is told its local rank (empty: by none). Signals are numbers; ``grace_s`` lies between the stop
    signal and SIGKILL, ``preempt_grace_s`` between the preempt signal and SIGKILL.
    """

    script: str
    script_args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: str = "1"
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    local_addr: str | None = None
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: str = ""
    standalone: bool = False
    role: str = "default"
    max_restarts: int = 0
    virtual_local_rank: bool = False
    local_rank_arg: str = ""
    numa_binding: str | None = None
    logs_specs: str | None = None
    stop_signals: tuple[int, ...] = (15, 2, 1, 3)
    forward_signals: tuple[int, ...] = (10, 12)
    preempt_signal: int | None = None
    preempt_grace_s: float | None = None
    log_level: str = "info"
    grace_s: float = DEFAULT_GRACE_S
    output: OutputRequest = OutputRequest()
    placement: PlacementRequest = PlacementRequest()


@record
class Node:
    """A host that takes part in the job, and the slots it gives. Its place in the plan is its node rank."""

    host: str
    slots: tuple[int, ...]


@record
class Plan:
    """What is decided for the whole job, the same on every node but for ``node_rank``.

    ``visible_devices`` replaces the slot ids in the visible-devices variable, for devices that have no
    number (``GPU-...``, ``MIG-...``) and for devices that the user has hidden.
    """

    nodes: tuple[Node, ...]
    node_rank: int
    accelerator: str
    master_addr: str
    master_port: int
    visible_devices: str | None = None
    notices: tuple[Notice, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return sum([len(node.slots) for node in self.nodes])


@record
class Route:
    """Where one output stream of a worker goes.

    To the file ``path``, to ``console`` 1 or 2 (the command's stdout or stderr, line by line), to both, or to
    neither. ``inherit``: it is the command's own stream, with nobody in between. ``terminal``: the worker
    sees a terminal.
    """

    path: str | None = None
    console: Literal[1, 2] | None = None
    inherit: bool = False
    terminal: bool = False


INHERIT = Route(inherit=True)


@record
class WorkerDevice:
    """The device of a worker. The address is empty and the node None where the machine does not tell them."""

    name: str
    pci_address: str = ""
    numa_node: int | None = None


@record
class WorkerPlan:
    """One worker: what to execute and how. ``env`` is laid over the environment of its node.

    ``cpus`` are the CPUs it is bound to (None: not bound), ``mempolicy`` the memory policy and its NUMA
    nodes. ``stdin``: it gets the command's. ``stderr`` None: it is joined to stdout. ``prefix`` stands before
    each of its lines on the console. ``error_file``: where it may leave an account of its end, as torch does.
    ``device`` is looked up only for a binding, or to be shown.
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cpus: tuple[int, ...] | None = None
    mempolicy: MemoryPolicy | None = None
    stdin: bool = False
    stdout: Route = INHERIT
    stderr: Route | None = INHERIT
    prefix: str = ""
    error_file: str | None = None
    device: WorkerDevice | None = None

    @property
    def log_path(self) -> str | None:
        """The file that has its errors."""
        return (self.stderr or self.stdout).path or self.stdout.path


@record
class NodePlan:
    """Everything one node starts, with no decision left.

    ``env`` is the whole environment of every worker but for its delta. ``grace_s`` lies between the stop
    signal and SIGKILL; ``binding`` says whether the workers' bindings are a condition. ``pid_file`` is to
    hold the agent's pid while the job runs (None: not asked for). ``log_dir`` is to be made if it is missing,
    and ``run_dirs`` below it, the first of which must be new. ``log_max_bytes``, ``collapse`` and
    ``line_files`` (stream, path, words) are the engine's. ``attempt`` counts from 0; ``command`` is the name
    that messages start with, ``name`` what the workers run. ``signals`` says what a signal to the job means
    (None: the usual), ``preempt_signal`` which one announces the end, ``preempt_grace_s`` before the kill.
    """

    host: str
    node_rank: int
    workers: tuple[WorkerPlan, ...]
    env: Mapping[str, str]
    master_addr: str
    master_port: int
    world_size: int
    grace_s: float = DEFAULT_GRACE_S
    binding: BindingRule = "required"
    pid_file: str | None = None
    log_dir: str | None = None
    run_dirs: tuple[str, ...] = ()
    log_max_bytes: int | None = None
    collapse: bool = False
    line_files: tuple[LineFile, ...] = ()
    log_level: str = "info"
    notices: tuple[Notice, ...] = ()
    command: str = "dsl"
    name: str = ""
    attempt: int = 0
    signals: Mapping[int, SignalMeaning] | None = None
    preempt_signal: int | None = None
    preempt_grace_s: float | None = None

    @property
    def has_log_files(self) -> bool:
        """Whether output goes to files, which a rotation may want to be opened anew."""
        return bool(self.line_files) or any(worker.log_path is not None for worker in self.workers)


@record
class Restarts:
    """A group that fails is started again, ``maximum`` times at most.

    ``plan`` makes the plan of an attempt from its number. ``run_dir``: the directory that its files lie in,
    which goes at the end with the files of workers that ended well, unless ``keeps_run_dir``.
    """

    maximum: int
    plan: Callable[[int], NodePlan]
    run_dir: str
    keeps_run_dir: bool
