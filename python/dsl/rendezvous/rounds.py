"""Rounds of torch's own rendezvous, in the delegate: this node takes part as a node under torchrun does.

The keys and their contents are those of torch's agent (`torch.distributed.elastic.agent.server.api`).

What we tell workers was tried with torch 2.15, in rounds of our nodes and nodes under torchrun. Only rank 0
ever hosts the workers' store; all other workers are clients. So our workers always hear that no agent hosts
it (``TORCHELASTIC_USE_AGENT_STORE=False``), whichever node leads. A node under torchrun keeps the first
master address and port that it learned, so a leading node of ours keeps its port while such a node is there.
A torchrun node that leads hosts a store for the workers by default, and writes its address only in the first
round. We find the address there, write it into the present round for other nodes, and clear the store of what
the last attempt has left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from dsl._record import Record
from dsl.errors import RendezvousError
from dsl.machine import pick_free_port, port_is_free
from dsl.machine.network import addresses_toward, is_loopback, own_addresses, resolve
from dsl.model.job import Meeting, Notice
from dsl.rendezvous.delegate_messages import Answer, Meet, NodesMet, Waiting
from dsl.rendezvous.settings import number
from dsl.rendezvous.torch_side import (
    Node,
    Refusal,
    Site,
    View,
    clear_store,
    earlier_stores,
    has_keys,
    host_and_port,
    is_file,
    is_here,
    next_round,
    node_of,
    wait_for,
    why_no_connection,
)
from dsl.words import LAST_PORT, MOST_WORKERS, parse_number

MASTER = ("MASTER_ADDR", "MASTER_PORT")
ROLE_INFO = "torchelastic/role_info"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
EXIT_BARRIER = "torchelastic/agent/terminal_state"

ASK_S = 0.2
"""How often we check whether the awaited keys can still come."""
EXIT_BARRIER_S = 300.0
"""How long we wait for nodes whose workers have not ended, as torch's agents do."""


class RoundBroken(Exception):  # noqa: N818 - the nodes meet again
    """A node has left a round before the ranks were agreed."""


class Round(Record):
    """A complete round, as this node finds it."""

    store: Any
    """torch's store of the round."""
    rank: int
    """Place of this node."""
    node_count: int
    """Number of nodes."""
    is_assigned: bool = True
    """See `Site.is_assigned`."""


class Meetings:
    """The meetings of one node."""

    def __init__(self, site: Site, say: Callable[[Answer], None], check: Callable[[], None]) -> None:
        """``check`` raises if the agent no longer wants the present order."""
        self._site, self._say, self._check = site, say, check
        self.node = node_of(site)
        self._port = 0
        self._round: Round | None = None
        self._number = -1
        self._waiting = 0
        if site.store is not None:  # marks this node as one of ours
            site.store.set(self._card(self.node), site.order.host)

    def _card(self, node: Node) -> str:
        return f"dsl/{self._site.order.run_id}/card/{node[0]}_{node[1]}_{node[2]}"

    def meet(self, order: Meet) -> None:
        """Join the next round, and say so.

        Raises:
            Refusal: the nodes cannot meet.
            Exception: torch's errors.
        """
        self._round, self._waiting = None, 0
        end_s = time.monotonic() + number(self._site.order.point.settings, "join_timeout")
        while True:
            try:
                found = self._meet(order)
            except RoundBroken:
                if time.monotonic() > end_s:
                    text = f"nodes keep leaving the rendezvous at {self._site.place}: look at their output"
                    raise Refusal("timeout", text) from None
            else:
                self._say(found)
                return

    def _meet(self, order: Meet) -> NodesMet:
        site = self._site
        store, rank, count, master = next_round(site.handler)
        if site.is_dynamic:
            view = site.view()
            self._number, nodes = view.round, view.participants
        else:
            self._number, nodes = self._number + 1, tuple([("", place, 0) for place in range(count)])
        if len(nodes) != count:
            raise RoundBroken
        round_ = Round(store, rank, count, is_assigned=site.is_assigned)

        def wait(keys: list[str]) -> None:
            self._wait(round_, nodes, keys)

        if master is None and rank == 0:
            master = self._lent_master(nodes) or (self.address(), self._choose_port(nodes))
            tell_master(round_, *master)
        tell_role(round_, order.role, order.local_world_size)
        if master is None and site.is_dynamic and round_.is_assigned:
            wait([role_key(round_, 0)])  # the leading node writes the address before this key, or never
            master = self._find_master(round_, nodes)
        sizes, first_role_rank, role_size = read_roles(round_, wait)
        if master is None:
            wait(list(MASTER))
            master = read_master(store)
        assert master is not None
        self._round = round_
        meeting = Meeting(
            attempt=0,
            node_rank=rank,
            local_world_sizes=sizes,
            address=master[0],
            port=master[1],
            round=self._number,
            first_role_rank=first_role_rank,
            role_size=role_size,
        )
        return NodesMet(meeting, tuple([self._name(node) for node in nodes]))

    def _name(self, node: Node) -> str:
        """A node's name for users."""
        if self._is_ours(node):
            return bytes(self._site.store.get(self._card(node))).decode("utf-8", "replace")
        return node[0] or f"node {node[1]}"

    def _is_ours(self, node: Node) -> bool:
        store = self._site.store
        return store is not None and has_keys(store, [self._card(node)])

    def _wait(self, round_: Round, nodes: tuple[Node, ...], keys: list[str]) -> None:
        """Wait until all keys are in the store of the round."""
        site = self._site
        end_s = time.monotonic() + number(site.order.point.settings, "read_timeout")
        while not self._have(round_, keys):
            if site.is_dynamic and self._is_broken(site.view(), nodes):
                raise RoundBroken
            if time.monotonic() > end_s:
                text = (
                    f"the nodes have met at {site.place}, but one does not say what it starts: see its output"
                )
                raise Refusal("timeout", text)

    def _have(self, round_: Round, keys: list[str]) -> bool:
        """Whether the keys are there, after a short wait."""
        self._check()
        if has_keys(round_.store, keys) or (self._site.can_wait and wait_for(round_.store, keys, ASK_S)):
            return True
        if not self._site.can_wait:
            time.sleep(ASK_S / 4)
        return False

    def _is_broken(self, view: View, nodes: tuple[Node, ...]) -> bool:
        """Whether a node has gone. A view from before the round was complete tells nothing."""
        if view.round != self._number:
            return view.round > self._number
        return view.is_complete and not set(nodes) <= set(view.participants)

    # ------------------------------------------------------------------ where rank 0 listens

    def _find_master(self, round_: Round, nodes: tuple[Node, ...]) -> tuple[str, int] | None:
        """Where rank 0 listens, as its node wrote it in this round or in an earlier round that it led."""
        found = read_master(round_.store)
        if found is not None:
            return found
        leader = nodes[0][0]
        for store in earlier_stores(self._site, self._number):
            found = read_master(store)
            if found is not None and found[0] == leader:
                tell_master(round_, *found)
                first = next(place for place, node in enumerate(nodes) if self._is_ours(node))
                if round_.rank == first and not clear_store(*found):
                    text = f"the node {leader} under torchrun keeps one store for the workers of all attempts"
                    advice = (
                        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there, else they may not find each other"
                    )
                    self._say(Notice("warning", f"{text}: {advice}"))
                return found
        return None

    def _lent_master(self, nodes: tuple[Node, ...]) -> tuple[str, int] | None:
        """The store that a node under torchrun has hosted since it led: that node knows no other."""
        addresses = {node[0] for node in nodes if self._site.is_dynamic and not self._is_ours(node)}
        if not addresses:
            return None
        for store in earlier_stores(self._site, self._number):
            found = read_master(store)
            if found is not None:
                lends = found[0] in addresses and not why_no_connection(*found) and clear_store(*found)
                return found if lends else None
        return None

    def _choose_port(self, nodes: tuple[Node, ...]) -> int:
        """A free port. If a node is not ours, the last port again if it is free."""
        keeps = bool(self._port) and self._site.is_dynamic and not all(map(self._is_ours, nodes))
        if not (keeps and port_is_free(self._port)):
            self._port = pick_free_port()
        return self._port

    def address(self) -> str:
        """The address by which the others reach this node."""
        point = self._site.order.point
        if point.local_address:
            return point.local_address
        if not is_file(point):
            host = host_and_port(point)[0]
            if is_here(host):
                return host
            return next(iter(addresses_toward([host])), self.node[0])
        if any(not is_loopback(one) for one in resolve(self.node[0])):
            return self.node[0]
        return next(iter(own_addresses()), "127.0.0.1")

    # ------------------------------------------------------------------ while workers run, and after that

    @property
    def is_running(self) -> bool:
        """Whether this node is in a round."""
        return self._round is not None

    def look(self) -> None:
        """Say if nodes wait for the next round. torch's agents ask about as often."""
        waiting = 0 if self._round is None else int(self._site.handler.num_nodes_waiting())
        if waiting > self._waiting:
            self._say(Waiting())
        self._waiting = waiting

    def finish(self) -> None:
        """Wait until the workers of all nodes have ended, and close the rendezvous, as torch's agents do."""
        round_, handler = self._round, self._site.handler
        if round_ is None:
            return
        end_s = time.monotonic() + EXIT_BARRIER_S
        if not arrive_at_exit(round_):
            while not self._have(round_, exit_keys(round_)) and time.monotonic() < end_s:
                if handler.is_closed():
                    return
        handler.set_closed()


def role_key(round_: Round, rank: int) -> str:
    """The key under which a node tells its role."""
    return f"{ROLE_INFO}/{rank}" if round_.is_assigned else f"{ROLE_INFO}{rank}"


def tell_role(round_: Round, role: str, local_world_size: int) -> None:
    """Tell what this node starts."""
    mine = {"role": role, "rank": round_.rank, "local_world_size": local_world_size}
    round_.store.set(role_key(round_, round_.rank), json.dumps(mine))


def read_roles(round_: Round, wait: Callable[[list[str]], None]) -> tuple[tuple[int, ...], int, int]:
    """Learn what all nodes start, and assign the ranks if this node leads. Call it after `tell_role`.

    Returns the numbers of workers by node rank, and for the role of this node the first rank of its workers
    and the number of all workers.

    ``wait`` returns when all given keys are in the store of the round, and raises if they cannot come.
    """
    store, count = round_.store, round_.node_count
    keys = [role_key(round_, rank) for rank in range(count)]
    is_leader = round_.is_assigned and round_.rank == 0
    wait(keys if is_leader or not round_.is_assigned else [f"{ASSIGNED_RANKS}{round_.rank}"])
    infos = [json.loads(store.get(key)) for key in keys]
    sizes = [int(info["local_world_size"]) for info in infos]
    for rank, size in enumerate(sizes):
        if not 0 < size <= MOST_WORKERS:
            raise RendezvousError(f"node {rank} says that it starts {size} workers")
    roles = [str(info["role"]) for info in infos]
    if is_leader:
        for rank in range(count):
            store.set(f"{ASSIGNED_RANKS}{rank}", json.dumps(_assignment(rank, roles, sizes)))
    elif not round_.is_assigned:
        store.set(f"{keys[round_.rank]}.FIN", "FIN")  # torch's rank 0 waits for this key
    _, _, first, size = _assignment(round_.rank, roles, sizes)
    return tuple(sizes), first, size


def _assignment(rank: int, roles: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """First global rank, world size, first rank of the role, size of the role, as torch writes them."""
    same = [size if role == roles[rank] else 0 for role, size in zip(roles, sizes, strict=True)]
    return [sum(sizes[:rank]), sum(sizes), sum(same[:rank]), sum(same)]


def tell_master(round_: Round, address: str, port: int) -> None:
    """Write where rank 0 will listen. Only group rank 0 calls it, before `tell_role`."""
    for key, value in zip(MASTER, (address, str(port)), strict=True):
        round_.store.set(key, value.encode())


def read_master(store: Any) -> tuple[str, int] | None:
    """Where rank 0 will listen, if the store of a round has it."""
    if not has_keys(store, [MASTER[1]]) or not has_keys(store, [MASTER[0]]):
        return None
    port = parse_number(store.get(MASTER[1]).decode())
    if port is None or not 0 < port <= LAST_PORT:
        raise RendezvousError("the store names no port for rank 0, another program may have written there")
    return store.get(MASTER[0]).decode(), port


def arrive_at_exit(round_: Round) -> bool:
    """Say that all workers of this node have ended well. Returns whether this node is surely the last."""
    store = round_.store
    if not round_.is_assigned:
        store.set(f"{EXIT_BARRIER}{round_.rank}", str(round_.rank))
        store.set(f"{EXIT_BARRIER}{round_.rank}.FIN", "FIN")
        return False
    is_last = int(store.add(f"{EXIT_BARRIER}/num_members", 1)) == round_.node_count
    if is_last:
        store.set(f"{EXIT_BARRIER}/last_member", "<val_ignored>")
    return is_last


def exit_keys(round_: Round) -> list[str]:
    """Keys that are in the store of the round once all nodes have arrived at the exit."""
    if round_.is_assigned:
        return [f"{EXIT_BARRIER}/last_member"]
    return [f"{EXIT_BARRIER}{rank}" for rank in range(round_.node_count)]
