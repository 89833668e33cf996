"""What an agent orders its delegate to do, and what the delegate may answer.

The two talk over a pair of sockets, by `dsl.model.codec`. The first order is `Open`. The delegate answers a
`Claim` with `Claimed` or, if the nodes have to meet by torch's own rendezvous, with `ByTorch`. It answers
each `Meet` with `NodesMet` or `MeetingRefused`, and a `Finish` with `NodesFinished`. It answers an `Open`
that it cannot serve with `MeetingRefused`, too, and then waits for the end. All other events come when
something happens. A side that goes closes its end. A delegate whose agent has gone leaves and ends.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.model.job import Meeting, MeetingPoint, Notice
from dsl.model.request import Count, Port, Shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Annotated, Literal, TypeAlias

# Text, as in `dsl.model.request`.
Size: TypeAlias = "Annotated[int, 1, 65_536]"
RefusalKind: TypeAlias = "Literal['closed', 'unneeded', 'timeout', 'connection', 'settings', 'lost', 'other']"
Order: TypeAlias = "Open | Claim | Meet | Leave | Finish"
Answer: TypeAlias = (
    "Claimed | ByTorch | Outranked | NodesMet | Waiting | MeetingRefused | Notice | NodesFinished"
)


class Open(Record):
    """First: where the nodes meet."""

    point: MeetingPoint
    """Backend, endpoint and settings, and the least nodes that the job runs with."""
    run_id: str
    """Name of the job."""
    max_nodes: Count
    """The job takes at most this many nodes."""
    host: Shown
    """This node's name in messages."""


class Claim(Record):
    """Find who conducts the job, or conduct it."""

    port: Port
    """Where this node's conductor would listen."""
    key: str
    """Key of the links there, 64 hexadecimal digits."""
    lost: Count = 0
    """Number of the conductor that this node has lost, or cannot reach; 0: none."""


class Claimed(Record):
    """Who conducts the job."""

    number: Count
    """Conductors are counted from 1."""
    place: Count
    """This node's place, which no other node of the job has had; 0 is that of the node that conducts."""
    address: Shown
    """The address by which other nodes reach this one."""
    node: Shown
    """torch's address of this node: ranks follow these texts."""
    at_address: Shown
    """Where the conductor listens."""
    at_port: Port
    """Port there."""
    key: str
    """Key of the links there, 64 hexadecimal digits."""
    store: Shown
    """The place of the store, in words."""
    conducts: bool = False
    """Whether this node conducts."""
    hosts_store: bool = False
    """Whether the node that conducts hosts the store, too: if it is lost, no other node can conduct."""


class ByTorch(Record):
    """Nobody conducts: the nodes have to meet by torch's own rendezvous, as a node under torchrun does."""


class Outranked(Record):
    """Another node has come to conduct the job: this node has to call it."""


class Meet(Record):
    """Join the next round of torch's own rendezvous."""

    local_world_size: Size
    """Number of workers of this node."""
    role: str
    """The role of these workers."""


class NodesMet(Record):
    """The nodes have met for another attempt."""

    meeting: Meeting
    """The new round. Attempt and restarts are not known, and 0 here."""
    hosts: tuple[Shown, ...]
    """Names of the nodes, by node rank; a node that is not ours has the address that torch knows."""


class Waiting(Record):
    """Nodes wait for the next round."""


class Leave(Record):
    """Leave for good, and end."""

    closes: bool = False
    """The job is over; else it goes on without this node."""


class Finish(Record):
    """All workers of this node ended with 0. Wait for the other nodes."""


class NodesFinished(Record):
    """Every node has ended well, or there is no way to wait for the others."""


class MeetingRefused(Record):
    """The nodes do not meet, or the delegate is lost."""

    text: Shown
    """One line: what, where, how to mend it."""
    kind: RefusalKind = "other"
    """Why this node cannot meet the others. ``settings``: the user asked for something impossible.
    ``lost``: the delegate has ended by itself. ``unneeded``: the job has ended while this node was a spare,
    so nothing is wrong."""


ORDERS = (Open, Claim, Meet, Leave, Finish)
ANSWERS = (Claimed, ByTorch, Outranked, NodesMet, Waiting, MeetingRefused, Notice, NodesFinished)
