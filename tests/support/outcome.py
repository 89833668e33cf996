"""Calls that either succeed or fail as they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def error_of(kind: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """What the call complained about, empty if it did not; an error of another kind is not caught."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    return ""


def assert_one_line(text: str) -> None:
    """An error message as users get it (G8)."""
    assert len(text.splitlines()) == 1
    assert not text.endswith(".")
