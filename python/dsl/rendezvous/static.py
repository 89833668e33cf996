"""Where the workers of ``dslrun`` meet, and what their job is called: torchrun's rendezvous, without torch.

A job is of one of three kinds. *Alone*: one node and no wish where to meet (``--standalone``, or nothing of
it said). *Static*: the nodes, the place of this one and the meeting point are named. *Dynamic*: the nodes
would find each other through a store; with a single node there is nobody to find.
"""

from __future__ import annotations

from dsl.errors import OptionError, PortError, UnsupportedError
from dsl.model import DEFAULT_MASTER_PORT, Notice
from dsl.rendezvous.port import choose_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.machine.names import Names
    from dsl.machine.ports import Ports
    from dsl.model import TorchRequest

LOCAL_ADDRESS = "127.0.0.1"
STATIC = "static"
BACKENDS = (STATIC, "c10d", "etcd", "etcd-v2")
MOST_NODES = 1 << 22
"""No job has more; it bounds what a slip can make us compute."""


def is_alone(request: TorchRequest) -> bool:
    """Whether this is a job of one node that meets nobody, at a port of its choice."""
    nothing_said = (
        request.rdzv_backend == STATIC and not request.rdzv_endpoint and request.master_port is None
    )
    return request.standalone or (nothing_said and request.max_nodes == 1)


def node_count(request: TorchRequest) -> int:
    """Number of nodes of the job."""
    return 1 if request.standalone else request.max_nodes


def check_meeting(request: TorchRequest) -> None:
    """Refuse nodes, a backend or settings that make no sense.

    Raises:
        OptionError: says what is wrong, and how it should be.
        UnsupportedError: the nodes would have to find each other.
    """
    least, most = request.min_nodes, request.max_nodes
    if not 1 <= least <= most:
        raise OptionError(f"--nnodes {least}:{most}: MIN must be at least 1, and MAX at least MIN")
    if most > MOST_NODES:
        raise OptionError(f"--nnodes {most}: at most {MOST_NODES} nodes can take part")
    if request.rdzv_backend not in BACKENDS:
        raise OptionError(f"--rdzv-backend {request.rdzv_backend!r}: expected one of {', '.join(BACKENDS)}")
    _check_settings(request.rdzv_conf)
    if request.rdzv_endpoint:
        parse_endpoint(request.rdzv_endpoint)
    if request.standalone:
        return
    if request.rdzv_backend != STATIC and most > 1:
        raise UnsupportedError(
            f"--rdzv-backend {request.rdzv_backend}: nodes that find each other are not in this version of "
            "dsl; name them with --nnodes N --node-rank RANK --master-addr ADDRESS --master-port PORT"
        )
    if _is_static(request) and not 0 <= request.node_rank < most:
        places = "it must be 0" if most == 1 else f"it must be 0 to {most - 1}"
        raise OptionError(
            f"--node-rank {request.node_rank}: with {most} node{'s' if most > 1 else ''} {places}"
        )


def _is_static(request: TorchRequest) -> bool:
    return request.rdzv_backend == STATIC and not is_alone(request)


def _check_settings(text: str) -> None:
    for item in text.split(",") if text.strip() else ():
        key, _, value = item.partition("=")
        if not key.strip() or not value.strip():
            raise OptionError(f"--rdzv-conf {text!r}: expected KEY=VALUE,... but there is {item.strip()!r}")


def meeting_point(request: TorchRequest) -> tuple[str, int | None]:
    """Address and port where the workers meet; port None: a free one is chosen for each attempt.

    Raises:
        OptionError: the meeting point of a static job is not written as it must be.
        PortError: its port is none, or would have to be chosen though several nodes have to know it.
    """
    if not _is_static(request):
        return request.local_addr or LOCAL_ADDRESS, None
    if request.rdzv_endpoint:
        address, port = parse_endpoint(request.rdzv_endpoint)
        if port is None:
            raise OptionError(f"--rdzv-endpoint {request.rdzv_endpoint!r}: the port is missing, HOST:PORT")
    else:
        address = _bare(request.master_addr.strip())
        if not _is_host(address):
            raise OptionError(f"--master-addr {request.master_addr!r}: expected a host name or an address")
        port = DEFAULT_MASTER_PORT if request.master_port is None else request.master_port
    if not 0 <= port <= 65535:
        raise PortError(f"--master-port {port} is not a port, expected 1 to 65535, or 0 for any free one")
    if port == 0 and request.max_nodes > 1:
        raise PortError(f"port 0 of {address}: a job on several nodes needs the same port on each, name one")
    return address, port or None


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """``HOST:PORT`` or ``HOST``; an IPv6 address may stand in brackets, and must if no port follows.

    Raises:
        OptionError: it is neither.
    """
    host, port = text.strip(), None
    if not host.endswith("]"):
        head, colon, digits = host.rpartition(":")
        if colon:
            is_port = digits.isascii() and digits.isdecimal() and len(digits) <= 5 and int(digits) <= 65535
            host, port = head, int(digits) if is_port else -1
    if port == -1 or not _is_host(_bare(host)):
        raise OptionError(f"--rdzv-endpoint {text!r}: expected HOST:PORT, with a port below 65536")
    return _bare(host), port


def _bare(host: str) -> str:
    return host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host


def _is_host(text: str) -> bool:
    # A zone (fe80::1%eth0) belongs to an address.
    return text.strip(":") != "" and all(letter.isalnum() or letter in "_.:-%" for letter in text)


def attempt_port(asked: int | None, request: TorchRequest, probe: Ports, *, again: bool = False) -> int:
    """The port of one attempt: ``asked`` if it is free here, or a free one if None.

    ``again``: the job has run at ``asked`` before, so it does not end because somebody else has taken the
    port since, unless other nodes have to know it.

    Raises:
        PortError: the port that was asked for is taken, or there is no free one.
    """
    shared = node_count(request) > 1
    if asked is None or (again and not shared and not probe.is_free(asked)):
        return probe.pick()
    # Rank 0 listens on the first node only: elsewhere the port may well be in use.
    if shared and request.node_rank != 0:
        return asked
    return choose_port(asked, shared=shared, ports=probe)[0]


def run_id(request: TorchRequest, names: Names) -> str:
    """The user's name of the job, or one that no other job has."""
    if request.rdzv_id and not is_alone(request):
        return request.rdzv_id
    digits = names.random() + names.random()
    return "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]])


def meeting_notices(request: TorchRequest) -> list[Notice]:
    """What the user has asked for and does not get, in words."""
    texts = []
    least, most = request.min_nodes, request.max_nodes
    if request.standalone and most != 1:
        texts.append("--nnodes has no effect with --standalone, which is one node")
    elif least != most:
        texts.append(
            f"--nnodes {least}:{most}: nodes cannot join later, the job starts when all {most} are there"
        )
    if not _is_static(request):
        kind = f"--rdzv-backend {request.rdzv_backend}"
        if is_alone(request):
            kind = "--standalone" if request.standalone else "one node"
        if request.node_rank != 0:
            texts.append(f"--node-rank has no effect with {kind}")
        if request.master_port is not None:
            texts.append(f"--master-port has no effect with {kind}")
    return [Notice("warning", text) for text in texts]
