"""What the kernel, the engine and the driver of the GPUs say of the workers of one node."""

from __future__ import annotations

import os
import time

from dsl._core import vitals
from dsl._record import Record
from dsl.model.observation import Look, NodeStatus, RankStatus
from dsl.printable import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dsl import Supervisor
    from dsl.devices.gpu_use import GpuUse
    from dsl.model.node import NodePlan, WorkerPlan
    from dsl.model.outcome import History

PART = 128
"""Ranks in one message, which may have a mebibyte."""

LONGEST_SAID = 160
"""Characters of a line of output."""

LONGEST_LOG = 500
"""Characters of the path of a log file."""

MASK = "CUDA_VISIBLE_DEVICES"


class State(Record):
    """Where the job of an agent stands."""

    plan: NodePlan
    """The plan of the present attempt."""
    history: History
    """The attempts before it."""
    started_ns: int
    """CLOCK_REALTIME when the first attempt began."""
    begin_s: float
    """`time.monotonic` when the present attempt began."""


def statuses(look: Look, state: State, supervisor: Supervisor, gpus: GpuUse) -> Iterator[NodeStatus]:
    """The answers to a question, with all workers of the node."""
    plan = state.plan
    # Between two attempts there are none.
    pids = supervisor.pids() or [0] * len(plan.workers)
    lines = supervisor.last_lines()
    used = gpus.of(pids, [(worker.local_rank, _mask(worker, plan.env)) for worker in plan.workers])
    age_ms = int((time.monotonic() - state.begin_s) * 1000)
    rows = zip(plan.workers, pids, vitals(pids), used, strict=False)
    found = [
        RankStatus(
            worker.rank,
            worker.local_rank,
            pid if uses else 0,
            *(uses or ("", 0, 0, 0)),
            _said(lines.get(index)),
            *gpu,
            _log(worker)[:LONGEST_LOG] if look.with_logs else "",
        )
        for index, (worker, pid, uses, gpu) in enumerate(rows)
    ]
    for first in range(0, len(found), PART):
        part = tuple(found[first : first + PART])
        restarts = state.history.restarts
        yield NodeStatus(look.number, plan.node_rank, plan.host, plan.attempt, part, restarts, age_ms)


def _said(line: bytes | None) -> str:
    return printable(line.decode("utf-8", "replace")).strip()[:LONGEST_SAID] if line else ""


def _log(worker: WorkerPlan) -> str:
    """The log file to which a worker has written last; empty: it has none."""
    found = []
    for route in (worker.stdout, worker.stderr):
        if route is not None and route.path is not None:
            try:
                about = os.stat(route.path)
            except OSError:
                continue
            found.append((about.st_size > 0, about.st_mtime_ns, route.path))
    return max(found)[2] if found else ""


def _mask(worker: WorkerPlan, env: Mapping[str, str]) -> str | None:
    """The devices that a worker may see, as its variable says."""
    return worker.env.get(MASK, env.get(MASK))
