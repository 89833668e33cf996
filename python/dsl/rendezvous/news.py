"""What the delegates of a job tell each other beside torch's protocol, through the store of the rendezvous.

A counter counts the items, and each has a key with its number. Who waits for the next one waits for the
next key, which a TCP store does without asking again and again. Nodes that are not ours neither write nor
read any of it. Stores of files and of etcd are asked again and again, by whoever waits.
"""

from __future__ import annotations

import contextlib
import json
import time

from dsl.rendezvous.stores import has_keys, read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEPT = 256
"""So many items are kept in a store that can forget; whoever sleeps longer starts with the newest."""
POLL_S = 0.05
"""How often a store is asked that cannot tell."""
LOST_S = 2.0
"""A number whose item does not come in that time has none: its writer has gone between the two."""


class News:
    """Writes and reads the items of one job. Each thread that waits needs one on its own connection."""

    def __init__(self, store: Any, run_id: str, *, can_wait: bool) -> None:
        """Begin behind the last item.

        ``can_wait``: the store tells when a key comes.
        """
        self._store = store
        self._key = f"dsl/{run_id}/news"
        self._can_wait = can_wait
        self._next = int(store.add(self._key, 0)) + 1
        self._gap_since_s: float | None = None

    def post(self, item: dict[str, object]) -> None:
        """Tell all others. ``item`` is what JSON can hold."""
        count = int(self._store.add(self._key, 1))
        self._store.set(f"{self._key}/{count}", json.dumps(item))
        if self._can_wait and count > KEPT:
            with contextlib.suppress(Exception):  # not every store can forget
                self._store.delete_key(f"{self._key}/{count - KEPT}")

    def wait(self, timeout_s: float) -> None:
        """Return when there is another item, or after the time, or when the store is gone."""
        from datetime import timedelta

        if self._can_wait:
            begin_s = time.monotonic()
            try:
                self._store.wait([f"{self._key}/{self._next}"], timedelta(seconds=timeout_s))
            except Exception:  # noqa: BLE001 - a timeout has another class in each version of torch
                # A store that is gone raises at once: whoever reads next is told.
                if time.monotonic() - begin_s < timeout_s / 2:
                    time.sleep(POLL_S)
            return
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and not has_keys(self._store, [f"{self._key}/{self._next}"]):
            time.sleep(min(POLL_S, timeout_s))

    def read(self) -> list[dict[str, Any]]:
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
                item = read_json(self._store.get(key))
                if item is not None:
                    found.append(item)
            elif self._is_gap():
                self._next += 1
            else:
                return found

    def _is_gap(self) -> bool:
        """Whether the next number will never have an item, because later ones have and time has gone by."""
        if not has_keys(self._store, [f"{self._key}/{self._next + 1}"]):
            self._gap_since_s = None
            return False
        self._gap_since_s = self._gap_since_s or time.monotonic()
        return time.monotonic() - self._gap_since_s > LOST_S
