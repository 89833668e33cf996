"""What the head and the agents of a job tell each other: records, and their bytes.

The bytes of a message are those of `dsl.model.codec`, so nothing that arrives can run code.
"""

from __future__ import annotations

from dsl._record import record
from dsl.errors import JobFormatError
from dsl.model.codec import RECORDS as JOB_RECORDS
from dsl.model.codec import from_plain, to_plain
from dsl.model.job import Job, Meeting, Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    StreamKind: TypeAlias = Literal["terminal", "null", "other"]


@record
class Assignment:
    """head to agent, once: the whole job, and the agent's part of it."""

    version: str
    """Version of dsl on the head; an agent of another version refuses."""
    job: Job
    """The job, byte for byte as it was planned."""
    node_rank: int
    """The host of the job that this agent serves."""
    task: int | None = None
    """The one local rank that it starts; None: all of the node."""
    cwd: str = ""
    """Directory to run in."""
    pid: int = 0
    """Pid of the command on the head: names of files are made of it, the same on every node."""
    stamp: str = ""
    """Local time on the head as YYYYmmddHHMMSS, for the same names."""
    token: str = ""
    """16 hexadecimal digits of this run, for the same names."""
    stdout: StreamKind = "other"
    """What the head's stdout is."""
    stderr: StreamKind = "other"
    """What the head's stderr is."""
    checks: bool = True
    """Whether to look for problems before the start."""
    is_elastic: bool = False
    """Nodes come and go: it may wait long for its first meeting, and any node may be the first."""


@record
class Hello:
    """agent to head, first: who it is. Over ssh's stream it comes before the `Assignment`."""

    version: str
    """Version of dsl there."""
    place: int
    """The node rank that it was started as, or the rank if it is a task of one rank."""
    host: str
    """Name of the machine (``uname -n``)."""
    pid: int
    """Its pid."""
    is_task: bool = False
    """It is a task of one rank, which its launcher has counted."""
    local_rank: int = 0
    """Of such a task: its place on its host, as its launcher counts."""
    python: str = ""
    """Its interpreter."""


@record
class Checked:
    """agent to head, after the `Assignment`: what stands in the way on its host."""

    problems: tuple[str, ...] = ()
    """One line each, without the name of the host: what, where, how to mend it."""
    addresses: tuple[str, ...] = ()
    """Addresses of its machine, the one that the head reached it by first."""
    is_port_free: bool = True
    """Whether the master port of the job can be taken there (of node 0)."""
    free_port: int = 0
    """Another port that is free there (of node 0)."""
    accelerator: str = ""
    """What the slots of its host stand for: ``cuda``, ``cpu`` and so on; empty: nobody has looked."""
    machine: str = ""
    """What two agents share only if they run on the same machine; empty: not known."""


@record
class Running:
    """agent to head: the workers of an attempt are being started."""

    attempt: int
    pids: tuple[int, ...] = ()


@record
class Failing:
    """agent to head, at once: a worker has failed by itself. The `Report` follows when its node has ended."""

    attempt: int
    rank: int
    status: int
    """Its exit code, or 128 + the signal."""
    ended_ns: int
    """CLOCK_REALTIME of that host when the death was noticed."""


@record
class Report:
    """agent to head: an attempt has ended on its node, and nothing of its workers is left."""

    attempt: int
    code: int
    """The exit code that the node alone would give (G2)."""
    failed_ns: int = 0
    """CLOCK_REALTIME of that host when the first failure was noticed; 0: no worker failed by itself."""
    rank: int = -1
    """Of the cause; -1 without one."""
    lines: tuple[str, ...] = ()
    """The verdict, as the node alone would give it."""
    victims: tuple[int, ...] = ()
    """Ranks that were stopped."""
    is_preempted: bool = False
    """The scheduler had announced the end."""
    stop_signal: int | None = None
    """The signal by which a user or scheduler ended it there."""
    survivors: int = 0
    """Processes that would not die."""


@record
class Said:
    """agent to head: something the user should read."""

    notice: Notice


@record
class Refused:
    """agent to head: it cannot start its part."""

    text: str
    """One line: what, where, how to mend it."""
    code: int = 1
    """Exit code for the command."""


@record
class Bye:
    """agent to head, last: all of its output is sent, and it ends."""

    code: int


@record
class Stop:
    """head to agent: stop the workers."""

    signum: int
    """The signal to send to them."""
    grace_s: float
    """Seconds until SIGKILL; 0 at once."""
    is_preemption: bool = False
    """It is the notice of a preemption."""
    why: str = ""
    """For the record of the agent."""


@record
class Forward:
    """head to agent: pass a signal on to the workers."""

    signum: int


@record
class Over:
    """head to agent: no attempt follows. Send what is left, say `Bye` and end."""


@record
class Lost:
    """Made by a link, never sent: the other side is gone, and this is the last that comes from it."""

    reason: str
    """Why, in words that follow the name of the other side: ``has closed the connection``."""


RECORDS: dict[str, type] = {
    **JOB_RECORDS,
    **{
        one.__name__: one
        for one in (
            Assignment,
            Hello,
            Checked,
            Meeting,
            Notice,
            Running,
            Failing,
            Report,
            Said,
            Refused,
            Bye,
            Stop,
            Forward,
            Over,
        )
    },
}


def message_to_bytes(message: object) -> bytes:
    """Write a message: JSON in ASCII."""
    from json import dumps

    return dumps(to_plain(message, RECORDS), separators=(",", ":")).encode("ascii")


def message_from_bytes(data: bytes) -> object:
    """Read a message.

    Raises:
        JobFormatError: these are not the bytes of a message.
    """
    from json import loads

    try:
        found = loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        raise JobFormatError("a message is damaged: it is not JSON") from None
    message = from_plain(found, RECORDS)
    if type(message).__name__ not in RECORDS:
        raise JobFormatError("a message is damaged: it is no message")
    return message
