"""A job of several nodes whose places are fixed, as several commands on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.jobs import Job
from tests.support.places import Nodes

SUM = """
import datetime, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
value = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(value)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 3:
    sys.exit(5)
dist.barrier()
with open(sys.argv[1] + "/" + os.environ["RANK"], "w") as file:
    names = ["GROUP_RANK", "LOCAL_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]
    print(dist.get_world_size(), int(value), *[os.environ[name] for name in names], file=file)
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("address", ["[::1]", "localhost"])
def test_unequal_nodes_with_roles_meet_and_restart_together(
    address: str, nodes: Nodes, tmp_path: Path
) -> None:
    """Commands as on three machines, a collective over all their workers, and another one after a failure."""
    script = tmp_path / "sum.py"
    script.write_text(SUM, encoding="utf-8")
    options = [
        "--nproc-per-node=2 --role=train",
        "--nproc-per-node=1 --role=serve",
        "--nproc-per-node=2 --role=train",
    ]
    jobs = nodes.start(
        *[f"{one} --max-restarts=1" for one in options], address=address, program=(str(script), str(tmp_path))
    )
    assert [job.wait(150) for job in jobs] == [0, 0, 0], [job.stderr() for job in jobs]
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(5)]
    assert found == [
        ["5", "31", group, local, role, size, "1"]
        for group, local, role, size in [
            ("0", "0", "0", "4"),
            ("0", "1", "1", "4"),
            ("1", "0", "0", "1"),
            ("2", "0", "2", "4"),
            ("2", "1", "3", "4"),
        ]
    ]


def test_all_nodes_count_a_restart_and_a_final_failure_ends_the_others(nodes: Nodes) -> None:
    jobs = nodes.start("--max-restarts=1", "--nproc-per-node=2 --max-restarts=1")
    nodes.seen(3)
    nodes.fail(2, 0)
    assert nodes.seen(6)[1::2] == [f"{place} 1 failure" for place in (
        "0/3 0/1 0/2 default:0/3", "1/3 0/2 1/2 default:1/3", "2/3 1/2 1/2 default:2/3"
    )]  # fmt: skip
    nodes.fail(1, 1)
    assert [job.wait() for job in jobs] == [7, 7], [job.stderr() for job in jobs]
    for job in jobs:
        lines = job.stderr().splitlines()
        assert any(line.startswith("dslrun: rank 2 (local rank 1, ") for line in lines), lines
        assert any(line.endswith("restart 1 of 1") for line in lines), lines
        assert any(line.startswith("dslrun: rank 1 (local rank 0, ") for line in lines), lines


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "agent"])
def test_a_node_that_leaves_or_is_lost_ends_the_job_which_names_it(
    how: str, place: int, nodes: Nodes
) -> None:
    """Also where restarts are left: the nodes of such a job are those that they are."""
    jobs = nodes.start("--max-restarts=3", "--max-restarts=3", "--max-restarts=3")
    nodes.seen(3)
    gone = jobs.pop(place)
    if how == "SIGTERM":
        os.kill(gone.guard, signal.SIGTERM)
        assert gone.wait() == 143
    elif how == "agent":
        os.kill(gone.agent(), signal.SIGKILL)
        assert gone.wait() == 137
    else:
        for one in gone.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    name = f"node {place} ({os.uname().nodename})"
    for job in jobs:
        assert job.wait() == (143 if how == "SIGTERM" else 1), job.stderr()
        said = job.stderr()
        if how == "SIGTERM":
            assert f"dslrun: {name} leaves the job, which ends: SIGTERM received there" in said
        else:  # an agent without a guard may still report
            gone_ways = (
                f"{name} (rank {place}) was lost: it ",
                f"{name} has stopped its workers, exit code 1",
            )
            assert any(one in said for one in gone_ways), said
        assert not job.left()
    until(lambda: not gone.left())


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_to_the_first_node_ends_the_job_in_the_same_way_if_its_workers_have_ended(
    signum: signal.Signals, code: int, nodes: Nodes
) -> None:
    program = ("--no-python", "sh", "-c", f'[ $RANK = 0 ] || exec "{nodes.program}" "{nodes.directory}"')
    options = "--preempt-signal=SIGUSR1 --preempt-grace=2 --grace=2"
    jobs = nodes.start(options, options, options, program=program)
    nodes.seen(2)
    until(lambda: "waiting for the other nodes" in jobs[0].stderr())
    os.kill(jobs[0].guard, signum)
    for job in jobs:
        assert job.wait() == code, job.stderr()
        assert job.stderr().splitlines()[-1].endswith(f" ({signum.name}): ranks 1-2 ended")


def failures(jobs: list[Job]) -> list[str]:
    """What each node says first about the end of the job."""
    return [
        next(line for line in job.stderr().splitlines() if " failed " in line or " was lost" in line)
        for job in jobs
    ]


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_all_nodes_name_the_same_rank_host_and_reason_and_end_with_its_code(rank: int, nodes: Nodes) -> None:
    jobs = nodes.start("", "", "--nproc-per-node=2")
    nodes.seen(4)
    nodes.fail(rank, 0)
    assert [job.wait() for job in jobs] == [7, 7, 7]
    (line,) = set(failures(jobs))
    host = os.uname().nodename
    assert re.fullmatch(
        rf"dslrun: rank {rank} \(local rank \d, pid \d+, host {host}\) failed first: exit code 7", line
    )
    assert all(
        "dslrun: stopped by dslrun: " in job.stderr() or "ended because of it" in job.stderr() for job in jobs
    )


@pytest.mark.guarantee("G1", "G3")
def test_a_first_node_that_is_killed_is_named_by_all_others_which_end_within_the_grace(nodes: Nodes) -> None:
    jobs = nodes.start("--grace=5", "--grace=5", "--grace=5")
    nodes.seen(3)
    os.kill(jobs[0].agent(), signal.SIGKILL)
    assert jobs[0].wait() == 137
    begin_s = time.monotonic()
    assert [job.wait(20) for job in jobs[1:]] == [1, 1]
    assert time.monotonic() - begin_s < 5
    (line,) = set(failures(jobs[1:]))
    name = f"node 0 ({os.uname().nodename})"
    assert line == f"dslrun: {name} (rank 0) was lost: it has closed the connection"
    assert not any(job.left() for job in jobs)


def test_a_node_that_is_interrupted_before_the_others_have_come_leaves_nothing(nodes: Nodes) -> None:
    (job,) = nodes.start("--log-dir=logs", count=2)
    until(lambda: processes.children(job.guard))
    os.kill(job.guard, signal.SIGINT)
    assert job.wait() in (130, -signal.SIGINT)
    until(lambda: not job.left())


def test_a_dry_run_waits_for_nobody(nodes: Nodes) -> None:
    (job,) = nodes.start("--nproc-per-node=2 --dry-run", count=3)
    assert job.wait() == 0
    assert job.stdout().startswith(f"node 0 ({os.uname().nodename}): 2 of 6 workers, ranks 0-1, meeting at ")


def test_no_torch_is_imported_for_nodes_with_fixed_places(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the command nor by its delegate."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    jobs = nodes.start("", "")
    nodes.seen(2)
    nodes.end()
    assert [job.wait() for job in jobs] == [0, 0], [job.stderr() for job in jobs]
