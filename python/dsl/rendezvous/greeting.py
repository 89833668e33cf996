"""How the delegates of nodes with fixed places get to know each other: first lines, and signs of life.

A node calls at the port that all have agreed on, and says who it is. It is sent on to another port, where it
shows the word that it was given. From there on both sides write lines of `dsl.rendezvous.words`, and signs of
life. Each line here is a JSON object with the key ``circle``.
"""

from __future__ import annotations

from dsl._record import record
from dsl.lists import quote
from dsl.model.request import Count, Shown
from dsl.rendezvous.words import make

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LONGEST_GREETING = 4096
"""Bytes of a line of somebody who has no place yet."""

LONGEST_HOST = 255
OWN = b'{"circle":'
ALIVE = OWN + b'"alive"}\n'
TORCH_STORE = b"\x00\xce\xf7\x85\x3c"
"""How the first words of a client of torch's store begin."""


@record
class Hello:
    """A node, as it calls."""

    dsl: Shown
    """Version."""
    run_id: str
    """Name of its job."""
    nodes: Count
    """Number of nodes of that."""
    place: Count
    """Its node rank."""
    host: Shown
    """What its user calls it."""
    token: str = ""
    """The word that it was given; empty: none yet."""


def write(kind: str, **fields: object) -> bytes:
    """Write a line, its end included."""
    from json import dumps

    return dumps({"circle": kind, **fields}, separators=(",", ":")).encode("ascii") + b"\n"


def read(line: bytes) -> Mapping[str, Any]:
    """Read a line; empty if it is none of these."""
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
    """Read the first line of a node; None: it is something else."""
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

    ``ours`` is what we should say ourselves. It is for our user: a caller would learn from it what to say.
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
    """What somebody seems to be who said this in place of a greeting."""
    return "a torchrun, or a worker of torch" if data[: len(TORCH_STORE)] == TORCH_STORE else "no dslrun"
