"""`dsl --elastic_training` on several hosts: hosts are lost and come back, workers fail, and the job goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.kit.cluster import MPI, Cluster
from tests.support.elastic import BOUND_S, HEARTBEAT_S, SLOTS, elastic
from tests.support.fleet import SSH, Ways, gone_within, kill

FAMILIES = ("ssh", "pdsh", "openmpi5", "mpich5", "slurm")
"""One launcher of each kind."""

# Of those that share their way of ending programs one stands for all in every run.
ALL = [
    pytest.param(name, marks=[] if name in FAMILIES else [pytest.mark.stress])
    for name in ("ssh", "pdsh", *MPI, "slurm")
]


@pytest.mark.parametrize("ways", ALL, indirect=True)
def test_a_host_that_is_lost_and_comes_back_costs_no_restart(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways
) -> None:
    with elastic(hosts, dsl_command, tmp_path / "job", ways, "1:3") as job:
        first = job.until_attempt(0, 6)
        assert [(one.rank, one.host) for one in first] == [
            (rank, f"node{rank // SLOTS}") for rank in range(6)
        ]
        assert {(one.world_size, one.reason, one.restarts) for one in first} == {(6, "start", 0)}
        hosts[1].crash()
        second = job.until_attempt(1, 4)
        assert [one.host for one in second] == ["node0", "node0", "node2", "node2"]
        assert {(one.world_size, one.reason, one.restarts) for one in second} == {(4, "membership", 0)}
        hosts[1].boot()
        third = job.until_attempt(2, 6)
        assert [one.host for one in third] == [one.host for one in first]
        assert {(one.world_size, one.reason, one.restarts) for one in third} == {(6, "membership", 0)}
        job.finish()
        gone_within(hosts)
    assert "host node1 (ranks 2-3) was lost: it has closed the connection" in job.fleet.stderr


@pytest.mark.parametrize("ways", ALL, indirect=True)
def test_workers_that_fail_cost_restarts_until_these_are_spent(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways
) -> None:
    with elastic(hosts, dsl_command, tmp_path / "job", ways, "1:3", "--max-restarts", "1") as job:
        job.until_attempt(0, 6)
        job.touch("fail.3.0")
        second = job.until_attempt(1, 6)
        assert {(one.world_size, one.reason, one.restarts) for one in second} == {(6, "failure", 1)}
        job.touch("fail.4")
        assert job.fleet.wait() == 9
        gone_within(hosts)
    assert "starting all hosts again, restart 1 of 1" in job.fleet.stderr
    assert "host node2) failed first: exit code 9" in job.fleet.stderr
    assert job.fleet.stderr.rstrip().endswith("2 attempts have failed")


def test_a_host_whose_agent_is_told_to_end_leaves(hosts: Cluster, dsl_command: Path, tmp_path: Path) -> None:
    with elastic(hosts, dsl_command, tmp_path / "job", SSH, "2:3") as job:
        job.until_attempt(0, 6)
        guard, _ = job.fleet.agents(hosts[2])[0]
        kill(hosts[2], guard, signal.SIGTERM)
        second = job.until_attempt(1, 4)
        assert [one.host for one in second] == ["node0", "node0", "node1", "node1"]
        job.finish()
        gone_within(hosts)
    assert "host node2 has left: SIGTERM received there" in job.fleet.stderr


@pytest.mark.parametrize("victim", ["guard", "agent"])
def test_whoever_of_a_host_is_killed_the_others_go_on(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, victim: str
) -> None:
    with elastic(hosts, dsl_command, tmp_path / "job", SSH, "2:3", "--max-restarts", "0") as job:
        job.until_attempt(0, 6)
        guard, agent = job.fleet.agents(hosts[2])[0]
        kill(hosts[2], guard if victim == "guard" else agent)
        second = job.until_attempt(1, 4)
        assert {(one.host, one.reason) for one in second} == {
            ("node0", "membership"),
            ("node1", "membership"),
        }
        job.until_attempt(2, 6)
        job.finish()
        gone_within(hosts)


def test_a_spare_takes_the_place_of_a_lost_host(hosts: Cluster, dsl_command: Path, tmp_path: Path) -> None:
    with elastic(hosts, dsl_command, tmp_path / "job", SSH, "2:2") as job:
        job.until_attempt(0, 4)
        job.fleet.until_said("host node2 is a spare")
        hosts[1].crash()
        second = job.until_attempt(1, 4)
        assert [(one.rank, one.host) for one in second] == [
            (0, "node0"), (1, "node0"), (2, "node2"), (3, "node2"),
        ]  # fmt: skip
        job.finish()
        gone_within(hosts)


def test_a_host_that_cannot_be_reached_at_first_is_taken_in(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    hosts[2].crash()
    with elastic(hosts, dsl_command, tmp_path / "job", SSH, "2:3") as job:
        job.until_attempt(0, 4)
        assert "host node2: cannot be reached" in job.fleet.stderr
        hosts[2].boot()
        job.until_attempt(1, 6)
        job.finish()
        gone_within(hosts)


def test_too_few_hosts_are_waited_for_and_then_named(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    with elastic(hosts, dsl_command, tmp_path / "job", SSH, "3:3", "--elastic-wait", "4") as job:
        job.until_attempt(0, 6)
        hosts[1].crash()
        assert job.fleet.wait(BOUND_S) == 1
        gone_within([hosts[0], hosts[2]])
    assert "host node1 (ranks 2-3) was lost: it has closed the connection" in job.fleet.stderr
    assert "2 of at least 3 hosts are there, and no more came within 4 s" in job.fleet.stderr


@pytest.mark.parametrize("name, code", [("INT", 130), ("TERM", 143), ("KILL", -9)])
def test_a_signal_ends_all_hosts_spares_too(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, name: str, code: int
) -> None:
    with elastic(hosts, dsl_command, tmp_path / "job", SSH, "1:2") as job:
        job.until_attempt(0, 4)
        job.fleet.until_said("host node2 is a spare")
        job.fleet.process.send_signal(getattr(signal, f"SIG{name}"))
        assert job.fleet.wait() == code
        gone_within(hosts)


@pytest.mark.stress
@pytest.mark.parametrize("loss", ["poweroff", "unplug", "freeze"])
@pytest.mark.parametrize("ways", FAMILIES, indirect=True)
def test_a_host_that_falls_silent_is_lost_within_the_heartbeat(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways, loss: str
) -> None:
    if loss == "freeze" and hosts[1].cgroup is None:
        pytest.skip("needs a writable cgroup v2")
    with elastic(hosts, dsl_command, tmp_path / "job", ways, "1:3") as job:
        job.until_attempt(0, 6)
        getattr(hosts[1], loss)()
        second = job.until_attempt(1, 4)
        assert [one.host for one in second] == ["node0", "node0", "node2", "node2"]
        if loss == "unplug":
            hosts[1].plug()
        elif loss == "freeze":
            hosts[1].thaw()
        if loss != "poweroff":
            third = job.until_attempt(2, 6)
            assert [one.host for one in third] == [f"node{rank // SLOTS}" for rank in range(6)]
        job.finish()
        gone_within([hosts[0], hosts[2]] if loss == "poweroff" else hosts, HEARTBEAT_S + 30)


@pytest.mark.stress
@pytest.mark.parametrize("ways", ["slurm"], indirect=True)
def test_an_allocation_of_slurm_that_may_lose_nodes_goes_on_without_one(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways
) -> None:
    command = tmp_path / "dsl-in-allocation"
    command.write_text(
        f'#!/bin/sh\nexec salloc --quiet --no-kill --nodes 3 --ntasks-per-node 1 {dsl_command} "$@"\n'
    )
    command.chmod(0o755)
    with elastic(hosts, command, tmp_path / "job", ways, "1:3") as job:
        job.until_attempt(0, 6)
        hosts[1].crash()
        second = job.until_attempt(1, 4)
        assert [one.host for one in second] == ["node0", "node0", "node2", "node2"]
        job.finish()
        gone_within([hosts[0], hosts[2]])
