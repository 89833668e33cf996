"""Why nodes do not meet: one line for the user, for each error that torch may raise."""

from __future__ import annotations

import os
import socket
import sys

from dsl.errors import DslError
from dsl.lists import counted
from dsl.model.nodes import MeetingRefused, RefusalKind
from dsl.rendezvous.delegate_messages import Open
from dsl.rendezvous.settings import number
from dsl.rendezvous.torch_side import host_and_port, is_file, where
from dsl.rendezvous.view import Node, View

LONGEST_TEXT = 400
PROBE_S = 2.0


class Refusal(Exception):  # noqa: N818 - it becomes a `MeetingRefused`
    """The nodes cannot meet, and we know why."""

    def __init__(self, kind: RefusalKind, text: str) -> None:
        super().__init__(text)
        self.kind: RefusalKind = kind


def refusal(
    error: Exception,
    order: Open,
    tried_s: float,
    view: View | None = None,
    place: str = "",
    *,
    was_spare: bool = False,
) -> MeetingRefused:
    """The refusal for an error that came after ``tried_s`` seconds.

    ``view``: the last state seen; None: there was no connection yet. ``place``: where the store is.
    ``was_spare``: the node was parked, see `is_spare`.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    place = place or where(order.point)
    tried = f"tried for {tried_s:.0f} s"
    if isinstance(error, Refusal):
        return MeetingRefused(str(error), error.kind)
    if "RendezvousGracefulExitError" in names or ("RendezvousClosedError" in names and was_spare):
        return unneeded(order)
    if "RendezvousClosedError" in names:
        hint = (
            f"remove {order.point.endpoint}"
            if is_file(order.point) and order.point.endpoint
            else "choose another run id"
        )
        return MeetingRefused(
            f"the job {order.run_id} at {place} is over: {hint} to begin a new one", "closed"
        )
    if "RendezvousTimeoutError" in names:
        return MeetingRefused(_timeout_text(order, view, place), "timeout")
    if names & {"RendezvousConnectionError", "DistNetworkError", "DistStoreError", "TimeoutError"}:
        is_lost = view is not None
        return MeetingRefused(
            _lost_text(order, place) if is_lost else connection_text(order, tried), "connection"
        )
    if isinstance(error, ImportError):
        return MeetingRefused(_import_text(error, order), "settings")
    if isinstance(error, (ValueError, TypeError, DslError)):
        return MeetingRefused(f"rendezvous at {place}: {one_line(error)}", "settings")
    if "etcd" in order.point.backend:
        return MeetingRefused(f"{connection_text(order, tried)} ({one_line(error)})", "connection")
    return MeetingRefused(f"rendezvous at {place}: {type(error).__name__}: {one_line(error)}", "other")


def unneeded(order: Open) -> MeetingRefused:
    """The refusal for a job that ended without this node."""
    return MeetingRefused(
        f"the job {order.run_id} has ended without this node, which was a spare", "unneeded"
    )


def one_line(error: BaseException) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:LONGEST_TEXT].rstrip(". ")


def _timeout_text(order: Open, view: View | None, place: str) -> str:
    time_s = number(order.point.settings, "join_timeout")
    count = len(view.participants) if view is not None else 0
    if view is not None and view.is_complete:
        return (
            f"the {counted(count, 'node')} of job {order.run_id} at {place} did not take this one in within "
            f"{time_s} s: raise join_timeout"
        )
    return (
        f"too few nodes have come to {place} with run id {order.run_id} within {time_s} s, it takes "
        f"{order.point.least_nodes}: start them with the same run id and endpoint, or raise join_timeout"
    )


def connection_text(order: Open, tried: str) -> str:
    """Why the store cannot be reached. ``tried``: how long we tried or still try, in words."""
    place = where(order.point)
    if is_file(order.point):
        return (
            f"the file {place} cannot be used as a store of the rendezvous: check that all nodes may write it"
        )
    why = why_no_connection(*host_and_port(order.point)) or "it does not answer as a store"
    return (
        f"no connection to the store of the rendezvous at {place} ({why}), {tried}: start the node that "
        "hosts it, or correct the endpoint"
    )


def _lost_text(order: Open, place: str) -> str:
    """Why a store cannot be reached any more."""
    if is_file(order.point):
        return connection_text(order, "")
    why = why_no_connection(*host_and_port(order.point)) or "what listens there now is another one"
    return (
        f"the store of the rendezvous at {place} has ended ({why}) while this node waited for the others: "
        f"the node that hosts it has gone, or its run id is not {order.run_id}; start it first, then this one"
    )


def why_no_connection(host: str, port: int) -> str:
    """Why a connection fails, in the system's words; empty if it works."""
    try:
        with socket.create_connection((host, port), timeout=PROBE_S):
            return ""
    except socket.gaierror:
        return f"the name {host} has no address here"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else one_line(error)


def _import_text(error: ImportError, order: Open) -> str:
    if "etcd" in str(error):
        needed = f"backend {order.point.backend} needs the package python-etcd"
        return f"{needed}, which {sys.executable} has not: pip install python-etcd"
    if error.name is not None and error.name.split(".")[0] == "torch":
        return (
            f"a rendezvous of nodes that come and go needs torch, which {sys.executable} has not: install it"
        )
    return f"backend {order.point.backend} needs a module that cannot be imported: {one_line(error)}"


def is_spare(view: View, node: Node, most: int) -> bool:
    """Whether a node is parked because the job is full. Before 2.4 torch has no list of such nodes."""
    is_full = view.is_complete and len(view.participants) >= most
    return node in view.spares or (is_full and node not in view.participants)


def describe_waiting(view: View, node: Node, order: Open, place: str) -> str:
    """What a node that meets the others waits for; empty if the user need not know."""
    count = len(view.participants)
    most = order.max_nodes
    if is_spare(view, node, most):
        return (
            f"the job has its {counted(most, 'node')}: this one is parked as a spare until one of them leaves"
        )
    if node in view.waiting:
        return f"waits until the {counted(count, 'running node', 'takes', 'take')} this one in"
    if node not in view.participants or view.is_complete:
        return ""
    least = order.point.least_nodes
    if count < least:
        return f"waits for nodes: {count} of {least} are at {place} with run id {order.run_id}"
    time_s = number(order.point.settings, "last_call_timeout")
    return (
        f"{count} of up to {most} nodes are at {place} with run id {order.run_id}, which is enough: waits up "
        f"to {time_s} s for more (last_call_timeout)"
    )
