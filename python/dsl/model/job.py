"""What is decided once for a whole job, the same on every node, and how its nodes meet."""

from __future__ import annotations

from dsl._record import Record
from dsl.errors import OptionError
from dsl.model.request import (
    Count,
    DebugRequest,
    HangAction,
    Level,
    OutputRequest,
    PlacementRequest,
    Port,
    Program,
    Seconds,
    Shown,
    SignalRequest,
    StartRequest,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal, TypeAlias

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
    host: Count | None = None
    """Place of this node among `Job.hosts`, if some hosts do not take part; None: its node rank."""

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
    def host_index(self) -> int:
        """Place of this node among `Job.hosts`."""
        return self.node_rank if self.host is None else self.host

    @property
    def ranks(self) -> range:
        """Global ranks of this node's workers."""
        first = sum(self.local_world_sizes[: self.node_rank])
        return range(first, first + self.local_world_size)
