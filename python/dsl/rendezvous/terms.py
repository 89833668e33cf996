"""What a node with a fixed place knows from the start: its place, the meeting point, how long it waits."""

from __future__ import annotations

from dsl._record import record
from dsl.errors import OptionError
from dsl.lists import LAST_PORT, MOST_NODES, MOST_SECONDS, parse_number, parse_seconds, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.rendezvous.delegate_messages import Open

TIMEOUT_S = 600.0
"""How long the nodes wait for each other before the first round, as torch's static rendezvous does."""

SIGN_OF_LIFE_S, MOST_MISSED = 5.0, 3
"""A node that is silent for the product of these two is lost. The values are torch's."""

LONGEST_COMMAND = 1500
"""Most characters of a command in a message."""

BEATS = 6
"""Signs of life that each side sends within the time of silence."""


@record
class Terms:
    """How a node takes part."""

    node_count: int
    """Number of nodes."""
    node_rank: int
    """Place of this node."""
    address: str
    """Address of node 0, without brackets."""
    port: int
    """The port there."""
    run_id: str
    """Name of the job."""
    host: str
    """Name of this node in messages."""
    timeout_s: float
    """How long this node waits for the first round."""
    silence_s: float
    """After this many seconds of silence the other side is lost."""
    command: tuple[str, ...] = ()
    """See `dsl.rendezvous.delegate_messages.Open`."""
    rank_at: int = 0

    @property
    def meeting_point(self) -> str:
        """Address and port as users write them."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def command_of(self, place: int) -> str:
        """What to type for another node; empty if that does not fit on a line."""
        from shlex import join

        words = (*self.command[: self.rank_at], "--node-rank", str(place), *self.command[self.rank_at :])
        line = join(words)
        return line if self.command and line.isprintable() and len(line) <= LONGEST_COMMAND else ""

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life."""
        return self.silence_s / BEATS


def terms_of(order: Open) -> Terms:
    """Terms from the agent's order.

    Raises:
        OptionError: a setting is not a number, or the place or the meeting point is not valid.
    """
    settings = dict(order.settings)
    host, _, digits = order.endpoint.rpartition(":")
    port = parse_number(digits)
    node_rank = parse_number(settings.get("node_rank", ""))
    if not host or port is None or not 0 < port <= LAST_PORT:
        raise OptionError(f"--rdzv-endpoint {quote(order.endpoint)}: expected HOST:PORT")
    if node_rank is None or not node_rank < order.max_nodes <= MOST_NODES:
        raise OptionError(
            f"--node-rank {node_rank}: with {order.max_nodes} nodes it must be 0 to {order.max_nodes - 1}"
        )
    return Terms(
        node_count=order.max_nodes,
        node_rank=node_rank,
        address=host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host,
        port=port,
        run_id=order.run_id,
        host=order.host,
        timeout_s=_seconds(settings, "timeout", TIMEOUT_S),
        silence_s=_seconds(settings, "keep_alive_interval", SIGN_OF_LIFE_S)
        * _seconds(settings, "keep_alive_max_attempt", MOST_MISSED),
        command=order.command,
        rank_at=order.rank_at,
    )


def _seconds(settings: dict[str, str], name: str, default: float) -> float:
    text = settings.get(name)
    if text is None:
        return default
    value = parse_seconds(text)
    if value is None or not 0 < value <= MOST_SECONDS:
        raise OptionError(f"--rdzv-conf {name}={quote(text)}: expected a number above 0")
    return value
