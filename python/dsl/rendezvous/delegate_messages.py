"""What an agent orders its delegate to do, and what the delegate may answer.

The two talk over a pair of sockets, by `dsl.model.codec`. The first order is `Open`. The delegate answers
each `Meet` with `NodesMet` or `MeetingRefused`, and a `Finish` with `NodesFinished`. It answers an `Open`
that it cannot serve with `MeetingRefused`, too, and then waits for the end. All other events come when
something happens. A side that goes closes its end. A delegate whose agent has gone leaves and ends.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.model.job import MeetingPoint, Notice, RestartReason
from dsl.model.nodes import MeetingRefused, NodesFinished, NodesMet, PeerFailure
from dsl.model.outcome import MembershipChanged
from dsl.model.request import Count, Shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Annotated, TypeAlias

# Text, as in `dsl.model.request`.
Size: TypeAlias = "Annotated[int, 1, 65_536]"
Order: TypeAlias = "Open | Meet | PeerFailure | Leave | Finish"
Answer: TypeAlias = "NodesMet | MeetingRefused | MembershipChanged | PeerFailure | Notice | NodesFinished"


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


class Meet(Record):
    """Join the next round."""

    local_world_size: Size
    """Number of workers of this node."""
    role: str
    """The role of these workers."""
    restarts: Count
    """Counted restarts that this node knows of, including its own failure."""
    reason: RestartReason
    """Why this node joins, as far as it knows."""


class Leave(Record):
    """Leave for good, and end. The job goes on without this node."""


class Finish(Record):
    """All workers of this node ended with 0. Wait for the other nodes."""


ORDERS = (Open, Meet, PeerFailure, Leave, Finish)
"""A `PeerFailure` goes to the other nodes at once. If it is final, the delegate closes the job, and ends."""
ANSWERS = (NodesMet, MeetingRefused, MembershipChanged, PeerFailure, Notice, NodesFinished)
