"""What is decided: once for a whole job, in each meeting of its nodes, and for a node in one attempt."""

from __future__ import annotations

from dsl._record import Record
from dsl.engine import LaunchSpec
from dsl.errors import OptionError
from dsl.model.request import (
    NO_POLICY,
    Count,
    DebugRequest,
    HangAction,
    Level,
    OutputRequest,
    PlacementRequest,
    Policy,
    Port,
    Program,
    Seconds,
    Shown,
    SignalRequest,
    StartRequest,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Literal, TypeAlias

    MemoryMode: TypeAlias = Literal["bind", "preferred", "interleave", "local"]
    MemoryPolicy: TypeAlias = tuple[MemoryMode, Sequence[int]]
    LineFile: TypeAlias = tuple[Literal[1, 2], str, tuple[str, ...]]


# Text, as in `dsl.model.request`.
MeetingKind: TypeAlias = "Literal['alone', 'static', 'dynamic']"
RestartReason: TypeAlias = "Literal['', 'start', 'failure', 'membership']"
Pairs: TypeAlias = "tuple[tuple[str, str], ...]"


class Notice(Record):
    """Something to tell the user before the workers start."""

    level: Level
    """How much it weighs."""
    text: Shown
    """One line."""
    is_made: bool = False
    """It announces something that is made for the workers: shown once that exists, and not in a dry run."""
    is_fallback: bool = False
    """The user does not get what was asked for. Every warning is a fallback, too."""

    @property
    def line(self) -> str:
        """The text as the user sees it."""
        return f"warning: {self.text}" if self.level == "warning" else self.text


def refuse_fallbacks(notices: Iterable[Notice]) -> None:
    """What ``--strict`` means: raise OptionError for the first fallback."""
    for notice in notices:
        if notice.is_fallback or notice.level == "warning":
            raise OptionError(f"{notice.text} (--strict makes this an error)")


class Flavour(Record):
    """The environment and argument habits of one family of launchers, as data.

    `dsl.plan.worker` has the facts that variables can tell.
    """

    command: str
    """Name that messages start with."""
    group_variables: Pairs
    """Variables that all workers of a node share, each with the fact that it tells."""
    worker_variables: Pairs
    """Variables of one worker, each with the fact that it tells."""
    constants: Pairs = ()
    """Variables that always have this value."""
    defaults: Pairs = ()
    """Variables that have this value unless the user sets them."""
    crowd_defaults: Pairs = ()
    """More defaults, for nodes with several workers."""
    interpreter_variable: str = ""
    """Variable that may name another interpreter than ours."""
    fills_local_rank: bool = False
    """``${local_rank}`` in a word becomes the worker's local rank."""
    shows_slots: bool = False
    """The visible-devices variable holds the slots of the node."""
    reads_pod: bool = False
    """Workers get variables of the pod, from a file of the cluster."""
    keeps_errors: bool = False
    """Each worker has a file to record its error in, in the directory of the run."""
    hands_on_errors: bool = False
    """The record of the root cause also goes to the error file that our own environment names."""
    has_timers: bool = False
    """Workers may take timers, if the environment asks for that."""
    logs_by_folder: bool = False
    """With a log directory and no other option, all output goes to files, too."""
    binds_memory: bool = False
    """The memory policy is a part of the bindings that the user asks for."""
    tells_bindings: bool = False
    """A message says how many CPUs each worker gets."""
    underscores: bool = False
    """Its options are written ``--no_python``, not ``--no-python``."""

    def spell(self, option: str) -> str:
        """An option with dashes in the spelling of the command."""
        return f"--{option[2:].replace('-', '_')}" if self.underscores else option


class Host(Record):
    """A named machine of the job, and the slots that it offers. Its place in `Job.hosts` is its node rank."""

    name: str
    slots: tuple[Count, ...]


class MeetingPoint(Record):
    """What is known beforehand about where the workers meet."""

    kind: MeetingKind
    """``alone``: one node that meets no other; ``static``: nodes that know address, port and their places;
    ``dynamic``: nodes that find each other through a store."""
    address: str
    """Where rank 0 listens; empty: the head finds it, or the nodes decide in each round (``dynamic``)."""
    port: Port | None
    """Port there; 0: any free one for each attempt; None: the usual one, or another if that is taken."""
    backend: str = ""
    """How the nodes find each other: ``static``, or torch's name for a kind of store."""
    endpoint: str = ""
    """Where they find each other, in the form that the backend reads."""
    settings: Pairs = ()
    """Settings of the backend."""
    least_nodes: Count = 1
    """With a backend: the least nodes that the job runs with; `Job.node_count` are the most."""
    local_address: str = ""
    """Address by which other nodes reach this node; empty: its name."""
    spares: Count = 0
    """Nodes beyond `Job.node_count` that wait to take the places of others."""

    @property
    def way(self) -> Literal["alone", "port", "store"]:
        """How nodes with a command each meet: at the ``port`` of node 0, or in torch's ``store``.

        ``alone``: this command does without others.
        """
        if not self.backend:
            return "alone"
        return "port" if self.kind == "static" else "store"


class Job(Record):
    """Everything that one command line starts, over all nodes and attempts.

    A field without a line of documentation has the meaning of the field of `dsl.model.request.Request`.
    """

    flavour: Flavour
    """The family of launchers whose environment and arguments the workers expect."""
    program: Program
    """What each worker runs."""
    meeting: MeetingPoint
    """Where the workers meet."""
    run_id: str = ""
    """Name of the job, different from that of other jobs."""
    given_id: str = ""
    """The user's name of the job; empty: there is none. A lone node may have another run id all the same."""
    role: str = "default"
    hosts: tuple[Host, ...] = ()
    """The nodes, if they are named; a node without a name counts its workers itself."""
    node_count: Count = 1
    """Number of nodes."""
    workers: str = ""
    """How many workers a node without a name has: a number, ``auto``, ``cpu``, ``gpu`` or an accelerator."""
    accelerator: str = ""
    """The accelerator of all nodes; empty: each node looks for its own."""
    visible_devices: str | None = None
    """What the visible-devices variable holds instead of slots: names of devices, or nothing at all."""
    env: Pairs = ()
    max_restarts: int = 0
    policy: Policy = NO_POLICY
    gives_up: bool = False
    """The job ends if attempts fail over and over in their first seconds: the user has set no limit. Only for
    jobs that can go on without some of their nodes."""
    signals: SignalRequest = SignalRequest()
    output: OutputRequest = OutputRequest()
    placement: PlacementRequest = PlacementRequest()
    start: StartRequest = StartRequest()
    debug: DebugRequest = DebugRequest()
    log_level: Level = "info"
    save_pid: bool = False
    is_strict: bool = False
    stacks_on_failure: bool = False
    hang_timeout_s: Seconds | None = None
    hang_action: HangAction = "report"
    metrics: Shown | None = None


class Meeting(Record):
    """One round of a job: which nodes take part, in which places, and where the workers meet."""

    attempt: Count
    """How often the group was started before."""
    node_rank: Count
    """Place of this node."""
    local_world_sizes: tuple[Count, ...]
    """Number of workers of each node, by node rank."""
    address: str
    """Where rank 0 listens."""
    port: Port
    """Port there."""
    round: Count = 0
    """How often the nodes have met; it also grows when a node joins or leaves, without a counted restart."""
    notices: tuple[Notice, ...] = ()
    """What the user should know about this round."""
    restarts: Count = 0
    """Counted restarts so far, the same on all nodes."""
    reason: RestartReason = ""
    """Why this round takes place, if the nodes tell each other; else empty."""
    first_role_rank: Count | None = None
    """Rank of this node's first worker among those of its role; None: all workers have the same role."""
    role_size: Count | None = None
    """Number of workers of that role over all nodes; None: all."""

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return sum(self.local_world_sizes)

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(self.local_world_sizes)

    @property
    def local_world_size(self) -> int:
        """Number of workers of this node."""
        return self.local_world_sizes[self.node_rank]

    @property
    def ranks(self) -> range:
        """Global ranks of this node's workers."""
        first = sum(self.local_world_sizes[: self.node_rank])
        return range(first, first + self.local_world_size)


class Route(Record):
    """Where one output stream of a worker goes: to a file, to the console, to both, or to neither."""

    path: str | None = None
    """The file."""
    console: Literal[1, 2] | None = None
    """The command's stdout or stderr, line by line."""
    inherit: bool = False
    """The worker writes straight to the command's own stream."""
    terminal: bool = False
    """The worker sees a terminal: ours if it inherits the stream, else one of its own."""
    prefix: str | None = None
    """Prefix of each line in place of the worker's prefix; None: the worker's prefix."""
    fd: int | None = None
    """The stream goes to this descriptor of ours."""
    pipe: bool = False
    """We read the stream, and get `dsl.Output` events."""


INHERIT = Route(inherit=True)


class WorkerDevice(Record):
    """The device of a worker. The address is empty and the node None if the machine does not tell them."""

    name: str
    pci_address: str = ""
    numa_node: int | None = None


class Label(Record):
    """What reports call a supervised program: ``rank 3``, ``host n1``."""

    noun: str
    name: str

    def __str__(self) -> str:
        return f"{self.noun} {self.name}"


class Warm(Record):
    """How a fork server outlives its job."""

    stay_s: Seconds
    """How long it stays after its last job."""
    memory: int
    """Bytes that all warm servers of the user may use."""
    withheld: tuple[str, ...] = ()
    """Variables that may be secrets: only workers get them."""
    left_out: tuple[str, ...] = ()
    """Variables that change with each command: the server does without them, too."""
    only_if_there: bool = False
    """It is used, but not started."""


class ForkServer(Record):
    """A process that imports what workers need, once, and forks them."""

    interpreter: tuple[str, ...]
    """The workers' interpreter and its flags."""
    env: Mapping[str, str]
    """Its whole environment: the variables that are the same for its workers in every attempt. As a ``warm``
    server it gets less."""
    preload: tuple[str, ...] = ()
    """Modules to import; empty: the installed modules that ``script`` imports."""
    script: str = ""
    """Path of a script, or name of a module; empty: there is no text to search for imports."""
    is_module: bool = False
    """``script`` names a module."""
    cpus: tuple[int, ...] | None = None
    """CPUs that it is bound to: those of its workers; None: it is not bound."""
    warm: Warm | None = None
    """It stays for other jobs; None: it ends with this one."""


class WorkerPlan(Record):
    """One worker: what to execute and how. A field without documentation is that of `WorkerSpec`."""

    rank: int
    """Global rank, or index among the supervised programs."""
    local_rank: int
    """Index within its node."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables added to the environment of its node."""
    cpus: tuple[int, ...] | None = None
    mempolicy: MemoryPolicy | None = None
    stdin: bool = False
    """It gets the command's stdin."""
    stdout: Route = INHERIT
    """Where its stdout goes."""
    stderr: Route | None = INHERIT
    """Where its stderr goes; None: it is joined to stdout."""
    prefix: str = ""
    """Prefix of each of its lines on the console."""
    error_file: str | None = None
    """File where it may record its error, as torch's workers do."""
    device: WorkerDevice | None = None
    """Its device, looked up only for a binding, or to be shown."""
    noun: str = "rank"
    """What ``rank`` counts, as reports call it."""
    keep_fds: tuple[int, ...] = ()
    """Descriptors of the agent, from 3 on, that the worker keeps under the same numbers."""
    name: str = ""
    """What reports call it in place of ``rank``."""
    stdin_fd: int | None = None
    """Descriptor of ours that it gets as stdin."""
    fork_server: int | None = None
    """Index in `NodePlan.fork_servers` of the server that forks this worker; None: the worker is executed."""
    fork_entry: int = 0
    debug_port: int | None = None
    """Port where a debugger attaches to it; None: it runs without a debugger."""
    wrap: tuple[str, ...] = ()
    """Words before ``argv``: another command that executes it; empty: it is executed itself."""

    @property
    def command(self) -> tuple[str, ...]:
        """The words that are executed."""
        return self.wrap + self.argv

    @property
    def label(self) -> Label:
        """What reports call it."""
        return Label(self.noun, self.name or str(self.rank))

    @property
    def log_path(self) -> str | None:
        """The log file with its stderr, else the one with its stdout."""
        return (self.stderr or self.stdout).path or self.stdout.path


class NodePlan(Record):
    """Everything one node starts, with no decision left."""

    job: Job
    """What the job has decided. Its hosts are none of ours in the plan of programs that reach hosts."""
    meeting: Meeting
    """The round that it is for."""
    host: str
    """Name of the node in reports."""
    workers: tuple[WorkerPlan, ...]
    """What to start, by local rank."""
    env: Mapping[str, str]
    """The environment that all workers share, without each worker's own variables."""
    group: LaunchSpec = LaunchSpec(())
    """How the engine starts, shows and ends them; `dsl.agent.planner.launch_spec` adds the workers."""
    pid_file: str | None = None
    """Holds the agent's pid while the job runs; None: not asked for."""
    log_dir: str | None = None
    """Directory that is made if it is missing."""
    run_dirs: tuple[str, ...] = ()
    """Directories to make for this attempt, outermost first; all new, but for the run's own in a restart."""
    notices: tuple[Notice, ...] = ()
    """What the user should know before the workers start."""
    handed_file: str | None = None
    """File where the process that started us looks for the record of the root cause; None: no such file."""
    timer_file: str | None = None
    """FIFO by which workers take timers; None: they take none."""
    is_conducted: bool = False
    """A head shows this node's output, and compares its failures with those of the other nodes."""
    fork_servers: tuple[ForkServer, ...] = ()
    """Processes that fork workers. An attempt uses servers that already run, if they equal these."""

    @property
    def command(self) -> str:
        """Name that messages start with."""
        return self.job.flavour.command

    @property
    def has_log_files(self) -> bool:
        """Whether output goes to files, which we may have to open again after a log rotation."""
        return bool(self.group.line_files) or any(worker.log_path is not None for worker in self.workers)
