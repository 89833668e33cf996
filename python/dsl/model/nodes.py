"""Events of torch's rendezvous, in which nodes come and go. The delegate of a node sends them to its agent.

A `Notice` and a `MembershipChanged` of the delegate are such events, too.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.model.job import Meeting
from dsl.model.judgement import Failed
from dsl.model.request import Code, RankOrNone, Shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

# Text, as in `dsl.model.request`.
RefusalKind: TypeAlias = (
    "Literal['closed', 'unneeded', 'timeout', 'connection', 'settings', 'clock', 'lost', 'other']"
)


class NodesMet(Record):
    """The nodes have met for another attempt."""

    meeting: Meeting
    """The new round. The rendezvous does not know the attempt, which is 0 here."""
    hosts: tuple[Shown, ...]
    """Names of the nodes, by node rank; a node that is not ours has the address that torch knows."""
    joined: tuple[Shown, ...] = ()
    """Names of the nodes that were not there in the last round."""
    left: tuple[Shown, ...] = ()
    """Names of the nodes of the last round that are not there any more."""


class PeerFailure(Record):
    """A worker failed. Its agent tells the delegate, and the delegates tell each other."""

    host: Shown
    """Name of the worker's node."""
    rank: RankOrNone
    """Global rank of the worker; -1: there is none."""
    code: Code
    """Its exit code, or 128 + the signal."""
    failed: Failed | None
    """How it failed; None: that node does not tell."""
    is_final: bool
    """The job is over; else a restart may follow."""


class NodesFinished(Record):
    """Every node has ended well, or there is no way to wait for the others."""


class MeetingRefused(Record):
    """The nodes do not meet, or the delegate is lost."""

    text: Shown
    """One line: what, where, how to mend it."""
    kind: RefusalKind = "other"
    """What stands in the way. ``settings``: what the user asked for makes no sense. ``lost``: the delegate
    has ended by itself. ``unneeded``: the job has ended while this node was a spare, so nothing is wrong."""

    @property
    def is_lost(self) -> bool:
        """Whether the delegate has ended by itself."""
        return self.kind == "lost"

    @property
    def is_unneeded(self) -> bool:
        """Whether nothing is wrong: the job has ended while this node was a spare."""
        return self.kind == "unneeded"
