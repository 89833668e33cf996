"""From a round of torch's rendezvous to the meeting of the agents: who starts what, and where rank 0 listens.

What we tell workers was tried with torch 2.15, in rounds of our nodes and nodes under torchrun. Only rank 0
ever hosts the workers' store; all other workers are clients. So our workers always hear that no agent hosts
it (``TORCHELASTIC_USE_AGENT_STORE=False``), whichever node leads. A node under torchrun keeps the first
master address and port that it learned, so a leading node of ours keeps its port while such a node is there.
A torchrun node that leads hosts a store for the workers by default, and writes its address only in the first
round. We find the address there, write it into the present round for other nodes, and clear the store of what
the last attempt has left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from dsl.machine.network import addresses_toward, is_loopback, own_addresses, resolve
from dsl.machine.this_process import pick_free_port, port_is_free
from dsl.model.job import Meeting, Notice
from dsl.model.nodes import NodesMet
from dsl.rendezvous.delegate_messages import Answer, Meet
from dsl.rendezvous.refusals import Refusal, why_no_connection
from dsl.rendezvous.round_keys import (
    MASTER,
    NodeFacts,
    Round,
    agree,
    read_facts,
    read_master,
    read_roles,
    role_key,
    tell_facts,
    tell_master,
    tell_role,
)
from dsl.rendezvous.settings import number
from dsl.rendezvous.store_messages import News, has_keys, wait_for
from dsl.rendezvous.torch_side import (
    Site,
    clear_store,
    earlier_stores,
    host_and_port,
    is_file,
    is_here,
    next_round,
)
from dsl.rendezvous.view import Node, RoundNodes, View
from dsl.rendezvous.watch import Watcher

ASK_S = 0.2
"""How often we check whether the awaited keys can still come."""


class RoundBroken(Exception):  # noqa: N818 - the nodes meet again
    """A node has left a round before the ranks were agreed."""


class Meetings:
    """The meetings of one node."""

    def __init__(self, site: Site, watcher: Watcher, say: Callable[[Answer], None]) -> None:
        self._site = site
        self._watcher = watcher
        self._node = watcher.node
        self._say = say
        self._own = os.urandom(16).hex()
        self._port = 0
        self._hosts: dict[str, str] = {}
        """Names of the last round's nodes. Hosts may share a name, so each node has a text of its own."""
        self.round: Round | None = None
        """The last round."""
        self.number = -1
        """Its number."""
        self.facts: tuple[NodeFacts | None, ...] = ()
        """What its nodes know; None for nodes that are not ours."""

    def introduce(self) -> None:
        """Mark this node as one of ours."""
        if self._site.store is not None:
            self._site.store.set(self._card(self._node), self._site.order.host)

    def _card(self, node: Node) -> str:
        return f"dsl/{self._site.order.run_id}/card/{node[0]}_{node[1]}_{node[2]}"

    def meet(self, order: Meet, last_view: Callable[[], View], judge: Callable[[], None]) -> NodesMet:
        """Join the next round.

        ``last_view``: the last state that torch has seen. ``judge`` raises if these nodes cannot be a round.

        Raises:
            RoundBroken: a node has left it already.
            Refusal: the nodes cannot meet.
            Exception: torch's errors.
        """
        site = self._site
        store, rank, count, master = next_round(site.handler)
        view = last_view()
        judge()
        self.number = view.round if site.is_dynamic else self.number + 1
        nodes = view.participants if site.is_dynamic else tuple([("", place, 0) for place in range(count)])
        if len(nodes) != count:
            raise RoundBroken
        round_ = self.round = Round(store, rank, count, is_assigned=site.is_assigned)
        tell_facts(round_, NodeFacts(site.order.host, order.restarts, order.reason, self._own))

        def wait(keys: list[str]) -> None:
            self._wait(round_, nodes, keys)

        if master is None and rank == 0:
            master = self._lent_master(nodes) or (self._address(), self._choose_port(nodes))
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
        self.facts = read_facts(round_)
        names: list[str] = []
        hosts: dict[str, str] = {}
        for facts, node in zip(self.facts, nodes, strict=True):
            names.append((node[0] or f"node {len(names)}") if facts is None else facts.host)
            hosts["_".join(map(str, node)) if facts is None else facts.node] = names[-1]
        if not site.is_dynamic:
            site.news = News(store, site.order.run_id, can_wait=False)
            self._watcher.node = nodes[rank]
        self._watcher.watch(
            RoundNodes(self.number, nodes, tuple(names)), None if site.is_dynamic else site.news
        )
        # A round counts at most one restart. Only torch's own handler numbers rounds for all nodes.
        restarts, reason = agree(self.facts, self.number if site.is_dynamic else None)
        meeting = Meeting(
            attempt=0,
            node_rank=rank,
            local_world_sizes=sizes,
            address=master[0],
            port=master[1],
            round=self.number,
            restarts=restarts,
            reason=reason,
            first_role_rank=first_role_rank,
            role_size=role_size,
        )
        before, self._hosts = self._hosts, hosts
        joined = tuple([host for node, host in hosts.items() if node not in before])
        left = tuple([host for node, host in before.items() if node not in hosts])
        return NodesMet(meeting, tuple(names), joined, left)

    @property
    def has_strangers(self) -> bool:
        """Whether the last round has a node that is not ours."""
        return None in self.facts

    def _wait(self, round_: Round, nodes: tuple[Node, ...], keys: list[str]) -> None:
        """Wait until all keys are in the store of the round."""
        site, watcher = self._site, self._watcher
        end_s = time.monotonic() + number(site.order.point.settings, "read_timeout")
        while not self.have(round_, keys):
            site.hooks.check()
            if site.is_dynamic and self._is_broken(watcher.view, nodes):
                raise RoundBroken
            if watcher.is_lost or time.monotonic() > end_s:
                text = (
                    f"the nodes have met at {site.place}, but one does not say what it starts: see its output"
                )
                raise Refusal("connection" if watcher.is_lost else "timeout", text)

    def have(self, round_: Round, keys: list[str]) -> bool:
        """Whether the keys are there, after a short wait. A store that is gone has no keys."""
        if not self._site.can_wait:
            if has_keys(round_.store, keys):
                return True
            self._watcher.pause(ASK_S / 4)
            return False
        begin_s = time.monotonic()
        if wait_for(round_.store, keys, ASK_S):
            return True
        if time.monotonic() - begin_s < ASK_S / 2:
            self._watcher.pause(ASK_S)
        return False

    def _is_broken(self, view: View, nodes: tuple[Node, ...]) -> bool:
        """Whether a node has gone. A view from before the round was complete tells nothing."""
        if view.round != self.number:
            return view.round > self.number
        return view.is_complete and not set(nodes) <= set(view.participants)

    def _find_master(self, round_: Round, nodes: tuple[Node, ...]) -> tuple[str, int] | None:
        """Where rank 0 listens, as its node wrote it in this round or in an earlier round that it led."""
        found = read_master(round_.store)
        if found is not None:
            return found
        leader = nodes[0][0]
        for store in earlier_stores(self._site, self.number):
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
        for store in earlier_stores(self._site, self.number):
            found = read_master(store)
            if found is not None:
                lends = found[0] in addresses and not why_no_connection(*found) and clear_store(*found)
                return found if lends else None
        return None

    def _is_ours(self, node: Node) -> bool:
        return has_keys(self._site.store, [self._card(node)])

    def _choose_port(self, nodes: tuple[Node, ...]) -> int:
        """A free port. If a node is not ours, the last port again if it is free."""
        keeps = bool(self._port) and self._site.is_dynamic and not all(map(self._is_ours, nodes))
        if not (keeps and port_is_free(self._port)):
            self._port = pick_free_port()
        return self._port

    def _address(self) -> str:
        """The address by which the others reach this node."""
        point = self._site.order.point
        if point.local_address:
            return point.local_address
        if not is_file(point):
            host = host_and_port(point)[0]
            if is_here(host):
                return host
            return next(iter(addresses_toward([host])), self._node[0])
        if any(not is_loopback(one) for one in resolve(self._node[0])):
            return self._node[0]
        return next(iter(own_addresses()), "127.0.0.1")
