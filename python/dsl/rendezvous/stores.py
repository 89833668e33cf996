"""Questions that the stores of every version of torch can answer."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

ABSENT = "\x00absent"
"""A value that no key has."""


def read_json(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a text that another node wrote; None for any other text."""
    from json import loads

    try:
        found = loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def has_keys(store: Any, keys: Iterable[str]) -> bool:
    """Whether all keys are there.

    Raises:
        RuntimeError: the store is gone.
    """
    if hasattr(store, "check"):
        return bool(store.check(list(keys)))
    # Stores before torch 2.3 have no `check`. Comparing makes no key, and reports an absent key as expected.
    return all(bytes(store.compare_set(key, ABSENT, ABSENT)) != ABSENT.encode() for key in keys)
