"""Messages between the delegates of a job beside torch's protocol, through the rendezvous's store.

A counter counts the items, and each item has a key with its number. To wait for the next item, a delegate
waits for the next key; a TCP store does that without polling. Stores of files and of etcd have to be polled.
Nodes that are not ours neither write nor read these items. Also here: questions that the stores of every
version of torch can answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

from dsl._record import Record
from dsl.errors import JobFormatError
from dsl.model.codec import from_line, to_line
from dsl.model.nodes import PeerFailure
from dsl.model.request import Count
from dsl.rendezvous.view import Node

Item: TypeAlias = "StateChanged | NodeLeft | NodeFailed"

KEPT = 256
"""Most items kept in a store that can delete keys. A reader further behind starts with the newest."""
POLL_S = 0.05
"""How often we poll a store that cannot wait."""
ABSENT = "\x00absent"
"""A value that no key has."""
LOST_S = 2.0
"""If the item of a number does not come in this time, its writer has died between counting and writing."""


class StateChanged(Record):
    """torch's state has changed."""


class NodeLeft(Record):
    """A node has left the job by itself."""

    node: Node


class NodeFailed(Record):
    """A worker of a node has failed."""

    node: Node
    round: Count
    """The round in which its worker ran."""
    failure: PeerFailure


KINDS = {kind.__name__: kind for kind in (StateChanged, NodeLeft, NodeFailed)}


def write_record(store: Any, key: str, value: object) -> None:
    """Write a record."""
    store.set(key, to_line(value))


def read_record(store: Any, key: str, kinds: Mapping[str, type]) -> Any:
    """Read a record of one of these classes; None if the key has something else."""
    try:
        return from_line(store.get(key), kinds)
    except JobFormatError:
        return None


class News:
    """Writes and reads the items of one job. Each waiting thread needs an instance on its own connection."""

    def __init__(self, store: Any, run_id: str, *, can_wait: bool) -> None:
        """Begin after the last item.

        ``can_wait``: the store tells when a key comes.
        """
        self._store = store
        self._key = f"dsl/{run_id}/news"
        self._can_wait = can_wait
        self._next = int(store.add(self._key, 0)) + 1
        self._gap_since_s: float | None = None

    def post(self, item: Item) -> None:
        """Tell all others."""
        count = int(self._store.add(self._key, 1))
        write_record(self._store, f"{self._key}/{count}", item)
        if self._can_wait and count > KEPT:
            with contextlib.suppress(Exception):  # not every store can delete keys
                self._store.delete_key(f"{self._key}/{count - KEPT}")

    def wait(self, timeout_s: float) -> None:
        """Return when there is another item, or after the time, or when the store is gone."""
        end_s = time.monotonic() + timeout_s
        if self._can_wait:
            # A store that is gone makes no key come at once. The next `read` reports that.
            if not wait_for(self._store, [f"{self._key}/{self._next}"], timeout_s):
                time.sleep(max(min(POLL_S, end_s - time.monotonic()), 0))
            return
        while time.monotonic() < end_s and not has_keys(self._store, [f"{self._key}/{self._next}"]):
            time.sleep(min(POLL_S, timeout_s))

    def read(self) -> list[Item]:
        """The items that have come, in order.

        Raises:
            RuntimeError: the store is gone.
        """
        found = []
        while True:
            key = f"{self._key}/{self._next}"
            if has_keys(self._store, [key]):
                self._gap_since_s = None
                self._next += 1
                item = read_record(self._store, key, KINDS)
                if item is not None:
                    found.append(item)
            elif self._is_gap():
                self._next += 1
            else:
                return found

    def _is_gap(self) -> bool:
        """Whether the next number will never have an item: a later number has one, for `LOST_S` now."""
        if not has_keys(self._store, [f"{self._key}/{self._next + 1}"]):
            self._gap_since_s = None
            return False
        self._gap_since_s = self._gap_since_s or time.monotonic()
        return time.monotonic() - self._gap_since_s > LOST_S


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
