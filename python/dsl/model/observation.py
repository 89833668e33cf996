"""What a view into a running job asks, and what the agents of the job answer.

A view connects to the socket of the job. The agent there says `JobView` at once; `NoAnswer` follows if it
cannot answer more, and the conversation ends. The view sends `Look`; for each node that can be seen it gets
`NodeStatus`, `NodeStacks` or `NodePulse`, in several parts if the node has many ranks, then `Looked`.
`SignalRank` is answered with `Signalled`, if the rank is still there, and `Looked`. The head of a job on
several hosts passes a question on to the agents there, which answer in the same way, and passes their answers
back. A view that says `Follow` gets `Followed`, and from then on the output of the job.

A field without a line of documentation is what it is in every record here: ``number`` that of the question,
which its answers carry; ``host`` the name of a machine, ``node_rank`` the place of its node, ``attempt`` the
one that runs there, ``ranks`` its workers by local rank; ``rank`` and ``local_rank`` those of a worker,
``state`` the kernel's letter, as in `RankStatus`.
"""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.model.request import Count, Moment, RankOrNone, Shown, Signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Annotated, Any, Literal, TypeAlias

# Text, as in `dsl.model.request`.
Sight: TypeAlias = "Literal['status', 'stacks', 'native', 'pulse', 'samples']"
SampleTime: TypeAlias = "Annotated[int, 0, 60]"
Percent: TypeAlias = "Annotated[int, -1, 100]"
Share: TypeAlias = "Annotated[float, 0, 1_000_000]"


class JobView(Record):
    """What a job is, as far as its agent knows."""

    version: Shown
    """Version of dsl."""
    command: Shown
    """Name of the command that the user typed, such as ``dsl``."""
    words: tuple[Shown, ...]
    """Script, module or program of the first worker, with its arguments; or the function alone."""
    pid: Count
    """Pid of the command, as the user's shell knows it."""
    cwd: Shown
    """Directory in which it runs."""
    host: Shown
    started_ns: Moment
    """CLOCK_REALTIME when the first attempt began."""
    attempt: Count
    """The present attempt, counted from 0."""
    restarts: Count
    """Restarts so far."""
    nodes: Count
    """Number of nodes of the job."""
    workers: Count
    """Number of workers of all nodes."""
    is_whole: bool = True
    """The socket covers all nodes of the job, not only the agent's own."""


class NoAnswer(Record):
    """agent to view: no question is answered. engine to view, instead of `JobView`: the view may not look."""

    why: Shown
    """The reason, as a clause."""


class Look(Record):
    """view to agent, head to agents: tell what your workers do."""

    number: Count
    what: Sight = "status"
    """``status``: figures of the kernel; ``stacks``: what the threads execute; ``native``: C frames, too;
    ``pulse``: counters that stand still in a rank that makes no progress; ``samples``: in which stacks the
    workers spend the next seconds."""

    with_logs: bool = False
    """`RankStatus` has the paths of log files, too."""
    for_s: SampleTime = 0
    """How long ``samples`` are taken, in seconds."""


class SignalRank(Record):
    """view to agent, head to agents: send a signal to the process group of one worker."""

    number: Count
    node_rank: Count
    local_rank: Count
    pid: Count
    """Its pid, as the view knows it: another process in its place gets no signal."""
    signum: Signal


class Signalled(Record):
    """agent to view, agent to head: the worker has been sent its signal."""

    number: Count


class Looked(Record):
    """agent to view, agent to head: no further answer to this question follows."""

    number: Count
    missing: tuple[Shown, ...] = ()
    """Hosts whose agents have not answered."""


class Follow(Record):
    """view to agent: pass on what the job shows. Nothing else can be asked afterwards."""


class Followed(Record):
    """agent to view: the output follows, without records."""

    problem: Shown = ""
    """Why no output follows, as a clause; empty: it does."""


class RankStatus(Record):
    """What the kernel says of one worker's process."""

    rank: RankOrNone
    local_rank: Count
    pid: Count
    """Its pid; 0: it has not started, or has ended."""
    state: Shown = ""
    """The kernel's letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended."""
    cpu_ms: Moment = 0
    """CPU time so far of the process and of its children that have ended, in milliseconds."""
    rss_bytes: Moment = 0
    """Resident memory."""
    threads: Count = 0
    """Number of threads."""
    said: Shown = ""
    """Its last line of output, where dsl has it."""
    gpu_percent: Percent = -1
    """Use of its GPU in percent; -1: unknown, or it has none."""
    gpu_bytes: Moment = 0
    """Memory that it uses of its GPU; where the driver names no processes, all that is used; 0: none."""
    log: Shown = ""
    """Path of its log file on its host; empty: it has none, or nobody has asked."""
    wait_percent: Percent = -1
    """Part of its time that it waited for other ranks when it was last sampled; -1: it was not."""


class NodeStatus(Record):
    """agent to view, agent to head: workers of one node."""

    number: Count
    node_rank: Count
    host: Shown
    attempt: Count
    ranks: tuple[RankStatus, ...]
    restarts: Count = 0
    """Restarts so far."""
    age_ms: Moment = 0
    """Milliseconds since this attempt began there."""


class Relayed(Record):
    """agent to head: a `NodeStatus` for a view. The head passes it on unread: many come."""

    number: Count
    line: str
    """The record, as the view reads it."""


class Frame(Record):
    """A function that a thread is in."""

    function: Shown
    file: Shown
    """Path of its source, or of the library of a C function."""
    line: Count = 0
    """Line that is executed; 0: unknown."""


class ThreadStack(Record):
    """One thread of a worker."""

    name: Shown
    """Its name in Python, or in the kernel."""
    frames: tuple[Frame, ...] = ()
    """What it executes, innermost first; empty: unknown."""
    is_main: bool = False
    """It is the main thread."""
    state: Shown = ""
    channel: Shown = ""
    """Function of the kernel in which it waits; empty: none, or unknown."""
    call: Shown = ""
    """System call in which it waits, and for what: ``read(stdin)``; empty: none, or unknown."""
    pid: Count = 0
    """It is the main thread of this descendant of the worker; 0: a thread of the worker itself."""
    signal: Count = 0
    """It executes its Python handler of this signal; 0: none, or unknown."""
    cpu_share: Share = 0.0
    """CPUs that a descendant used while we looked."""
    switches: Moment = 0
    """How often it has begun to wait so far."""
    is_bare_loop: bool = False
    """By its source it executes a loop that does nothing, such as ``while True: pass``."""


class StackSample(Record):
    """A stack in which a worker was seen."""

    frames: tuple[Frame, ...]
    """Innermost first; empty: one of many rare stacks."""
    count: Count
    """How often it was seen."""
    call: Shown = ""
    """A function without a frame that its innermost line calls, and which waits: ``wait``, ``item``."""
    is_child: bool = False
    """It is a stack of a descendant."""


class Sampled(Record):
    """How the main threads of a worker and its descendants spent some seconds."""

    samples: tuple[StackSample, ...]
    """The most frequent first."""
    sleeps: Share = 0.0
    """Part of the time in which the worker's main thread neither ran nor wanted to."""
    delayed: Share = 0.0
    """Part of the time in which this thread wanted to run, and had no CPU."""
    has_gpu: bool = False
    """The worker has a GPU open."""


class RankStacks(Record):
    """What one worker executes."""

    rank: RankOrNone
    local_rank: Count
    pid: Count
    """Its pid; 0: it has not started, or has ended."""
    threads: tuple[ThreadStack, ...] = ()
    """The main thread first; then descendants that work, or that it waits for."""
    state: Shown = ""
    cpu_share: Share = 0.0
    """CPUs that its process and its descendants used while we looked."""
    cpu_ms: Moment = 0
    """CPU time of these processes so far, in milliseconds."""
    naps: bool = False
    """A descendant sleeps for a time that it has chosen."""
    major_faults: Moment = 0
    """Pages a second that it had to wait for, because they were not in memory."""
    store: Shown = ""
    """Address of the store at which its process group meets, by its environment; empty: unknown."""
    collective: Shown = ""
    """The last collective operation that it began, where torch's flight recorder tells it."""
    sequence: Count = 0
    """Number of that operation in its process group, counted from 1; 0: unknown."""
    process_group: Shown = ""
    """Name of that process group; empty: unknown."""
    problem: Shown = ""
    """Why its Python stack is unknown, in a clause; empty: it is known."""
    sampled: Sampled | None = None
    """How it spent its time; None: nobody has asked."""


class NodeStacks(Record):
    """agent to view, agent to head: what workers of one node execute. A message has at most a mebibyte."""

    number: Count
    node_rank: Count
    host: Shown
    ranks: tuple[RankStacks, ...]


class RankPulse(Record):
    """How far one worker has come, as far as the kernel counts it."""

    local_rank: Count
    mark: Shown
    """The same text as long as its processes read and write nothing, and none comes or goes. Empty: it does
    not run."""


class NodePulse(Record):
    """agent to the watch for hangs: how far the workers of one node have come."""

    number: Count
    node_rank: Count
    host: Shown
    attempt: Count
    ranks: tuple[RankPulse, ...]


def gather(answers: Iterable[object]) -> tuple[list[Any], tuple[str, ...]]:
    """Put the parts of the answers to one question together, until `Looked`.

    Returns a `NodeStatus`, `NodeStacks` or `NodePulse` for each node, by node rank, and the hosts that have
    not answered.
    """
    nodes: dict[int, Any] = {}
    for one in answers:
        if isinstance(one, Looked):
            return [nodes[rank] for rank in sorted(nodes)], one.missing
        if isinstance(one, (NodeStatus, NodeStacks, NodePulse)):
            before = nodes.get(one.node_rank)
            nodes[one.node_rank] = one if before is None else replace(one, ranks=(*before.ranks, *one.ranks))
    return [nodes[rank] for rank in sorted(nodes)], ()
