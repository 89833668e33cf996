"""Events of the rendezvous: what the nodes of a job tell each other, if nodes come and go."""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.job import Meeting
    from dsl.model.judgement import Failed


@record
class NodesMet:
    """The nodes have met for another attempt."""

    meeting: Meeting
    """The new round. The rendezvous does not know the attempt, which is 0 here."""
    hosts: tuple[str, ...]
    """Names of the nodes, by node rank."""
    joined: tuple[str, ...] = ()
    """Names of the nodes that were not there in the last round."""
    left: tuple[str, ...] = ()
    """Names of the nodes of the last round that are not there any more."""


@record
class PeerFailure:
    """A worker of another node failed."""

    host: str
    """Name of that node."""
    rank: int
    """Global rank of the worker; -1: there is none."""
    code: int
    """Its exit code, or 128 + the signal."""
    failed: Failed | None
    """How it failed; None: that node does not tell."""
    is_final: bool
    """The job is over."""


@record
class NodesFinished:
    """Every node has ended well, or there is no way to wait for the others."""


@record
class MeetingRefused:
    """The nodes do not meet, or the delegate that meets them for us is lost."""

    text: str
    """One line: what, where, how to mend it."""
    is_lost: bool = False
    """The delegate has ended by itself."""
    is_usage: bool = False
    """What the user asked for makes no sense."""
    is_unneeded: bool = False
    """The job has ended while this node was a spare: nothing is wrong."""
