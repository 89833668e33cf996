"""Messages between an agent and its delegate: records, and their lines.

The delegate (`dsl.rendezvous.delegate`) takes part in torch's rendezvous for its agent. They talk over a pair
of sockets: one JSON object per line, in ASCII. The agent's objects have the key ``do``, the delegate's have
``is``.

The first order is `Open`. The delegate answers each `Meet` with `Met` or `NotMet`, and a `Finish` with
`Finished`. It answers an `Open` that it cannot serve with `NotMet`, too, and then waits for another order.
All other messages come when something happens. A side that goes closes its end. A delegate whose agent has
gone leaves and ends.
"""

from __future__ import annotations

from dsl._record import record
from dsl.errors import JobFormatError, RendezvousError
from dsl.model.codec import fields_from_plain, from_json, to_json, to_plain
from dsl.model.judgement import Failed
from dsl.model.request import Code, Count, Port, RankOrNone, Shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Annotated, Any, Literal, TypeAlias

    Order: TypeAlias = "Open | Meet | FailingRank | Leave | Finish | Fail"
    Answer: TypeAlias = "Met | NotMet | Changed | PeerFailed | Remark | Finished"

MOST_BYTES = 1 << 20
"""A longer line counts as damaged."""

# Text, as in `dsl.model.request`.
Reason: TypeAlias = "Literal['start', 'failure', 'membership']"
RefusalKind: TypeAlias = (
    "Literal['closed', 'unneeded', 'timeout', 'connection', 'settings', 'clock', 'other']"
)
Size: TypeAlias = "Annotated[int, 1, 65_536]"


@record
class Open:
    """agent to delegate, first: where the nodes meet."""

    backend: str
    """torch's name of the backend that holds the store, such as ``c10d``."""
    endpoint: str
    """Where the store is: HOST, HOST:PORT or empty, as the backend reads it."""
    run_id: str
    """Name of the job."""
    min_nodes: Count
    """The job runs with at least this many nodes."""
    max_nodes: Count
    """The job takes at most this many nodes."""
    local_addr: str | None
    """The address by which the others reach this node, and by which nodes are ordered; None: its name."""
    settings: tuple[tuple[str, str], ...]
    """Settings of the backend."""
    host: Shown
    """This node's name in messages."""


@record
class Meet:
    """agent to delegate: join the next round."""

    local_world_size: Size
    """Number of workers of this node."""
    role: str
    """The role of these workers."""
    restarts: Count
    """Counted restarts that this node knows of, including its own failure."""
    reason: Reason
    """Why this node joins, as far as it knows."""


@record
class FailingRank:
    """agent to delegate: a worker failed. Tell the other nodes at once; a restart may follow."""

    rank: RankOrNone
    """Global rank; -1: it has none."""
    code: Code
    """Its exit code, or 128 + the signal."""
    failed: Failed | None = None
    """How the worker failed; None: no worker is named."""


@record
class Leave:
    """agent to delegate: leave for good, and end. The job goes on without this node."""


@record
class Finish:
    """agent to delegate: all workers of this node ended with 0. Wait for the other nodes."""


@record
class Fail:
    """agent to delegate: the job is over, a worker failed and is not restarted. Close the job, and end."""

    rank: RankOrNone
    """Global rank; -1: it has none."""
    code: Code
    """Its exit code, or 128 + the signal."""
    failed: Failed | None = None
    """How the worker failed; None: no worker is named."""


@record
class Met:
    """delegate to agent: the round is complete."""

    round: Count
    """Number of the round, from 0."""
    node_rank: Count
    """Place of this node."""
    local_world_sizes: tuple[Size, ...]
    """Number of workers of each node, by node rank."""
    first_role_rank: Count
    """Rank of this node's first worker within its role."""
    role_world_size: Count
    """Number of workers of that role on all nodes."""
    address: Shown
    """Where rank 0 listens."""
    port: Port
    """Port there."""
    restarts: Count
    """Counted restarts: the most that any node knows of."""
    reason: Reason
    """Why there is this round. A failure on any node comes before other reasons."""
    hosts: tuple[Shown, ...]
    """Names of the nodes, by node rank; a node that is not ours has the address that torch knows."""
    nodes: tuple[str, ...]
    """Tells the nodes apart, by node rank: hosts may share a name. A node keeps its text in every round."""


@record
class NotMet:
    """delegate to agent: the nodes do not meet."""

    kind: RefusalKind
    """What stands in the way."""
    text: Shown
    """One line for the user: what, where, how to mend it."""


@record
class Changed:
    """delegate to agent: the membership has changed. Wire name ``membership``."""

    node_count: Count
    """Nodes of the present round that are left."""
    waiting: Count
    """Nodes that wait for the next round."""
    closed: bool
    """No round can follow."""
    left: tuple[Shown, ...]
    """Names of the nodes that have left the round, by themselves or by falling silent."""
    has_dropped_us: bool = False
    """The others take this node for gone, and go on without it."""


@record
class PeerFailed:
    """delegate to agent: a worker of another node failed. Wire name ``peer_failed``."""

    host: Shown
    """Name of that node."""
    rank: RankOrNone
    """Global rank; -1: it has none."""
    code: Code
    """Its exit code, or 128 + the signal."""
    failed: Failed | None
    """How the worker failed; None: that node does not name one."""
    final: bool
    """The job is over."""


@record
class Remark:
    """delegate to agent: a text that the user should read. Wire name ``notice``."""

    level: str
    """``info`` or ``warning``."""
    text: Shown
    """One line."""


@record
class Finished:
    """delegate to agent: the other nodes have finished, too, or we cannot wait for them."""


ORDERS: dict[str, type] = {
    "open": Open,
    "meet": Meet,
    "failing": FailingRank,
    "leave": Leave,
    "finish": Finish,
    "fail": Fail,
}
ANSWERS: dict[str, type] = {
    "met": Met,
    "refused": NotMet,
    "membership": Changed,
    "peer_failed": PeerFailed,
    "notice": Remark,
    "finished": Finished,
}


def order_to_line(order: Order) -> bytes:
    """Write a line of the agent with its line feed."""
    return _write("do", ORDERS, order)


def order_from_line(line: bytes) -> Order:
    """Read a line of the agent.

    Raises:
        RendezvousError: the line is damaged.
    """
    found: Order = _read("do", ORDERS, line, "an order")
    return found


def answer_to_line(answer: Answer) -> bytes:
    """Write a line of the delegate with its line feed."""
    return _write("is", ANSWERS, answer)


def answer_from_line(line: bytes) -> Answer:
    """Read a line of the delegate.

    Raises:
        RendezvousError: the line is damaged.
    """
    found: Answer = _read("is", ANSWERS, line, "an answer")
    return found


class Lines:
    """Cuts incoming bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, without their line feeds.

        Raises:
            RendezvousError: a line is longer than `MOST_BYTES`.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES or any(len(line) > MOST_BYTES for line in whole):
            raise RendezvousError(f"the delegate of the rendezvous: a line is longer than {MOST_BYTES} bytes")
        return whole


def _write(key: str, table: dict[str, type], message: Any) -> bytes:
    name = next(name for name, kind in table.items() if kind is type(message))
    (fields,) = to_plain(message).values()
    return to_json({key: name, **fields}) + b"\n"


def _read(key: str, table: dict[str, type], line: bytes, what: str) -> Any:
    try:
        found = from_json(line)
        name = found.pop(key, None) if isinstance(found, dict) else None
        kind = table.get(name) if isinstance(name, str) else None
        if kind is not None:
            return make(kind, found)
        problem = f"it says {name!r:.80}"
    except JobFormatError as error:
        problem = str(error)
    raise RendezvousError(f"the delegate of the rendezvous: {what} is damaged: {problem}")


def make(kind: type, found: Mapping[str, Any]) -> Any:
    """A record from what another process wrote, with every field within its bounds.

    Raises:
        JobFormatError: which field is wrong.
    """
    made: Any = fields_from_plain(found, kind)
    if isinstance(made, Met):
        counts = {len(made.local_world_sizes), len(made.hosts), len(made.nodes)}
        if counts != {len(made.hosts)} or made.node_rank >= len(made.hosts):
            raise JobFormatError("the nodes of Met do not go together")
    return made
