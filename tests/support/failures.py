"""Failures of workers that nobody has started."""

from __future__ import annotations

from typing import Any

from dsl._record import replace
from dsl.model.judgement import Failure

AT_NS = 1_767_323_045 * 10**9
"""2026-01-02 03:04:05 UTC."""


def a_failure(rank: int = 0, **fields: Any) -> Failure:
    """Of this rank; the ranks fail in their order."""
    base = Failure(
        rank=rank,
        local_rank=rank,
        host="node7",
        pid=100 + rank,
        exitcode=1,
        time_ns=AT_NS,
        order=rank,
        error_file=None,
        recorded=None,
        recorded_ns=None,
        reason="exit code 1",
    )
    return replace(base, **fields)
