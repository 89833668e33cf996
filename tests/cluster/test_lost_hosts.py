"""A host or a node that is lost is named in time, a head that is lost leaves nothing behind."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster import Cluster
from tests.kit.cluster.host import Host
from tests.kit.waiting import until
from tests.support.fleet import PLAIN, WILD, Launch, Ways, gone_within, lost
from tests.support.interrupts import assert_silent
from tests.support.jobs import complete_lines

pytestmark = pytest.mark.guarantee("G1", "G2")

GRACE_S = 0.5
SOON_S = 10.0
"""Far more than a job needs to end; what it takes is measured by the benches."""

LAUNCHERS = (
    *("ssh", "pdsh", "slurm"),
    *(pytest.param(name, marks=pytest.mark.stress) for name in ("openmpi5", "mpich5")),
)

LOSSES = {
    "crash": "has closed the connection",
    "poweroff": "has not been heard for 3 s",
    "unplug": "has not been heard for 3 s",
    "freeze": "has not been heard for 3 s",
}
HEARTBEAT_S = 3.0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ways", LAUNCHERS, indirect=True)
def test_a_lost_host_is_named_and_the_others_are_stopped(
    hosts: Cluster, launch: Launch, ways: Ways, loss: str
) -> None:
    with launch(PLAIN, ways, "--heartbeat", f"{HEARTBEAT_S:g}", "--grace", "1") as job:
        job.ready(6)
        begin_s = time.monotonic()
        with lost(hosts[1], loss):
            assert job.wait() == 1
            seconds = time.monotonic() - begin_s
            gone_within([hosts[0], hosts[2]])
        gone_within(hosts, HEARTBEAT_S + SOON_S)
    assert "host node1 (ranks 2-3) was lost: it " in job.stderr or "rank 2 on host node1" in job.stderr, (
        job.stderr
    )
    assert seconds < HEARTBEAT_S + SOON_S


@pytest.mark.parametrize("loss", ["crash", "unplug", "freeze"])
@pytest.mark.parametrize("ways", LAUNCHERS, indirect=True)
def test_agents_end_their_workers_when_their_head_is_lost(
    hosts: Cluster, launch: Launch, ways: Ways, loss: str
) -> None:
    head = hosts[2]  # the controller of Slurm is on the first host
    with launch(WILD, ways, "--heartbeat", f"{HEARTBEAT_S:g}", "--grace", str(GRACE_S), head=head) as job:
        job.ready(18)
        with lost(head, loss):
            gone_within(hosts.hosts[:2], HEARTBEAT_S + GRACE_S + SOON_S)
        if loss != "crash":
            job.wait(HEARTBEAT_S + SOON_S)
        gone_within(hosts, SOON_S)


SILENCE_S = 3.0

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


# ---- SIGINT in the first moments


ENV = {"DS_ACCELERATOR": "cpu"}
COMMANDS = {
    "dsl": ("-H", "hosts", "--launcher", "ssh", "--no_local_rank", "--no_python"),
    "dslrun": ("--nnodes", "2", "--node-rank", "0", "--master-addr", "node0", "--master-port", "29511", "--no-python"),
}  # fmt: skip


def temporary_files(host: Host) -> str:
    """Their names: other tests may have left some."""
    return str(host.run(["ls", "/run/tmp"], check=True).stdout)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(6, marks=pytest.mark.timeout(120)),
        pytest.param(100, marks=[pytest.mark.stress, pytest.mark.timeout(1800)]),
    ],
)
def test_an_interrupt_at_any_time_is_silent_and_leaves_nothing(
    count: int, command: str, hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    """The fixture finds processes that are left."""
    (tmp_path / "hosts").write_text("".join(f"{name} slots=2\n" for name in hosts.names), encoding="utf-8")
    chance = random.Random(23)
    before = [temporary_files(host) for host in hosts]
    for _ in range(count):
        job = hosts[0].start(
            [dsl_command.with_name(command), *COMMANDS[command], "/bin/sleep", "60"],
            env=ENV,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        delay_s = chance.uniform(0, 0.3)
        with job:
            assert job.child
            time.sleep(delay_s)  # it is a moment of the clock that is tried, nothing is waited for
            job.send_signal(signal.SIGINT)
            _, said = job.communicate(timeout=60)
        assert_silent(job.returncode, said, delay_s)
    assert [temporary_files(host) for host in hosts] == before
