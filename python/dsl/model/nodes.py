"""What the nodes of a job tell each other where they come and go: events of the rendezvous."""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.job import Meeting


@record
class NodesMet:
    """The nodes have met for another attempt."""

    meeting: Meeting
    """Its number of the attempt is not known here: 0."""
    hosts: tuple[str, ...]
    """Names of the nodes, by node rank."""
    joined: tuple[str, ...] = ()
    """Those that were not there the last time."""
    left: tuple[str, ...] = ()
    """Those that are not there any more."""


@record
class PeerFailure:
    """A worker of another node failed."""

    host: str
    """That node."""
    rank: int
    """Its global rank; -1: it has none."""
    code: int
    """Its exit code, or 128 + the signal."""
    line: str
    """What that node says of it."""
    is_final: bool
    """The job is over."""


@record
class NodesFinished:
    """Every node has ended well, or cannot be waited for."""


@record
class MeetingRefused:
    """The nodes do not meet, or nobody is left who could meet them for us."""

    text: str
    """One line: what, where, how to mend it."""
    is_lost: bool = False
    """The delegate has ended by itself."""
    is_usage: bool = False
    """What was asked for makes no sense."""
    is_unneeded: bool = False
    """The job has ended while this node was a spare: nothing is wrong."""
