"""The part of the delegate that knows torch: makes a handler from its registry, and sees every state.

The functions here import torch, only in the delegate's process. They rely on torch's names without an
underscore. Names with an underscore make it faster or tell more; the code checks for each before it uses it.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from dsl._record import replace
from dsl.errors import RendezvousError
from dsl.lists import with_port
from dsl.machine.network import is_own_address, resolve
from dsl.model.job import MeetingPoint
from dsl.rendezvous.delegate_messages import Open
from dsl.rendezvous.settings import number, unknown_settings
from dsl.rendezvous.store_messages import News, StateChanged
from dsl.rendezvous.view import Node, View, read_state

PORTS = {"c10d": 29400, "etcd-v2": 2379, "etcd": 2379}
"""Port of a backend if the endpoint names none."""
LOCAL = "127.0.0.1"


class Interrupted(Exception):  # noqa: N818 - not an error: the agent wants something else
    """The agent no longer wants the present order."""


class RendezvousHooks:
    """Calls into the delegate while torch works."""

    def saw(self, view: View) -> None:
        """torch has read or written this state. Any thread of torch's may call this."""

    def pause(self, seconds: float) -> None:
        """Sleep in torch's place before it asks the store again.

        Raises:
            Interrupted: do not go on.
        """

    def check(self) -> None:
        """Decide whether torch may ask the store.

        Raises:
            Interrupted: do not go on.
        """


class Watched:
    """A backend of torch's that shows us each state, and tells the other nodes when it has written one."""

    def __init__(self, site: Site) -> None:
        self._backend = site.backend
        self._site = site
        self._last = View()
        """The last state without its heartbeats."""

    @property
    def name(self) -> str:
        """torch's name of the backend."""
        return str(self._backend.name)

    def get_state(self) -> Any:
        """Read the state and its token."""
        self._site.hooks.check()
        found = self._backend.get_state()
        if found is not None:
            self._take(found[0])
        return found

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Write the state if no other node has written it since the token was read."""
        self._site.hooks.check()
        found = self._backend.set_state(state, token)
        if found is not None:
            before = self._last
            self._take(found[0])
            if found[2] and self._last != before and self._site.news is not None:
                self._site.news.post(StateChanged())
        return found

    def _take(self, data: bytes) -> None:
        view = view_of(data)
        self._last = replace(view, heartbeats=())
        self._site.hooks.saw(view)


def view_of(data: bytes) -> View:
    """The view in the bytes of a state."""
    return read_state(pickle.loads(data))  # noqa: S301 - torch's protocol: every node loads it anyway


def change_state(backend: Any, change: Callable[[Any], bool]) -> bool:
    """Change torch's state. ``change`` gets the object, and returns whether it has changed it."""
    for _ in range(100):
        found = backend.get_state()
        if found is None:
            return False
        state = pickle.loads(found[0])  # noqa: S301 - as above
        if not change(state):
            return False
        done = backend.set_state(pickle.dumps(state), found[1])
        if done is not None and done[2]:
            return True
    return False


class Site:
    """Where the nodes meet: torch's handler and its parts."""

    def __init__(self, order: Open) -> None:
        self.order = order
        self.hooks = RendezvousHooks()
        self.handler: Any = None
        self.backend: Any = None
        """The backend of a dynamic handler."""
        self.watch_backend: Any = None
        """The backend on a second connection, for the watching thread, which waits there."""
        self.store: Any = None
        """The store beneath all rounds."""
        self.watch_store: Any = None
        """The store on the second connection."""
        self.news: News | None = None
        """For writing threads."""
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
        """See `dsl.rendezvous.round_keys.Round`."""
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

        return not hasattr(SimpleElasticAgent, "_share_and_gather")

    def new_news(self) -> News:
        """News for another thread, on the watching connection."""
        return News(self.watch_store, self.order.run_id, can_wait=self.can_wait)


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
        _open_c10d(site, parameters)
    elif point.backend == "etcd-v2":
        from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend

        site.backend, site.store = create_backend(parameters())
        site.watch_backend, site.watch_store = create_backend(parameters())
    else:
        site.handler = _from_registry(parameters())
        return site
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    site.news = News(site.store, order.run_id, can_wait=site.can_wait)
    _be_unique()
    site.handler = create_handler(site.store, Watched(site), parameters())
    _quicken(site)
    return site


def _open_c10d(site: Site, parameters: Callable[..., Any]) -> None:
    """Connect twice: for the handler, and for the watching thread."""
    from torch.distributed import FileStore, TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
        C10dRendezvousBackend,
        create_backend,
    )

    if is_file(site.order.point):
        site.backend, site.store = create_backend(parameters())
        site.watch_store = FileStore(str(getattr(site.store, "path", "") or site.order.point.endpoint))
    else:
        site.backend, site.store = _open_tcp(site, parameters, create_backend)
        host, port = host_and_port(site.order.point)
        timeout = timedelta(seconds=number(site.order.point.settings, "read_timeout"))
        port = int(getattr(site.store, "port", 0)) or port
        site.watch_store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        site.can_wait = True
    site.watch_backend = C10dRendezvousBackend(site.watch_store, site.order.run_id)


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


def _be_unique() -> None:
    """Make torch number its nodes from a random number: another container may share host and pid."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as module

    names: Any = getattr(getattr(module, "DynamicRendezvousHandler", None), "_node_desc_generator", None)
    if hasattr(names, "_local_id"):
        names._local_id = int.from_bytes(os.urandom(4), "little")  # noqa: SLF001 - torch offers no other way


def _quicken(site: Site) -> None:
    """Shorten torch's pauses. If torch lacks these names, it is only slower."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as module

    holder = getattr(site.handler, "_state_holder", None)
    if holder is not None and hasattr(holder, "_cache_duration"):
        holder._cache_duration = 0  # noqa: SLF001 - a cached state may be a second old

    def delay(seconds: float | tuple[float, float]) -> None:
        least, most = seconds if isinstance(seconds, tuple) else (seconds, seconds)
        site.hooks.pause(random.uniform(least, most))  # noqa: S311 - no secret

    for name, stand_in in (
        ("_delay", delay),
        # It searches the whole stack and its sources to name a function in an event that is never read.
        ("get_method_name", lambda _depth=2: "rendezvous"),
        # `round_keys` agrees about MASTER_ADDR without the key that a node under torchrun may never write.
        ("RendezvousStoreInfo", SimpleNamespace(build=lambda *_args, **_kwargs: None)),
    ):
        if hasattr(module, name):
            setattr(module, name, stand_in)


def node_of(handler: Any, local_addr: str | None) -> Node:
    """torch's name of this node."""
    node = getattr(handler, "_this_node", None)
    if node is not None:
        return (node.addr, node.pid, node.local_id)
    return (local_addr or socket.getfqdn(), os.getpid(), 0)


def stop_heartbeats(handler: Any) -> None:
    """Stop the heartbeats, so that no node believes that this node is still there."""
    stop = getattr(handler, "_stop_heartbeats", None)
    if stop is not None:
        threading.Thread(target=stop, daemon=True).start()  # torch waits for a heartbeat that is under way


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
