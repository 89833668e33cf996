"""Where the workers of ``dslrun`` meet, and what their job is called: torchrun's rendezvous, without torch.

There are three kinds of jobs. *Alone*: one node, and no meeting point is named (``--standalone``, or no
option about it). *Static*: options name the number of nodes, the rank of this node and the meeting point.
*Dynamic*: the nodes find each other through a store. If the backend is one of torch's stores and only one
node can take part, the job is alone.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.errors import OptionError, PortError
from dsl.model.job import MeetingKind, MeetingPoint, Notice
from dsl.model.request import DEFAULT_MASTER_PORT, MeetingRequest
from dsl.words import LAST_PORT, MOST_NODES, counted, has_odd_colon, parse_number, quote, shorten, with_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl.model.job import Pairs

    NodeRange = tuple[int, int]
    """The least and the most nodes."""

LOCAL_ADDRESS = "127.0.0.1"
STATIC = "static"
STATIC_RUN_ID = "none"
"""The usual name of a job whose nodes are named by options, as torchrun has it."""
C10D = "c10d"
STORES = (C10D, "etcd", "etcd-v2")
"""torch's backends beside ``static``. Packages register others in the group ``torchrun.handlers``."""
CONDUCTED = (STATIC, C10D, "etcd-v2")
"""The backends with which one node decides for all."""


def meeting_kind(asked: MeetingRequest, nodes: NodeRange) -> MeetingKind:
    """How the nodes meet. The head of this module describes the kinds."""
    if asked.standalone:
        return "alone"
    if asked.backend != STATIC:
        return "dynamic" if nodes[1] > 1 or asked.backend not in STORES else "alone"
    is_named = asked.endpoint != "" or asked.master_port is not None
    return "static" if is_named or nodes[1] > 1 else "alone"


def check_meeting(asked: MeetingRequest, nodes: NodeRange, spares: int = 0) -> None:
    """Refuse nodes, spares, a backend or settings that make no sense.

    Raises:
        OptionError: the text says what is wrong, and what is expected.
    """
    least, most = nodes
    if not 1 <= least <= most:
        raise OptionError(f"--nnodes {least}:{most}: MIN must be at least 1, and MAX at least MIN")
    if most > MOST_NODES:
        raise OptionError(f"--nnodes {most}: at most {MOST_NODES} nodes can take part")
    if not 0 <= spares <= MOST_NODES - most:
        raise OptionError(f"--spares {spares}: it must be 0 to {MOST_NODES - most}")
    if not asked.backend.strip():
        raise OptionError(
            f"--rdzv-backend {quote(asked.backend)}: expected one of {STATIC}, {', '.join(STORES)}"
        )
    settings = parse_settings(asked.settings)
    # The endpoint of a file store is a path, and other backends have endpoints of their own kind.
    is_file = asked.backend == C10D and dict(settings).get("store_type", "").strip().lower() == "file"
    if asked.endpoint and not is_file and asked.backend in (STATIC, *STORES):
        parse_endpoint(asked.endpoint)
    kind = meeting_kind(asked, nodes)
    if settings:
        from dsl.rendezvous.settings import check_settings

        problem = check_settings(_backend(asked), settings, keys_only=kind != "dynamic")
        if problem:
            raise OptionError(f"--rdzv-conf {quote(asked.settings)}: {problem}")
    if spares and asked.backend not in CONDUCTED:
        why = "its nodes meet by torch's own rendezvous, where no node knows which one failed first"
        raise OptionError(f"--spares cannot be used with --rdzv-backend {asked.backend}: {why}")
    if spares and (kind == "alone" or most == 1):
        raise OptionError("--spares needs a job of several nodes: give --nnodes, and where they meet")
    last = most + spares - 1
    if kind == "static" and not 0 <= (asked.node_rank or 0) <= last:
        count = counted(most, "node") + f" and {counted(spares, 'spare')}" * bool(spares)
        places = f"it must be 0 to {last}" if last else "it must be 0"
        raise OptionError(f"--node-rank {asked.node_rank}: with {count} {places}")


def _backend(asked: MeetingRequest) -> str:
    return C10D if asked.standalone else asked.backend


def parse_settings(text: str) -> tuple[tuple[str, str], ...]:
    """Read ``KEY=VALUE,...`` as pairs.

    Raises:
        OptionError: the text has another form.
    """
    pairs = []
    for item in text.split(",") if text.strip() else ():
        key, _, value = item.partition("=")
        if not key.strip() or not value.strip():
            raise OptionError(
                f"--rdzv-conf {quote(text)}: expected KEY=VALUE,... but there is {quote(item.strip())}"
            )
        pairs.append((key.strip(), value.strip()))
    return tuple(pairs)


def meeting_point(asked: MeetingRequest, nodes: NodeRange, spares: int = 0) -> MeetingPoint:
    """Where the workers meet.

    Raises:
        OptionError: the meeting point of a static job is malformed.
        PortError: its port is out of range, or is 0 although several nodes need to know it.
    """
    kind = meeting_kind(asked, nodes)
    if kind == "dynamic":
        return MeetingPoint(
            kind,
            "",
            None,
            backend=asked.backend,
            endpoint=asked.endpoint.strip(),
            settings=parse_settings(asked.settings),
            least_nodes=nodes[0],
            spares=spares,
            local_address=asked.local_addr or "",
        )
    if kind == "alone":
        return MeetingPoint(kind, asked.local_addr or LOCAL_ADDRESS, 0)
    if asked.endpoint:
        address, port = parse_endpoint(asked.endpoint)
        if port is None:
            raise OptionError(f"--rdzv-endpoint {quote(asked.endpoint)}: the port is missing, HOST:PORT")
    else:
        master = LOCAL_ADDRESS if asked.master_addr is None else asked.master_addr
        address = _bare(master.strip())
        if not _is_host(address):
            raise OptionError(f"--master-addr {quote(master)}: expected a host name or an address")
        port = DEFAULT_MASTER_PORT if asked.master_port is None else asked.master_port
    if not 0 <= port <= LAST_PORT:
        raise PortError(f"--master-port {port} is not a port, expected 1 to 65535, or 0 for any free one")
    if nodes[1] == 1:
        return MeetingPoint(kind, address, port)
    agreed = agreed_point(address, port, nodes[1], parse_settings(asked.settings))
    return replace(agreed, spares=spares, local_address=asked.local_addr or "")


def agreed_point(address: str, port: int | None, count: int, settings: Pairs) -> MeetingPoint:
    """Where ``count`` nodes meet that know this address and port, and their places.

    Raises:
        PortError: the port is 0, but all nodes need to know it.
    """
    port = DEFAULT_MASTER_PORT if port is None else port
    if port == 0:
        raise PortError(f"port 0 of {address}: a job on several nodes needs the same port on each, name one")
    address = _bare(address)
    return MeetingPoint(
        "static",
        address,
        port,
        backend=STATIC,
        endpoint=with_port(address, port),
        settings=settings,
        least_nodes=count,
    )


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Read ``HOST:PORT`` or ``HOST``. An IPv6 address may have brackets, and needs them if no port follows.

    Raises:
        OptionError: the text is neither.
    """
    host, port = text.strip(), None
    is_port = True
    if ":" in host and not host.endswith("]"):
        host, _, digits = host.rpartition(":")
        port = parse_number(digits)
        is_port = port is not None and port <= LAST_PORT
    if not is_port or not _is_host(_bare(host)):
        raise OptionError(f"--rdzv-endpoint {quote(text)}: expected HOST:PORT, with a port below 65536")
    return _bare(host), port


def _bare(host: str) -> str:
    return host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host


def _is_host(text: str) -> bool:
    # A zone (fe80::1%eth0) belongs to an address.
    is_name = text.strip(":") != "" and all(letter.isalnum() or letter in "_.:-%" for letter in text)
    return is_name and not has_odd_colon(text)


def run_id(asked: MeetingRequest, nodes: NodeRange, random: Callable[[], str]) -> str:
    """The user's name of the job, or a name that no other job has.

    ``random`` returns 16 hexadecimal digits that cannot be guessed.
    """
    is_named = asked.backend != STATIC or meeting_kind(asked, nodes) == "static"
    if asked.run_id and is_named and not asked.standalone:
        return asked.run_id
    digits = random() + random()
    return "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]])


def meeting_notices(asked: MeetingRequest, nodes: NodeRange) -> list[Notice]:
    """Warnings about what the user asked for and does not get."""
    texts = []
    least, most = nodes
    kind = meeting_kind(asked, nodes)
    if asked.standalone and most != 1:
        texts.append("--nnodes has no effect with --standalone, which is one node")
    elif least != most and kind != "dynamic":
        texts.append(
            f"--nnodes {least}:{most}: nodes cannot join later with --rdzv-backend {STATIC}, "
            f"the job starts when all {most} are there"
        )
    if kind != "static":
        way = "one node" if asked.backend == STATIC else f"--rdzv-backend {asked.backend}"
        given = {"--node-rank": asked.node_rank or None, "--master-port": asked.master_port}
        texts += [
            f"{option} has no effect with {'--standalone' if asked.standalone else way}"
            for option, value in given.items()
            if value is not None
        ]
    if settings := parse_settings(asked.settings):
        from dsl.rendezvous.settings import unknown_settings

        texts += [
            f"--rdzv-conf {shorten(key)} has no effect: backend {_backend(asked)} has no such setting"
            for key in unknown_settings(_backend(asked), settings)
        ]
    return [Notice("warning", text) for text in texts]
