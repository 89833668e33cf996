"""Nodes with fixed places, a command on each host: they meet by name, and notice each other's loss."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster import Cluster
from tests.kit.waiting import until
from tests.support.fleet import gone_within, lost
from tests.support.jobs import complete_lines

SILENCE_S = 3.0
SOON_S = 10.0
ENDED = "it has closed the connection"
SILENT = "it has not been heard for 3 s"

WORKER = """#!/bin/sh
echo "$RANK/$WORLD_SIZE $ROLE_RANK/$ROLE_WORLD_SIZE $MASTER_ADDR" >> "$1/seen"
exec sleep 600
"""


@contextlib.contextmanager
def started(hosts: Cluster, dsl_command: Path, folder: Path) -> Iterator[list[Any]]:
    """A node on each host, the last one first, with one worker more than the one before."""
    program = folder / "worker"
    program.write_text(WORKER)
    program.chmod(0o755)
    jobs = []
    with contextlib.ExitStack() as stack:
        for rank in (2, 1, 0):
            line = f"--nnodes=3 --node-rank={rank} --nproc-per-node={rank + 1} --grace=1 --max-restarts=3"
            line += " --master-addr=node0 --master-port=29500 --rdzv-conf=keep_alive_interval=1 --no-python"
            command = [str(one) for one in (dsl_command.with_name("dslrun"), *line.split(), program, folder)]
            job: Any = hosts[rank].start(command, stderr=subprocess.PIPE, text=True)
            stack.enter_context(job)
            stack.callback(job.kill)
            jobs.append(job)
        until(lambda: len(complete_lines(folder / "seen")) == 6, timeout_s=20)
        yield jobs[::-1]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "loss, why", [("crash", ENDED), ("poweroff", SILENT), ("unplug", SILENT), ("freeze", SILENT)]
)
def test_a_lost_node_ends_the_job_and_is_named(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, loss: str, why: str, place: int
) -> None:
    with started(hosts, dsl_command, tmp_path) as jobs:
        seen = sorted(complete_lines(tmp_path / "seen"))
        assert seen == [f"{rank}/6 {rank}/6 node0" for rank in range(6)]
        others = [rank for rank in range(3) if rank != place]
        begin_s = time.monotonic()
        with lost(hosts[place], loss):
            told = [jobs[rank].communicate(timeout=30)[1] for rank in others]
            seconds = time.monotonic() - begin_s
            gone_within([hosts[rank] for rank in others])
        for rank, text in zip(others, told, strict=True):
            assert jobs[rank].returncode == 1
            ranks = ("rank 0", "ranks 1-2")[place]
            assert f"node {place} (node{place}) ({ranks}) was lost: {why}" in text, text
        assert seconds < (SILENCE_S if why == SILENT else 0) + SOON_S
        gone_within(hosts, SILENCE_S + SOON_S)
