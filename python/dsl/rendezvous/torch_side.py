"""The part of the delegate that knows torch: its handlers, their state, stores and errors.

The functions here import torch, only in the delegate's process. They rely on torch's names without an
underscore. Names with an underscore make it safer; the code checks for each before it uses it.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias

from dsl._record import Record
from dsl.errors import DslError, RendezvousError
from dsl.machine.network import is_own_address, resolve
from dsl.model.job import MeetingPoint
from dsl.rendezvous.delegate_messages import MeetingRefused, Open, RefusalKind
from dsl.rendezvous.settings import number, unknown_settings
from dsl.words import counted, with_port

# Text, as in `dsl.model.request`.
Node: TypeAlias = "tuple[str, int, int]"
"""Address, pid and a local number: torch tells nodes apart by these, and orders them."""

PORTS = {"c10d": 29400, "etcd-v2": 2379, "etcd": 2379}
"""Port of a backend if the endpoint names none."""
ABSENT = "\x00absent"
"""A value that no key has."""


class View(Record):
    """The state of torch's own handler, one object for all nodes, which each of them reads and writes."""

    round: int = 0
    """Number of the round."""
    is_complete: bool = False
    """The round has its nodes, and they have ranks."""
    is_closed: bool = False
    """The job is over."""
    participants: tuple[Node, ...] = ()
    """Nodes of the round, in the order of their ranks."""
    waiting: tuple[Node, ...] = ()
    """Nodes that wait for the next round, or for a place in the job."""


def view_of(data: bytes) -> View:
    """The view in the bytes of a state. Its attributes have had the same names since torch 1.9."""
    state = pickle.loads(data)  # noqa: S301 - torch's protocol: every node loads it anyway
    ranks = {name_node(node): rank for node, rank in state.participants.items()}
    waiting = {*state.wait_list, *getattr(state, "redundancy_list", ())}  # the second since 2.4
    return View(
        round=state.round,
        is_complete=bool(state.complete),
        is_closed=bool(state.closed),
        participants=tuple(sorted(ranks, key=lambda node: (ranks[node], node))),
        waiting=tuple(sorted(map(name_node, waiting))),
    )


def name_node(node: Any) -> Node:
    """Our name for a node, from torch's descriptor."""
    return (node.addr, node.pid, node.local_id)


class Site:
    """Where the nodes meet: torch's handler and its parts."""

    def __init__(self, order: Open) -> None:
        self.order = order
        self.handler: Any = None
        self.backend: Any = None
        """The backend of a dynamic handler."""
        self.store: Any = None
        """The store beneath all rounds."""
        self.is_host = False
        """Whether this process hosts the store."""
        self.can_wait = False
        """Whether the store can wait for a key."""
        self.place = where(order.point)
        """Name of the place for users."""

    @property
    def is_dynamic(self) -> bool:
        """Whether this is torch's own handler, whose state we can see."""
        return self.backend is not None

    @property
    def is_assigned(self) -> bool:
        """Group rank 0 assigns the ranks, as in torch since 2.4. Before, each node found its own."""
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

        return not hasattr(SimpleElasticAgent, "_share_and_gather")

    def view(self) -> View:
        """The present state of a dynamic handler."""
        found = self.backend.get_state()
        return View() if found is None else view_of(found[0])


def is_file(point: MeetingPoint) -> bool:
    """Whether the store is a file."""
    return point.backend == "c10d" and dict(point.settings).get("store_type", "tcp").strip().lower() == "file"


def where(point: MeetingPoint) -> str:
    """The users' name for the place where the nodes meet."""
    if is_file(point):
        return point.endpoint or "a file of its own"
    return with_port(*host_and_port(point))


def host_and_port(point: MeetingPoint) -> tuple[str, int]:
    """The endpoint as torch reads it."""
    text = point.endpoint.strip() or "localhost"
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or not port.isdecimal():
        host, port = text, str(PORTS.get(point.backend, 0))
    return host.strip("[]"), int(port)


def open_site(order: Open) -> Site:
    """Make the handler.

    Raises:
        RendezvousError: the endpoint is not valid.
        Exception: torch's errors.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    point = order.point
    unknown = unknown_settings(point.backend, point.settings)  # torch refuses some of them
    settings = {key: value for key, value in point.settings if key not in unknown}

    def parameters(**more: object) -> Any:
        return RendezvousParameters(
            backend=point.backend,
            endpoint=point.endpoint,
            run_id=order.run_id,
            min_nodes=point.least_nodes,
            max_nodes=order.max_nodes,
            local_addr=point.local_address or None,
            **{**settings, **more},
        )

    site = Site(order)
    if point.backend == "c10d":
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

        site.can_wait = not is_file(point)
        made = _open_tcp(site, parameters, create_backend) if site.can_wait else create_backend(parameters())
    elif point.backend == "etcd-v2":
        from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend as create_etcd

        made = create_etcd(parameters())
    else:
        site.handler = _from_registry(parameters())
        return site
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    site.backend, site.store = made
    _adapt()
    site.handler = create_handler(site.store, site.backend, parameters())
    return site


def _open_tcp(site: Site, parameters: Callable[..., Any], create: Callable[..., Any]) -> Any:
    """Host the store if the endpoint is this machine, unless another process here hosts it already."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    point = site.order.point
    said = dict(point.settings).get("is_host")
    if said is not None:
        site.is_host = said.strip().lower() in {"1", "true", "t", "yes", "y"}
        return create(parameters())
    if is_here(host_and_port(point)[0]):
        try:
            found = create(parameters(is_host=True))
        except RendezvousConnectionError:
            pass
        else:
            site.is_host = True
            return found
    return create(parameters(is_host=False))


def is_here(host: str) -> bool:
    """Whether a name or an address belongs to this machine, on any interface."""
    return (
        host == "localhost"
        or host == os.uname().nodename
        or any(is_own_address(one) for one in resolve(host))
    )


def _from_registry(parameters: Any) -> Any:
    """A registered handler. We also look at entry points, if this version of torch does not."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry

    known = getattr(registry, "_registry", {})
    if parameters.backend not in known:
        from importlib.metadata import entry_points

        for entry in entry_points(group="torchrun.handlers"):
            if entry.name == parameters.backend:
                registry.register(entry.name, entry.load()())
    try:
        return registry.create_handler(parameters)
    except ValueError as error:
        if parameters.backend in getattr(registry, "_registry", {}):
            raise
        names = ", ".join(sorted(known)) or "c10d, etcd-v2, etcd"
        raise RendezvousError(
            f"there is no rendezvous backend {parameters.backend!r}, torch here knows {names}"
        ) from error


def _adapt() -> None:
    """Make two things in torch different, if it has these names."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as module

    names: Any = getattr(getattr(module, "DynamicRendezvousHandler", None), "_node_desc_generator", None)
    if hasattr(names, "_local_id"):
        # Another container may share host and pid, so a random number tells the nodes apart.
        names._local_id = int.from_bytes(os.urandom(4), "little")  # noqa: SLF001 - there is no other way
    if hasattr(module, "RendezvousStoreInfo"):
        # `Meetings` finds MASTER_ADDR without the key that a node under torchrun may never write.
        module.RendezvousStoreInfo = SimpleNamespace(build=lambda *_args, **_kwargs: None)


def node_of(site: Site) -> Node:
    """torch's name of this node."""
    node = getattr(site.handler, "_this_node", None)
    if node is not None:
        return name_node(node)
    import socket

    return (site.order.point.local_address or socket.getfqdn(), os.getpid(), 0)


def next_round(handler: Any) -> tuple[Any, int, int, tuple[str, int] | None]:
    """Join the next round. Returns its store, our rank, the number of nodes, and the master if known."""
    info = handler.next_rendezvous()
    if isinstance(info, tuple):  # torch before 2.4
        return (*info, None)
    master = getattr(info, "bootstrap_store_info", None)
    where_ = None if master is None else (str(master.master_addr), int(master.master_port))
    return info.store, int(info.rank), int(info.world_size), where_


def earlier_stores(site: Site, number_: int) -> Iterator[Any]:
    """The stores of the earlier rounds, the latest first."""
    from torch.distributed import PrefixStore

    for one in range(number_ - 1, -1, -1):
        yield PrefixStore(f"torch.rendezvous.{site.order.run_id}.{one}", site.store)


def clear_store(host: str, port: int) -> bool:
    """Delete all keys of a TCP store, if this version of torch can."""
    from torch.distributed import TCPStore

    if not hasattr(TCPStore, "list_keys"):
        return False
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
        for key in store.list_keys():
            store.delete_key(key)
    except Exception:  # noqa: BLE001 - for any error: the store could not be cleared
        return False
    return True


# What the stores of every version of torch can answer.


def wait_for(store: Any, keys: list[str], timeout_s: float) -> bool:
    """Whether the keys come within this time, in a store that can wait. A store that is gone has no keys."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except Exception:  # noqa: BLE001 - a timeout has another class in each version of torch
        return False
    return True


def has_keys(store: Any, keys: Iterable[str]) -> bool:
    """Whether all keys are there.

    Raises:
        RuntimeError: the store is gone.
    """
    if hasattr(store, "check"):
        return bool(store.check(list(keys)))
    # Stores before torch 2.3 have no `check`. Comparing makes no key, and reports an absent key as expected.
    return all(bytes(store.compare_set(key, ABSENT, ABSENT)) != ABSENT.encode() for key in keys)


LONGEST_TEXT = 400
PROBE_S = 2.0


class Refusal(Exception):  # noqa: N818 - it becomes a `MeetingRefused`
    """The nodes cannot meet, and we know why."""

    def __init__(self, kind: RefusalKind, text: str) -> None:
        super().__init__(text)
        self.kind: RefusalKind = kind


def refusal(
    error: Exception, order: Open, tried_s: float, place: str = "", *, is_open: bool = True
) -> MeetingRefused:
    """The refusal for an error that came after ``tried_s`` seconds.

    ``place``: where the store is. ``is_open``: there was a connection to it before.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    place = place or where(order.point)
    tried = f"tried for {tried_s:.0f} s"
    if isinstance(error, Refusal):
        return MeetingRefused(str(error), error.kind)
    if "RendezvousGracefulExitError" in names:
        return MeetingRefused(
            f"the job {order.run_id} has ended without this node, which was a spare", "unneeded"
        )
    if "RendezvousClosedError" in names:
        return MeetingRefused(over_text(order, place), "closed")
    if "RendezvousTimeoutError" in names:
        return MeetingRefused(_timeout_text(order, place), "timeout")
    if names & {"RendezvousConnectionError", "DistNetworkError", "DistStoreError", "TimeoutError"}:
        text = _lost_text(order, place) if is_open else connection_text(order, tried)
        return MeetingRefused(text, "connection")
    if isinstance(error, ImportError):
        return MeetingRefused(_import_text(error, order), "settings")
    if isinstance(error, (ValueError, TypeError, DslError)):
        return MeetingRefused(f"rendezvous at {place}: {one_line(error)}", "settings")
    if "etcd" in order.point.backend:
        return MeetingRefused(f"{connection_text(order, tried)} ({one_line(error)})", "connection")
    return MeetingRefused(f"rendezvous at {place}: {type(error).__name__}: {one_line(error)}", "other")


def over_text(order: Open, place: str) -> str:
    """Why nobody can join a job that is over."""
    is_named = is_file(order.point) and order.point.endpoint
    hint = f"remove {order.point.endpoint}" if is_named else "choose another run id"
    return f"the job {order.run_id} at {place} is over: {hint} to begin a new one"


def one_line(error: BaseException) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:LONGEST_TEXT].rstrip(". ")


def _timeout_text(order: Open, place: str) -> str:
    time_s = number(order.point.settings, "join_timeout")
    return (
        f"too few nodes have come to {place} with run id {order.run_id} within {time_s} s, it takes "
        f"{order.point.least_nodes}: start them with the same run id and endpoint, or raise "
        "join_timeout (dsl: --elastic-wait)"
    )


def waiting_text(order: Open, place: str) -> str:
    """What a node waits for that meets the others by torch's own rendezvous."""
    least, most = order.point.least_nodes, order.max_nodes
    count = counted(least, "node") if least == most else f"{least} to {most} nodes"
    return f"waits for {count} in all at {place} with run id {order.run_id}, or for a place among them"


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
