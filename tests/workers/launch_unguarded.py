"""A program without a guard: each worker that imports it would start workers again."""

from __future__ import annotations

from dsl.functions.launcher import launch


def nothing() -> None:
    """Return at once."""


print(launch(nothing, nproc_per_node=2))
