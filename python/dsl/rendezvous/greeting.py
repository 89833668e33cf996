"""How delegates of nodes with fixed places introduce themselves: first lines, and signs of life.

A node calls at the agreed port and sends a `Hello`. Node 0 gives it a token and sends it on to another port,
where the node shows the token. From then on both sides write lines of `dsl.rendezvous.delegate_messages`,
and signs of life. Each line of this module is a JSON object with the key ``circle``.
"""

from __future__ import annotations

from dsl._record import record
from dsl.lists import quote
from dsl.model.request import Count, Shown
from dsl.rendezvous.delegate_messages import make

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LONGEST_GREETING = 4096
"""Bytes of a line from a caller that has no place yet."""

LONGEST_HOST = 255
OWN = b'{"circle":'
ALIVE = OWN + b'"alive"}\n'
TORCH_STORE = b"\x00\xce\xf7\x85\x3c"
"""First bytes that a client of torch's store sends."""


@record
class Hello:
    """What a calling node says about itself."""

    dsl: Shown
    """Its version of dsl."""
    run_id: str
    """Name of its job."""
    nodes: Count
    """Number of nodes of the job."""
    place: Count
    """Its node rank."""
    host: Shown
    """Its name for users."""
    token: str = ""
    """The token that node 0 gave it; empty: none yet."""


def write(kind: str, **fields: object) -> bytes:
    """Write a line with its line feed."""
    from json import dumps

    return dumps({"circle": kind, **fields}, separators=(",", ":")).encode("ascii") + b"\n"


def read(line: bytes) -> Mapping[str, Any]:
    """Read a line; empty for any other line."""
    from json import loads

    try:
        found = loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("circle"), str) else {}


def hello_to_line(hello: Hello) -> bytes:
    """Write the first line of a node."""
    return write("hello", **{name: getattr(hello, name) for name in hello.__match_args__})


def hello_from_line(line: bytes) -> Hello | None:
    """Read the first line of a node; None for any other line."""
    found = dict(read(line))
    if found.pop("circle", None) != "hello":
        return None
    try:
        hello: Hello = make(Hello, found)
    except ValueError:
        return None
    return hello if len(hello.host) <= LONGEST_HOST else None


def objection(hello: Hello, ours: Hello) -> str:
    """Why a node that calls cannot take part in our job; empty: it can. The place may still be taken.

    ``ours`` is our own `Hello`. Only our user sees the text: it would tell a caller what to say.
    """
    if hello.dsl != ours.dsl:
        return (
            f"it runs dsl {hello.dsl[:40]}, node 0 runs dsl {ours.dsl}: install the same version on all nodes"
        )
    if hello.run_id != ours.run_id:
        return f"its --rdzv-id is {quote(hello.run_id)}, that of node 0 is {quote(ours.run_id)}"
    if hello.nodes != ours.nodes:
        return f"its --nnodes is {hello.nodes}, that of node 0 is {ours.nodes}"
    if not 0 < hello.place < ours.nodes:
        return f"its --node-rank is {hello.place}, with {ours.nodes} nodes it must be 1 to {ours.nodes - 1}"
    return ""


def stranger(data: bytes) -> str:
    """What a caller seems to be that sent this instead of a greeting."""
    return "a torchrun, or a worker of torch" if data[: len(TORCH_STORE)] == TORCH_STORE else "no dslrun"
