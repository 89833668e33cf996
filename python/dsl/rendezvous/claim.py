"""Who conducts a job whose nodes find each other through a store: the node that wins a claim there.

A claim is a counter with a number: the node whose `add` returns 1 has won, and writes where its conductor
listens, so that the others can call it. The node that hosts a store has a head start: then the store and the
conductor live and die together. Otherwise, if the conductor is lost, the others claim the next number, and a
conductor that sees the next number claimed steps down. A conductor's node counts in the store: while it does,
nobody claims the next number, even if the conductor cannot be reached from there.

If a node under torchrun is there, nobody conducts. Who can read the store may join the job, as with torch: it
finds the key of the links there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dsl._record import Record
from dsl.errors import JobFormatError
from dsl.model.codec import from_line, to_line
from dsl.model.request import Port, Shown
from dsl.rendezvous.delegate_messages import ByTorch, Claim, Claimed, Outranked
from dsl.rendezvous.torch_side import Refusal, Site, has_keys, over_text

HEAD_START_S = 1.0
"""If one of our nodes hosts the store, it has claimed within this time after the store has answered."""
WRITE_S = 5.0
"""A node that has won and has not written this soon is lost."""
SILENT_S = 5.0
"""A conductor's node counts about once a second: if it has not for this long, it is lost."""
ASK_S = 0.1
"""How often we look into the store meanwhile."""


class Conducts(Record):
    """Where the conductor listens, as its node writes it into the store."""

    address: Shown
    port: Port
    key: str
    """64 hexadecimal digits."""
    hosts_store: bool
    """Whether the store ends with this node."""


class Claims:
    """The claims of one node."""

    def __init__(self, site: Site, node: str, address: str, check: Callable[[], None]) -> None:
        """``node`` is torch's address of this node, ``address`` the one by which the others reach it.

        ``check`` raises if nobody wants to know any more.
        """
        self._site, self._node, self._address, self._check = site, node, address, check
        self._place = 0
        self._conducts = 0
        """The number of our claim while this node conducts; else 0."""

    def claim(self, order: Claim) -> Claimed | ByTorch:
        """Find who conducts the job, or conduct it.

        Raises:
            Refusal: the job is over.
        """
        site, store = self._site, self._site.store
        self._conducts = 0
        if not site.is_dynamic:
            return ByTorch()
        has_head_start = site.can_wait and not site.is_host
        end_s = time.monotonic() + (HEAD_START_S if has_head_start else 0.0)
        while True:
            view = site.view()
            if view.is_closed:
                raise Refusal("closed", over_text(site.order, site.place))
            if view.participants or view.waiting:
                return ByTorch()
            if time.monotonic() >= end_s or has_keys(store, [self._key(1)]):
                break
            self._pause()
        if not self._place:
            self._place = int(store.add(f"dsl/{site.order.run_id}/nodes", 1))
        number = max(order.lost, 1)
        while has_keys(store, [self._key(number + 1)]):
            number += 1
        if number == order.lost and self._is_lost(number):
            number += 1
        while (found := self._try(number, order)) is None:
            number += 1
        return found

    def _try(self, number: int, order: Claim) -> Claimed | None:
        """Who has won the claim of that number; None: its node is lost."""
        site, store, key = self._site, self._site.store, self._key(number)
        has_won = int(store.add(key, 1)) == 1
        if has_won:
            conducts = Conducts(self._address, order.port, order.key, hosts_store=site.is_host)
            store.set(f"{key}/at", to_line(conducts))
            self._conducts = number
        end_s = time.monotonic() + WRITE_S
        while not has_keys(store, [f"{key}/at"]):
            if time.monotonic() > end_s:
                return None
            self._pause()
        try:
            found = from_line(store.get(f"{key}/at"), {"Conducts": Conducts})
        except JobFormatError:  # another program has written there
            return None
        return Claimed(
            number,
            self._place,
            self._address,
            self._node,
            found.address,
            found.port,
            found.key,
            site.place,
            conducts=has_won,
            hosts_store=found.hosts_store,
        )

    def _is_lost(self, number: int) -> bool:
        """Whether the conductor of that number has said goodbye, or its node is silent."""
        store, key = self._site.store, self._key(number)
        first, end_s = int(store.add(f"{key}/pulse", 0)), time.monotonic() + SILENT_S
        while time.monotonic() < end_s:
            if has_keys(store, [f"{key}/gone"]):
                return True
            if int(store.add(f"{key}/pulse", 0)) != first:
                return False
            self._pause()
        return True

    def look(self) -> ByTorch | Outranked | None:
        """Called about once a second: count, and see whether this node may conduct on; None: it may."""
        if not self._conducts:
            return None
        store, key = self._site.store, self._key(self._conducts)
        store.add(f"{key}/pulse", 1)
        if has_keys(store, [self._key(self._conducts + 1)]):
            self._conducts = 0
            return Outranked()
        view = self._site.view()
        if view.participants or view.waiting:
            self._conducts = 0
            return ByTorch()
        return None

    def leave(self) -> None:
        """Tell the others that this node conducts no more."""
        if self._conducts:
            self._site.store.set(f"{self._key(self._conducts)}/gone", "")

    @property
    def are_won(self) -> bool:
        """Whether this node conducts."""
        return self._conducts > 0

    def _key(self, number: int) -> str:
        return f"dsl/{self._site.order.run_id}/conductor/{number}"

    def _pause(self) -> None:
        self._check()
        time.sleep(ASK_S)
