"""Waiting for what other processes do, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def until(predicate: Callable[[], _T], timeout_s: float = 20.0) -> _T:
    """First true value of `predicate`, called again and again.

    Raises:
        AssertionError: nothing true came within the time.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still not so after {timeout_s} s")
        time.sleep(0.003)
    return value
