"""Spares of `dslrun` with fixed places, each node on a host of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster import Cluster, Host
from tests.kit.elastic import PORT, etcd, rendezvous
from tests.kit.waiting import until
from tests.support.fleet import gone_within, lost
from tests.support.jobs import complete_lines

WORKER = """#!/bin/sh
echo "$TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON $RANK $(uname -n) $MASTER_ADDR" >> "$1/seen"
until [ -e "$1/end" ]; do
  [ ! -e "$1/fail.$RANK.$TORCHELASTIC_RESTART_COUNT" ] || exit 7
  sleep 0.02
done
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The worker, which notes that it runs."""
    path = tmp_path / "worker"
    path.write_text(WORKER)
    path.chmod(0o755)
    return path


def attempt(folder: Path, number: int) -> list[str]:
    """What the two workers of an attempt have noted."""
    until(lambda: len(complete_lines(folder / "seen")) >= 2 * number + 2, timeout_s=60)
    return sorted(complete_lines(folder / "seen")[2 * number : 2 * number + 2])


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("loss", ["crash", "unplug"])
def test_rank_0_moves_to_a_spare_and_the_bad_node_then_takes_the_place_of_a_lost_one(
    hosts: Cluster, dsl_command: Path, program: Path, tmp_path: Path, loss: str
) -> None:
    """All nodes hear by which address they reach the host of rank 0."""

    def said(rank: int) -> str:
        return (tmp_path / f"said{rank}").read_text(encoding="utf-8")

    jobs: list[Any] = []
    with contextlib.ExitStack() as stack:
        for rank in (2, 1, 0):
            line = f"--nnodes=2 --spares=1 --node-rank={rank} --grace=1 --max-restarts=3 --no-python"
            line += " --master-addr=node0 --master-port=29500 --rdzv-conf=keep_alive_interval=1"
            command = [
                str(one) for one in (dsl_command.with_name("dslrun"), *line.split(), program, tmp_path)
            ]
            file = stack.enter_context((tmp_path / f"said{rank}").open("w"))
            job: Any = hosts[rank].start(command, stderr=file)
            stack.enter_context(job)
            stack.callback(job.kill)
            jobs.insert(0, job)
        assert attempt(tmp_path, 0) == ["0 start 0 node0 node0", "0 start 1 node1 node0"]
        until(lambda: "is a spare" in said(0))
        for number in (0, 1):
            (tmp_path / f"fail.0.{number}").touch()
            seen = attempt(tmp_path, number + 1)
        address = hosts[2].address
        assert seen == [f"2 failure 0 node2 {address}", f"2 failure 1 node1 {address}"]
        with lost(hosts[1], loss):
            assert attempt(tmp_path, 3) == [
                f"2 membership 0 node2 {address}",
                f"2 membership 1 node0 {address}",
            ]
            (tmp_path / "end").touch()
            assert [jobs[rank].wait(timeout=30) for rank in (0, 2)] == [0, 0], said(0)
    gone_within(hosts, 20)
    for text in (said(0), said(2)):
        assert "node 0 (node0) failed first twice in a row: node 2 (node2) takes its place" in text
        assert "node 0 (node0) takes the place of node 1 (node1)" in text


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])
def test_a_node_beyond_max_takes_the_ranks_of_a_bad_one(
    hosts: Cluster, dsl_command: Path, program: Path, tmp_path: Path, backend: str
) -> None:
    with contextlib.ExitStack() as stack:
        is_etcd = backend != "c10d"
        endpoint = stack.enter_context(etcd(hosts[0])) if is_etcd else f"{hosts[0].name}:{PORT}"
        where = rendezvous(backend, endpoint, last_call_timeout=1, keep_alive_interval=1, join_timeout=60)
        options = {**where, "--nnodes": "2", "--max-restarts": "2"}

        def join(host: Host) -> Any:
            file = stack.enter_context((tmp_path / f"said.{host.name}").open("w"))
            words = [
                *[f"{name}={value}" for name, value in options.items()],
                "--no-python",
                program,
                tmp_path,
            ]
            command = [str(word) for word in (dsl_command.with_name("dslrun"), *words)]
            job = stack.enter_context(host.start(command, stderr=file))
            stack.callback(job.kill)
            return job

        def said() -> str:
            return (tmp_path / "said.node0").read_text(encoding="utf-8")

        jobs = [join(hosts[0]), join(hosts[1])]
        assert [line.split()[2:4] for line in attempt(tmp_path, 0)] == [["0", "node0"], ["1", "node1"]]
        jobs.append(join(hosts[2]))
        until(lambda: "is a spare" in said(), timeout_s=60)
        for number in (0, 1):
            (tmp_path / f"fail.1.{number}").touch()
            seen = attempt(tmp_path, number + 1)
        assert [line.split()[2:4] for line in seen] == [["0", "node0"], ["1", "node2"]]
        (tmp_path / "end").touch()
        assert [job.wait(timeout=60) for job in jobs] == [0, 0, 0], said()
        assert "node node1 failed first twice in a row: node node2 takes its place" in said()
    gone_within(hosts, 20)
