"""What the stores of every version of torch can be asked."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

ABSENT = "\x00absent"
"""A value that no key has."""


def read_json(text: str | bytes) -> dict[str, Any] | None:
    """The object that somebody has written; None: something else."""
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
    # Before torch 2.3 none can be asked. Comparing makes no key, and says that an absent one is as expected.
    return all(bytes(store.compare_set(key, ABSENT, ABSENT)) != ABSENT.encode() for key in keys)
