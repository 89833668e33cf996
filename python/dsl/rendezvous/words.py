"""What an agent and its delegate tell each other: records, and their lines.

The delegate (`dsl.rendezvous.delegate`) takes part in torch's rendezvous for its agent. They talk over a pair
of sockets: one JSON object a line, in ASCII. The agent's objects have ``do``, those of the delegate ``is``.

The first order is `Open`. Each `Meet` is answered with `Met` or `Refused`, a `Finish` with `Finished`. An
`Open` that cannot be served is answered with `Refused`, too; after that the delegate waits for another order.
All else comes when it happens. Whoever goes closes its end. A delegate whose agent has gone leaves and ends.
"""

from __future__ import annotations

from dsl._record import record
from dsl.errors import JobFormatError, RendezvousError
from dsl.model.codec import fields_from_plain, from_json, to_json, to_plain
from dsl.model.request import Code, Count, Port, RankOrNone, Shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Annotated, Any, Literal, TypeAlias

    Order: TypeAlias = "Open | Meet | Failing | Leave | Finish | Fail"
    Answer: TypeAlias = "Met | Refused | Changed | PeerFailed | Remark | Finished"

MOST_BYTES = 1 << 20
"""A line that is longer is damaged."""

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
    """torch's name of what holds the store, such as ``c10d``."""
    endpoint: str
    """Where that is: HOST, HOST:PORT or empty, as the backend reads it."""
    run_id: str
    """Name of the job."""
    min_nodes: Count
    """The job runs with so many nodes."""
    max_nodes: Count
    """It takes no more."""
    local_addr: str | None
    """By which the others reach this node, and by which the nodes are ordered; None: its name."""
    settings: tuple[tuple[str, str], ...]
    """Settings of the backend."""
    host: Shown
    """What the user calls this node in messages."""
    command: tuple[str, ...] = ()
    """The command of this node without its place, for messages; empty: there is none."""
    rank_at: Count = 0
    """Before this word of it the place of a node belongs."""


@record
class Meet:
    """agent to delegate: join the next round."""

    local_world_size: Size
    """Number of workers of this node."""
    role: str
    """What they are called."""
    restarts: Count
    """Restarts that count and that this node knows of, its own failure included."""
    reason: Reason
    """Why it joins, as far as it knows."""


@record
class Failing:
    """agent to delegate: a worker failed. Tell the other nodes at once; a restart may follow."""

    rank: RankOrNone
    """Global rank; -1: it has none."""
    code: Code
    """Its exit code, or 128 + the signal."""
    line: Shown
    """One line for the users of the other nodes."""


@record
class Leave:
    """agent to delegate: leave for good, and end. The job goes on without this node."""


@record
class Finish:
    """agent to delegate: all workers of this node ended with 0. Wait for the other nodes."""


@record
class Fail:
    """agent to delegate: the job is over, a worker failed and is not started again. Close it, and end."""

    rank: RankOrNone
    """Global rank; -1: it has none."""
    code: Code
    """Its exit code, or 128 + the signal."""
    line: Shown
    """One line for the users of the other nodes."""


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
    """Rank of this node's first worker among those of its role."""
    role_world_size: Count
    """Number of workers of that role over all nodes."""
    address: Shown
    """Where rank 0 listens."""
    port: Port
    """Port there."""
    restarts: Count
    """Restarts that count: the most that any node knows of."""
    reason: Reason
    """Why there is this round: a failure anywhere comes before all else."""
    hosts: tuple[Shown, ...]
    """Names of the nodes, by node rank; a node that is not ours has the address that torch knows."""
    nodes: tuple[str, ...]
    """What tells the nodes apart, by node rank: hosts may have one name. A node keeps it in every round."""


@record
class Refused:
    """delegate to agent: the nodes do not meet."""

    kind: RefusalKind
    """What stands in the way."""
    text: Shown
    """One line for the user: what, where, how to mend it."""


@record
class Changed:
    """delegate to agent: who takes part has changed. Wire name ``membership``."""

    node_count: Count
    """Nodes of the present round that are left."""
    waiting: Count
    """Nodes that wait for the next one."""
    closed: bool
    """No round can follow."""
    left: tuple[Shown, ...]
    """Names of the nodes that have left the round, by themselves or because nothing is heard of them."""
    has_dropped_us: bool = False
    """This node is the one that is gone: the others have missed it, and go on."""


@record
class PeerFailed:
    """delegate to agent: a worker of another node failed. Wire name ``peer_failed``."""

    host: Shown
    """Name of that node."""
    rank: RankOrNone
    """Global rank; -1: it has none."""
    code: Code
    """Its exit code, or 128 + the signal."""
    line: Shown
    """What that node says of it."""
    final: bool
    """The job is over."""


@record
class Remark:
    """delegate to agent: something the user should read. Wire name ``notice``."""

    level: str
    """``info`` or ``warning``."""
    text: Shown
    """One line."""


@record
class Finished:
    """delegate to agent: the other nodes have finished, too, or cannot be waited for."""


ORDERS: dict[str, type] = {
    "open": Open,
    "meet": Meet,
    "failing": Failing,
    "leave": Leave,
    "finish": Finish,
    "fail": Fail,
}
ANSWERS: dict[str, type] = {
    "met": Met,
    "refused": Refused,
    "membership": Changed,
    "peer_failed": PeerFailed,
    "notice": Remark,
    "finished": Finished,
}


def order_to_line(order: Order) -> bytes:
    """Write a line of the agent, its end included."""
    return _write("do", ORDERS, order)


def order_from_line(line: bytes) -> Order:
    """Read a line of the agent.

    Raises:
        RendezvousError: it is none.
    """
    found: Order = _read("do", ORDERS, line, "an order")
    return found


def answer_to_line(answer: Answer) -> bytes:
    """Write a line of the delegate, its end included."""
    return _write("is", ANSWERS, answer)


def answer_from_line(line: bytes) -> Answer:
    """Read a line of the delegate.

    Raises:
        RendezvousError: it is none.
    """
    found: Answer = _read("is", ANSWERS, line, "an answer")
    return found


class Lines:
    """Cuts what arrives into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that the data ends, without their ends.

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
    """A record of what somebody else has written, every field within its bounds.

    Raises:
        JobFormatError: which field is wrong.
    """
    made: Any = fields_from_plain(found, kind)
    if isinstance(made, Met):
        counts = {len(made.local_world_sizes), len(made.hosts), len(made.nodes)}
        if counts != {len(made.hosts)} or made.node_rank >= len(made.hosts):
            raise JobFormatError("the nodes of Met do not go together")
    return made
