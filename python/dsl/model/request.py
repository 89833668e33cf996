"""What the user asked for, before anything is looked up: one `Request` for every front end.

None means "not said". A value stays as the user wrote it if its grammar needs facts about the job or the
machine. The front end has already refused values that are wrong by themselves. A field without a line of
documentation is the value of the option whose row names it (`dsl.model.options`), whose help says what it is.
"""

from __future__ import annotations

from dsl._record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Annotated, Literal, TypeAlias

    FlavourName: TypeAlias = Literal["deepspeed", "torch", "functions"]
    SignalMeaning: TypeAlias = Literal["stop", "forward", "preempt"]
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
    spares: int = 0
    """Nodes beyond the most, which wait to take the places of others."""
    num_gpus: int | None = None
    nproc_per_node: str | None = None


class MeetingRequest(Record):
    """Where the workers meet, and how the nodes find each other."""

    master_addr: str | None = None
    master_port: int | None = None
    node_rank: int | None = None
    local_addr: str | None = None
    backend: str = "static"
    endpoint: str = ""
    run_id: str = ""
    settings: str = ""
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
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    ssh_program: str = ""
    wait_hosts_s: float | None = None

    @property
    def is_connected(self) -> bool:
        """Whether commands that each start their own host wait for each other, and are one job."""
        return bool(self.no_ssh and self.wait_hosts_s)


class SignalRequest(Record):
    """What signals mean, by number, and how long workers get to obey."""

    stop: tuple[Signal, ...] | None = None
    """Signals that are passed on and end the job; None: the engine's usual table."""
    forward: tuple[Signal, ...] = ()
    """Signals that are passed on without any other effect."""
    preempt: Signal | None = None
    """The signal by which a scheduler announces the end."""
    preempt_grace_s: Seconds | None = None
    grace_s: Seconds = DEFAULT_GRACE_S
    scope: SignalScope | None = None

    @property
    def meanings(self) -> dict[int, SignalMeaning] | None:
        """What a signal to the job means, by number; None: the engine's usual table."""
        if self.stop is None:
            return None
        signals: dict[int, SignalMeaning] = dict.fromkeys(self.stop, "stop")
        signals.update(dict.fromkeys(self.forward, "forward"))
        if self.preempt is not None:
            signals[self.preempt] = "preempt"
        return signals


class Policy(Record):
    """Which failures are tried again. A code of 128 + n stands for signal n."""

    restart_on: tuple[Code, ...] = ()
    """Empty: all."""
    give_up_on: tuple[Code, ...] = ()
    """They are not, whatever ``restart_on`` says."""


NO_POLICY = Policy()


class OutputRequest(Record):
    """What the user asked for about the workers' output and input, as it was written; empty: not said."""

    log_dir: str | None = None
    each_rank_log: str | None = None
    redirects: str = ""
    tee: str = ""
    local_ranks: str = ""
    global_ranks: str = ""
    stdout_words: str = ""
    stderr_words: str = ""
    tag: str = "auto"
    template: str = ""
    collapse: bool = False
    partial_after_s: Seconds | None = DEFAULT_PARTIAL_S
    stdin: str = ""
    max_bytes: int | None = None
    logs_specs: str | None = None


class PlacementRequest(Record):
    """What the user asked for about devices, CPUs and memory of the workers."""

    bind: str = "none"
    memory: str | None = None
    """A memory policy or ``none``; None: the binding's own."""
    strict: bool = False
    names_devices: bool = False
    """The device of each worker is to be shown."""
    bind_cores_to_rank: bool = False
    core_list: str | None = None
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
    preload: tuple[str, ...] = ()
    """Modules that a fork server imports; empty: the installed modules that the script itself imports."""
    source: str = ""
    """File to search for these imports; empty: the script."""
    warm_for_s: Seconds | None = None
    warm_memory: int | None = None
    wraps: tuple[str, ...] = ()


class DebugRequest(Record):
    """Which workers run under debugpy, and where a debugger attaches to them."""

    ranks: str = ""
    port: Port = DEFAULT_DEBUG_PORT
    address: str = DEFAULT_DEBUG_ADDRESS
    waits: bool = False


class ElasticRequest(Record):
    """Wishes about jobs whose nodes come and go, and the wish for autotuning, which runs many jobs."""

    autotuning: str = ""
    training: bool = False
    min_nodes: int | None = None
    max_nodes: int | None = None
    wait_s: float | None = None
    discover: str = ""


class ShowRequest(Record):
    """What to show before the workers start, or instead of starting them."""

    bindings: bool = False
    dry_run: bool = False
    dry_run_json: bool = False
    doctor: bool = False
    doctor_first: bool = False
    ring: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether a part of the plan is to be shown."""
        return self.bindings or self.is_dry

    @property
    def is_dry(self) -> bool:
        """Whether the plan is shown and nothing is started."""
        return self.dry_run or self.dry_run_json


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
    show: ShowRequest = ShowRequest()
    max_restarts: int | None = None
    policy: Policy = NO_POLICY
    role: str = "default"
    log_level: Level = "info"
    """Word of `LEVELS`."""
    save_pid: bool = False
    env: tuple[tuple[str, str], ...] = ()
    """Variables added to the environment that each node's workers inherit."""
    variables: tuple[str, ...] = ()
    is_strict: bool = False
    """Fallbacks are errors, see `dsl.model.job.refuse_fallbacks`."""
    detaches: bool = False
    stacks_on_failure: bool = False
    hang_timeout_s: float | None = None
    hang_action: HangAction = "report"
    events: str | None = None
    metrics: str | None = None
    """Where the figures of the job are shown, as `dsl.plan.job.read_target` reads it; None: nowhere."""
