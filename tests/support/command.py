"""Command lines of `dsl` as the tests use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def dsl_line(
    dsl: Path, workers: int, program: Sequence[str], grace_s: float | None = None, *options: str
) -> list[str]:
    """`dsl` that runs `program` as it stands, `workers` times on this machine."""
    grace = [] if grace_s is None else ["--grace", str(grace_s)]
    return [
        str(dsl),
        "--no_python",
        "--no_local_rank",
        "--num_gpus",
        str(workers),
        *grace,
        *options,
        *program,
    ]
