"""A view into a job on several hosts: one socket and one file of metrics where the command was typed."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster import Cluster, Host
from tests.kit.waiting import until
from tests.support.backends import Backend
from tests.support.jobs import complete_lines

WORKER = """#!/bin/sh
echo "$RANK $$" >> "$1"
exec sleep 600
"""

LOOK = """
import json, sys
from dsl.view.jobs import running_jobs
found = []
for job in running_jobs():
    if sys.argv[1] not in job.view.words:
        continue
    nodes, missing = job.look("status")
    ranks = {f"{node.host} {rank.rank}": rank.pid for node in nodes for rank in node.ranks}
    found.append([job.view.nodes, job.view.workers, job.view.is_whole, ranks, missing])
print(json.dumps(found))
"""


def look(host: Host, folder: Path, program: Path) -> Any:
    """What a view on this host sees: nodes, workers, whether that is all, the pids of the ranks, missing hosts.

    The hosts share the directories of sockets with this machine, so jobs of other tests are passed over.
    """
    command = [sys.executable, "-c", LOOK, str(program)]
    result = host.run(command, env={"XDG_RUNTIME_DIR": str(folder)}, timeout_s=60)
    return json.loads(result.stdout)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "worker"
    path.write_text(WORKER)
    path.chmod(0o755)
    return path


def test_one_view_shows_the_ranks_of_all_hosts(
    hosts: Cluster, backend: Backend, dsl_command: Path, program: Path, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=2\nnode2 slots=1\n")
    line: list[str | Path] = [
        dsl_command,
        "-H",
        "hosts",
        *backend.words,
        "--metrics",
        "job.prom",
        "--no_local_rank",
        "--no_python",
        program,
        tmp_path / "seen",
    ]
    env = {"DS_ACCELERATOR": "cpu", "XDG_RUNTIME_DIR": str(tmp_path), **backend.env}
    with hosts[0].start(line, env=env, cwd=tmp_path) as job, contextlib.ExitStack() as stack:
        stack.callback(job.kill)
        until(lambda: len(complete_lines(tmp_path / "seen")) == 4, timeout_s=60)
        lines = complete_lines(tmp_path / "seen")
        pids = {rank: int(pid) for rank, pid in (one.split() for one in lines)}
        ((nodes, workers, is_whole, ranks, missing),) = look(hosts[0], tmp_path, program)
        assert (nodes, workers, is_whole, missing) == (3, 4, True, [])
        places = {"0": "node0", "1": "node1", "2": "node1", "3": "node2"}
        assert ranks == {f"{places[rank]} {rank}": pid for rank, pid in pids.items()}
        labels = [f'{{host="{place}",node="{place[-1]}",rank="{rank}"}}' for rank, place in places.items()]
        metrics = tmp_path / "job.prom"
        until(lambda: all(f"dsl_rank_threads{one} 1.0\n" in metrics.read_text() for one in labels))


def test_node_0_shows_all_nodes_and_another_node_its_part(
    hosts: Cluster, dsl_command: Path, program: Path, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        for rank in (1, 0):
            folder = tmp_path / f"run{rank}"
            folder.mkdir(mode=0o700)
            line = f"--nnodes=2 --node-rank={rank} --nproc-per-node=2 --master-addr=node0 --master-port=29500"
            command: list[str | Path] = [
                dsl_command.with_name("dslrun"),
                *line.split(),
                "--no-python",
                program,
                tmp_path / "seen",
            ]
            job = hosts[rank].start(command, env={"XDG_RUNTIME_DIR": str(folder)})
            stack.enter_context(job)
            stack.callback(job.kill)
        until(lambda: len(complete_lines(tmp_path / "seen")) == 4, timeout_s=60)
        ((nodes, workers, is_whole, ranks, missing),) = look(hosts[0], tmp_path / "run0", program)
        assert (nodes, workers, is_whole, missing) == (2, 4, True, [])
        assert sorted(ranks) == ["node0 0", "node0 1", "node1 2", "node1 3"]
        ((nodes, workers, is_whole, ranks, missing),) = look(hosts[1], tmp_path / "run1", program)
        assert (workers, is_whole, sorted(ranks)) == (4, False, ["node1 2", "node1 3"])
