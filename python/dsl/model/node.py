"""Everything one node starts in one attempt, with no decision left."""

from __future__ import annotations

from dsl._record import Record
from dsl.spec import LaunchSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal, TypeAlias

    from dsl.model.job import Notice
    from dsl.model.request import HangAction, Seconds

    MemoryMode: TypeAlias = Literal["bind", "preferred", "interleave", "local"]
    MemoryPolicy: TypeAlias = tuple[MemoryMode, Sequence[int]]
    SignalMeaning: TypeAlias = Literal["stop", "forward", "preempt"]
    LineFile: TypeAlias = tuple[Literal[1, 2], str, tuple[str, ...]]


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
    """One worker: what to execute and how. A field without documentation is that of `dsl.spec.WorkerSpec`."""

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

    @property
    def label(self) -> Label:
        """What reports call it."""
        return Label(self.noun, self.name or str(self.rank))

    @property
    def log_path(self) -> str | None:
        """The log file with its stderr, else the one with its stdout."""
        return (self.stderr or self.stdout).path or self.stdout.path


class NodePlan(Record):
    """Everything one node starts, with no decision left.

    A field without documentation has the meaning of the field of `dsl.model.request.Request` or its parts.
    """

    host: str
    """Name of the node in reports."""
    node_rank: int
    """Its place in the job."""
    workers: tuple[WorkerPlan, ...]
    """What to start, by local rank."""
    env: Mapping[str, str]
    """The environment that all workers share, without each worker's own variables."""
    master_addr: str
    """Where rank 0 listens."""
    master_port: int
    """Port there."""
    world_size: int
    """Number of workers over all nodes."""
    group: LaunchSpec = LaunchSpec(())
    """How the engine starts, shows and ends them; `dsl.agent.planner.launch_spec` adds the workers."""
    pid_file: str | None = None
    """Holds the agent's pid while the job runs; None: not asked for."""
    log_dir: str | None = None
    """Directory that is made if it is missing."""
    run_dirs: tuple[str, ...] = ()
    """Directories to make for this attempt, outermost first; all new, but for the run's own in a restart."""
    log_level: str = "info"
    notices: tuple[Notice, ...] = ()
    """What the user should know before the workers start."""
    command: str = "dsl"
    """Name that messages start with."""
    name: str = ""
    """What the workers run, in reports."""
    attempt: int = 0
    """How often the group was started before."""
    handed_file: str | None = None
    """File where the process that started us looks for the record of the root cause; None: no such file."""
    timer_file: str | None = None
    """FIFO by which workers take timers; None: they take none."""
    signals: Mapping[int, SignalMeaning] | None = None
    """What a signal to the job means; None: the engine's usual table."""
    preempt_signal: int | None = None
    preempt_grace_s: float | None = None
    stacks_on_failure: bool = False
    hang_timeout_s: float | None = None
    """None: this agent does not watch."""
    hang_action: HangAction = "report"
    metrics: str | None = None
    """Shown only if the command of this agent is the one that the user typed."""
    is_conducted: bool = False
    """A head shows this node's output, and compares its failures with those of the other nodes."""
    fork_servers: tuple[ForkServer, ...] = ()
    """Processes that fork workers. An attempt uses servers that already run, if they equal these."""

    @property
    def has_log_files(self) -> bool:
        """Whether output goes to files, which we may have to open again after a log rotation."""
        return bool(self.group.line_files) or any(worker.log_path is not None for worker in self.workers)
