"""What the user asked for, before anything is looked up: one `Request` for every front end.

None means "not said". A value stays as the user wrote it if its grammar needs facts about the job or the
machine. The front end has already refused values that are wrong by themselves. A field without a line of
documentation is the value of the option with that name, whose help says what it means.
"""

from __future__ import annotations

from dsl._record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Annotated, Literal, TypeAlias

    FlavourName: TypeAlias = Literal["deepspeed", "torch", "functions"]
    BindingRule: TypeAlias = Literal["required", "cpus_required", "wanted"]

# Text, so that the codec can read it: nothing else uses these types at run time.
ProgramKind: TypeAlias = "Literal['script', 'module', 'program', 'call']"
StartMethod: TypeAlias = "Literal['spawn', 'fork', 'forkserver', 'warm', 'auto']"
SignalScope: TypeAlias = "Literal['rank', 'group']"
HangAction: TypeAlias = "Literal['report', 'stop', 'restart']"
Level: TypeAlias = "Literal['debug', 'detail', 'info', 'warning', 'error', 'critical']"
Count: TypeAlias = "Annotated[int, 0, 999_999_999]"
Seconds: TypeAlias = "Annotated[float, 0, 1_000_000_000]"
Port: TypeAlias = "Annotated[int, 0, 65_535]"
Signal: TypeAlias = "Annotated[int, 1, 64]"
Code: TypeAlias = "Annotated[int, 0, 255]"
Moment: TypeAlias = "Annotated[int, 0, 9_223_372_036_854_775_807]"
Shown: TypeAlias = str
"""Text for the user to read, written by anyone."""
RankOrNone: TypeAlias = "Annotated[int, -1, 999_999_999]"

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_MASTER_PORT = 29500
DEFAULT_WARM_S = 600.0
"""Seconds that a warm fork server stays after its last job."""
DEFAULT_WARM_BYTES = 8 << 30
"""Memory that all warm fork servers of a user may use."""
DEFAULT_GRACE_S = 30.0
DEFAULT_PARTIAL_S = 1.0
LEAST_HANG_S = 1.0
"""The watch for hangs needs at least so long for its looks."""
DEFAULT_HEARTBEAT_S = 15.0
DEFAULT_DEBUG_PORT = 5678
DEFAULT_DEBUG_ADDRESS = "127.0.0.1"

LEVELS = {"debug": 10, "detail": 15, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""The levels of messages, and their weights.

``detail`` is for messages that even a healthy job has. They are shown if the user gives ``--log_level info``,
and in a dry run, but not by default, although the default level is ``info``, too.
"""
LOG_LEVELS = tuple([word for word in LEVELS if word != "detail"])
"""Words of ``--log_level``."""


class Program(Record):
    """What each worker runs."""

    kind: ProgramKind
    """A ``script`` or ``module`` of Python, any ``program``, or a ``call`` that was launched from Python."""
    script: str
    """Path, module name or program; for a call the interpreter."""
    args: tuple[str, ...] = ()
    """Its arguments; for a call the interpreter's."""
    local_rank_option: str = ""
    """Option that passes a worker its local rank; empty: none does."""
    name: str = ""
    """What reports call it; empty in a request: ``script``."""


class ResourceRequest(Record):
    """Which hosts, slots and nodes take part, and how many workers each has."""

    hostfile: str | None = None
    """Path of the hostfile; None: hosts are not named."""
    include: str = ""
    exclude: str = ""
    min_nodes: int | None = None
    """Number of nodes, or the least of a range."""
    max_nodes: int | None = None
    """The most of a range; None if the user gave one number."""
    num_gpus: int | None = None
    nproc_per_node: str | None = None


class MeetingRequest(Record):
    """Where the workers meet, and how the nodes find each other."""

    master_addr: str | None = None
    master_port: int | None = None
    """Port there; 0: any free one."""
    node_rank: int | None = None
    local_addr: str | None = None
    backend: str = "static"
    """Word of ``--rdzv-backend``."""
    endpoint: str = ""
    """``HOST:PORT`` or ``HOST``."""
    run_id: str = ""
    """The user's name of the job."""
    settings: str = ""
    """Settings of the backend, ``KEY=VALUE,...``."""
    standalone: bool = False


class RemoteRequest(Record):
    """How other hosts are reached (DeepSpeed's options)."""

    launcher: str | None = None
    launcher_args: str = ""
    no_ssh: bool = False
    no_ssh_check: bool = False
    force_multi: bool = False
    ssh_port: int | None = None
    venv_script: str | None = None
    per_node: bool = False
    """Start one agent per node even with launchers that start one task for each rank."""
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    """Seconds of silence after which a host counts as lost."""


class SignalRequest(Record):
    """What signals mean, by number, and how long workers get to obey."""

    stop: tuple[Signal, ...] | None = None
    """Signals that are passed on and end the job; None: the engine's usual table."""
    forward: tuple[Signal, ...] = ()
    """Signals that are passed on without any other effect."""
    preempt: Signal | None = None
    """The signal by which a scheduler announces the end."""
    preempt_grace_s: Seconds | None = None
    """Seconds between the preempt signal and SIGKILL; None: as ``grace_s``."""
    grace_s: Seconds = DEFAULT_GRACE_S
    """Seconds between the stop signal and SIGKILL."""
    scope: SignalScope | None = None


class OutputRequest(Record):
    """What the user asked for about the workers' output and input, as it was written; empty: not said."""

    log_dir: str | None = None
    each_rank_log: str | None = None
    """Directory of DeepSpeed's files, one for each rank."""
    redirects: str = ""
    tee: str = ""
    local_ranks: str = ""
    """Comma list of the local ranks that the console shows."""
    stdout_words: str = ""
    """Comma list of words; lines of stdout with one of them are copied."""
    stderr_words: str = ""
    """The same for stderr."""
    tag: str = "auto"
    """``auto``, ``always`` or ``never``: rank before each line."""
    template: str = ""
    """Prefix template with ``${role_name}``, ``${rank}``, ``${local_rank}``, ``${hostname}``."""
    collapse: bool = False
    partial_after_s: Seconds | None = DEFAULT_PARTIAL_S
    """Seconds without output after which an unfinished line is shown, if not on a terminal; None: never."""
    stdin: str = ""
    max_bytes: int | None = None
    """Cap of each log file, in bytes."""
    logs_specs: str | None = None


class PlacementRequest(Record):
    """What the user asked for about devices, CPUs and memory of the workers."""

    bind: str = "none"
    """``auto`` or ``none``."""
    memory: str | None = None
    """A memory policy or ``none``; None: the binding's own."""
    strict: bool = False
    """Refuse less than what ``auto`` stands for."""
    names_devices: bool = False
    """The device of each worker is to be shown."""
    bind_cores_to_rank: bool = False
    core_list: str | None = None
    """The cores of that binding."""
    numa_binding: str | None = None
    virtual_local_rank: bool = False

    def rule(self, *, binds_memory: bool) -> BindingRule:
        """Which parts of the bindings are required. Only ``auto`` makes do with what the machine offers.

        ``binds_memory``: the memory policy belongs to what the user asked for, even if ``memory`` is None.
        """
        if self.bind == "auto":
            return "required" if self.strict else "wanted"
        return "required" if binds_memory or self.memory is not None else "cpus_required"


class StartRequest(Record):
    """What the user asked for about how workers are started."""

    method: StartMethod = "spawn"
    """``spawn``: each is executed; ``forkserver``: each is forked by a process that has imported what they
    need; ``warm``: such a process stays for the next job; ``auto``: whichever fits; ``fork``: torch's word,
    here the same as ``spawn``."""
    preload: tuple[str, ...] = ()
    """Modules that a fork server imports; empty: the installed modules that the script itself imports."""
    source: str = ""
    """File to search for these imports; empty: the script."""
    warm_for_s: Seconds | None = None
    """How long a warm fork server stays after its last job; None: the default."""
    warm_memory: int | None = None
    """Bytes that all warm fork servers of the user may use; None: the default."""


class DebugRequest(Record):
    """Which workers run under debugpy, and where a debugger attaches to them."""

    ranks: str = ""
    """``all``, or a list of ranks such as ``0,2-3``; empty: none."""
    port: Port = DEFAULT_DEBUG_PORT
    """Port of local rank 0 on each node; other local ranks have the ports after it."""
    address: str = DEFAULT_DEBUG_ADDRESS
    """Address at which these workers listen."""
    waits: bool = False
    """Each of these workers begins only when a debugger has attached to it."""


class ElasticRequest(Record):
    """Wishes about jobs whose nodes come and go, and the wish for autotuning, which runs many jobs."""

    autotuning: str = ""
    training: bool = False
    """Nodes may join and leave."""
    min_nodes: int | None = None
    """The least number of nodes."""
    max_nodes: int | None = None
    """The greatest number of nodes."""
    wait_s: float | None = None
    """Seconds that the job waits for hosts when there are too few."""


class Request(Record):
    """What the user asked for. Both commands make it, and so do functions launched from Python."""

    flavour: FlavourName
    """The family of launchers whose environment and arguments the workers expect."""
    program: Program
    resources: ResourceRequest = ResourceRequest()
    meeting: MeetingRequest = MeetingRequest()
    remote: RemoteRequest = RemoteRequest()
    signals: SignalRequest = SignalRequest()
    output: OutputRequest = OutputRequest()
    placement: PlacementRequest = PlacementRequest()
    elastic: ElasticRequest = ElasticRequest()
    start: StartRequest = StartRequest()
    debug: DebugRequest = DebugRequest()
    max_restarts: int | None = None
    role: str = "default"
    log_level: Level = "info"
    """Word of `LEVELS`."""
    save_pid: bool = False
    env: tuple[tuple[str, str], ...] = ()
    """Variables added to the environment that each node's workers inherit."""
    is_strict: bool = False
    """Fallbacks are errors, see `dsl.model.job.refuse_fallbacks`."""
    detaches: bool = False
    """The command goes to the background."""
    stacks_on_failure: bool = False
    """When a worker fails, look at what the others execute before they are stopped."""
    hang_timeout_s: float | None = None
    """Seconds without any progress after which the job counts as hanging; None: nobody watches."""
    hang_action: HangAction = "report"
    events: str | None = None
    """File for the events of the job; None: they are not recorded."""
    metrics: str | None = None
    """Where the figures of the job are shown, as `dsl.plan.outputs.read_target` reads it; None: nowhere."""


class ShowRequest(Record):
    """Which parts of the plan to show before the workers start, or instead of starting them."""

    bindings: bool = False
    """A table of devices, cores and memory, on stderr."""
    dry_run: bool = False
    """The plan for people, on stdout; nothing is started."""
    dry_run_json: bool = False
    """The plan for programs, on stdout; nothing is started."""
    doctor: bool = False
    """What would go wrong on the hosts of the job, on stdout; nothing is started."""

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be shown."""
        return self.bindings or self.is_dry

    @property
    def is_dry(self) -> bool:
        """Whether nothing is to be started."""
        return self.dry_run or self.dry_run_json
