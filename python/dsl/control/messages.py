"""The messages between the head and the agents of a job.

A message travels as a line of `dsl.model.codec`, so no message that arrives can run code.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.model.health import Health, Target, Way
from dsl.model.job import Job, Meeting, Notice
from dsl.model.judgement import FailureCode, Judgement, Report
from dsl.model.observation import Look, Looked, NodePulse, NodeStacks, Relayed, Signalled, SignalRank
from dsl.model.outcome import EndHung
from dsl.model.request import Count, Moment, Port, RankOrNone, Seconds, Shown, Signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal, TypeAlias

# Text, as in `dsl.model.request`.
StreamKind: TypeAlias = "Literal['terminal', 'null', 'other']"


class Assignment(Record):
    """head to agent, once: the whole job, and the agent's part of it."""

    version: str
    """Version of dsl on the head; an agent of another version refuses."""
    job: Job
    """The job, byte for byte as it was planned."""
    node_rank: Count
    """The host of the job that this agent serves."""
    task: Count | None = None
    """The one local rank that it starts; None: all of the node."""
    cwd: str = ""
    """Directory to run in."""
    pid: Count = 0
    """Pid of the command on the head, for names of files that are the same on every node."""
    stamp: str = ""
    """Local time on the head as YYYYmmddHHMMSS, for the same names."""
    token: str = ""
    """16 hexadecimal digits of this run, for the same names."""
    stdout: StreamKind = "other"
    """What the head's stdout is."""
    stderr: StreamKind = "other"
    """What the head's stderr is."""
    is_one: bool = False
    """Whether the head's stdout and stderr are one file or pipe."""
    checks: bool = True
    """Whether to look for problems before the start."""
    is_elastic: bool = False
    """Nodes come and go: the agent may wait long for its first meeting, and any node may be the first."""
    examines: bool = False
    """Nothing is started: the agent looks at its host for ``--doctor``."""
    looks_first: bool = False
    """The agent looks at its host for ``--doctor-first``; errors of the doctor are problems of the host."""
    records: bool = False
    """The head records what happens: the agent sends a `Recorded` of each event."""


class Hello(Record):
    """agent to head, first: who it is. Over ssh's stream it comes before the `Assignment`."""

    version: Shown
    """Version of dsl on the agent's host."""
    place: Count
    """The node rank that the agent was started with, or the rank if it is a task of one rank."""
    host: Shown
    """Name of the machine (``uname -n``)."""
    pid: Count
    """Its pid."""
    is_task: bool = False
    """Whether it is a task of one rank, which its launcher has numbered."""
    local_rank: Count = 0
    """For such a task: its number on its host, as its launcher counts."""
    python: Shown = ""
    """Its interpreter."""
    nodes: Count = 0
    """Of a member that comes by itself: number of nodes of its job."""
    spares: Count = 0
    """Of a member that comes by itself: number of spares beside them."""
    workers: Count = 0
    """Of a member that comes by itself: the number of its workers."""
    role: str = ""
    """Of a member that comes by itself: what its workers are called."""
    run_id: str = ""
    """Of a member that comes by itself: name of its job."""
    order: Shown = ""
    """Of a member that comes at any time: ranks follow these texts, as torch sorts nodes by address."""
    attempts: Count = 0
    """Of a member that has lost its conductor: how many attempts have begun."""
    restarts: Count = 0
    """Of such a member: how many restarts were counted."""


class Checked(Record):
    """agent to head, after the `Assignment`: problems and facts of its host."""

    problems: tuple[str, ...] = ()
    """One line each, without the name of the host: what, where, how to mend it."""
    addresses: tuple[str, ...] = ()
    """Addresses of its machine; the first is the address by which the head reached it."""
    is_port_free: bool = True
    """Whether the master port of the job is free there (only node 0)."""
    free_port: Port = 0
    """Another port that is free there (only node 0)."""
    accelerator: str = ""
    """What the slots of its host stand for: ``cuda``, ``cpu`` and so on; empty: not checked."""
    machine: str = ""
    """A word for the machine: two agents have the same only on the same machine; empty: unknown."""
    health: Health | None = None
    """What the doctor wants to know of the host; None: it was not asked for."""


class TryWays(Record):
    """head to agent, for ``--doctor``: try the ways to other hosts."""

    targets: tuple[Target, ...]


class WaysTried(Record):
    """agent to head: what came of it."""

    ways: tuple[Way, ...]


class Failing(Record):
    """agent to head, at once: a worker has failed by itself. The `Report` follows when its node has ended."""

    attempt: Count
    rank: RankOrNone
    status: FailureCode
    """Its exit code, or 128 + the signal."""
    ended_ns: Moment
    """CLOCK_REALTIME of that host when the death was noticed."""


class Preempted(Record):
    """agent to head, at once: a scheduler has announced a preemption there, and the workers know of it."""

    attempt: Count
    signum: Signal


class Moved(Record):
    """head to agent that has come by itself, the only answer: hang up, and come to another port."""

    port: Port
    """The port, at the same address."""
    host: Shown
    """Name of the head's machine."""


class Said(Record):
    """Either way: something the user should read."""

    notice: Notice
    has_begun: bool = False
    """Of a conductor: workers run, or have run. A node that waits is a spare."""


class Recorded(Record):
    """agent to head: a line of ``--events`` about the agent's host."""

    line: str
    """JSON (docs/events.md)."""


class Refused(Record):
    """agent to head: the agent cannot start its part. head to agent: the agent is not wanted."""

    text: str
    """One line: what, where, how to mend it."""
    code: FailureCode = 1
    """Exit code for the command."""


class Bye(Record):
    """agent to head, last: all of its output is sent, and it ends."""

    has_lost_output: bool = False
    """Some output could not be written there."""


class Stop(Record):
    """head to agent: stop the workers."""

    signum: Signal
    """The signal to send to them."""
    grace_s: Seconds
    """Seconds until SIGKILL; 0 at once."""
    why: str = ""
    """The failure elsewhere that is the reason; empty: none is, so there is nothing to look at first."""


class Forward(Record):
    """head to agent: pass a signal on to the workers."""

    signum: Signal


class Over(Record):
    """head to agent: no attempt follows. Send what is left, say `Bye` and end."""

    judgement: Judgement | None = None
    """How the job has ended, for members that tell their own user; None: well, or the head tells the user."""
    has_succeeded: bool = False
    """For such members: the job has ended well, also if a failure was the last that happened on this node."""


class MeetByTorch(Record):
    """head to agent, last: there is no head any more, the nodes meet by torch's own rendezvous."""

    restarts: Count
    """Counted restarts so far."""


class Lost(Record):
    """Made by a link, never sent: the other side is gone, and no other message follows."""

    reason: str
    """Why, in words that follow the name of the other side: ``has closed the connection``."""
    is_silent: bool = False
    """Nothing was heard any more, so the other side does not know of it."""


TO_HEAD: Mapping[str, type] = {
    one.__name__: one
    for one in (
        *(Hello, Checked, WaysTried, Failing, Preempted, Report, Said, Relayed, NodeStacks, Looked),
        *(Signalled, NodePulse, Recorded, Refused, Bye),
    )
}
"""The messages that an agent may send, by name."""

TO_AGENT: Mapping[str, type] = {
    one.__name__: one
    for one in (
        *(Assignment, Meeting, TryWays, Moved, Said, Stop, Forward, EndHung, Look, SignalRank, Over, Refused),
        MeetByTorch,
    )
}
"""The messages that a head may send, by name."""
