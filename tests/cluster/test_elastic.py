"""`dsl --elastic_training` on several hosts: hosts are lost and come back, workers fail, and the job goes on.

``DSL_CHAOS_SEED`` names another seed of the random events, ``DSL_CHAOS_EVENTS`` how many events there are.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.kit.cluster import MPI, Cluster, Host
from tests.kit.waiting import until
from tests.support.elastic import BOUND_S, HEARTBEAT_S, SLOTS, Job, elastic
from tests.support.fleet import SSH, Ways, gone_within, kill, running

from dsl.model.request import DEFAULT_HOSTFILE

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


@pytest.mark.parametrize("ways", ALL, indirect=True)
def test_a_failure_that_the_policy_excludes_ends_the_job_on_all_hosts(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways
) -> None:
    """The loss of a host is no failure."""
    with elastic(hosts, dsl_command, tmp_path / "job", ways, "1:3", "--restart-on", "1-8") as job:
        job.until_attempt(0, 6)
        job.touch("fail.3.0")
        job.until_attempt(1, 6)
        hosts[2].crash()
        job.until_attempt(2, 4)
        job.touch("fail.0")
        assert job.fleet.wait() == 9
        gone_within(hosts)
    assert "not tried again: exit code 9 is not in --restart-on" in job.fleet.stderr


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


@pytest.mark.parametrize("ways", ["ssh", "pdsh"], indirect=True)
def test_hosts_come_and_go_as_a_program_lists_them(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways
) -> None:
    """The host of rank 0 goes, too, where the command itself stays."""
    path = tmp_path / "listed"

    def show(*names: str) -> None:
        path.with_suffix(".new").write_text("".join([f"{name}:{SLOTS}\n" for name in names]))
        path.with_suffix(".new").rename(path)

    show("node0", "node1")
    words = ("--hostfile", DEFAULT_HOSTFILE, "--discover", f"cat {path}")
    with elastic(hosts, dsl_command, tmp_path / "job", ways, "1:3", *words) as job:
        job.until_attempt(0, 4)
        show("node2", "node1", "node0")
        second = job.until_attempt(1, 6)
        assert [one.host for one in second] == ["node0", "node0", "node1", "node1", "node2", "node2"]
        show("node1", "node2")
        third = job.until_attempt(2, 4)
        assert [one.host for one in third] == ["node1", "node1", "node2", "node2"]
        assert {(one.world_size, one.reason, one.restarts) for one in third} == {(4, "membership", 0)}
        until(lambda: not job.fleet.agents(hosts[0]))
        hosts[2].crash()
        job.until_attempt(3, 2)
        show("node1", "node0")
        assert [one.host for one in job.until_attempt(4, 4)] == ["node0", "node0", "node1", "node1"]
        job.finish()
        gone_within(hosts)


def test_a_host_that_failed_first_twice_in_a_row_gives_its_ranks_to_a_spare(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    with elastic(hosts, dsl_command, tmp_path / "job", SSH, "2:2", "--max-restarts", "2") as job:
        job.until_attempt(0, 4)
        job.fleet.until_said("host node2 is a spare")
        job.touch("fail.0.0")
        assert [one.host for one in job.until_attempt(1, 4)] == ["node0", "node0", "node1", "node1"]
        job.touch("fail.1.1")
        third = job.until_attempt(2, 4)
        assert [one.host for one in third] == ["node2", "node2", "node1", "node1"]
        job.touch("fail.3")
        assert job.fleet.wait() == 9
        gone_within(hosts)
    line = "host node0 failed first twice in a row: host node2 takes its place"
    assert f"dsl: {line}" in job.fleet.stderr
    assert f"dsl: before: {line}" in job.fleet.stderr


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


SEED = int(os.environ.get("DSL_CHAOS_SEED", "1"))
EVENTS = int(os.environ.get("DSL_CHAOS_EVENTS", "100"))
LONGEST_PAUSE_S = 1.5
"""Between two events."""
TOGETHER_S = 150.0
"""At the end: a host that was lost often is tried again after a minute, and ssh may have to wait, too."""


def is_well(host: Host) -> bool:
    """Whether a host can take part."""
    return host.is_up and host.is_plugged


class Chaos:
    """What can happen to the hosts of a job. One of them at least stays well."""

    def __init__(self, hosts: list[Host], job: Job, seed: int) -> None:
        self.hosts = hosts
        self.job = job
        self.random = random.Random(seed)
        self.done: list[str] = []

    def strike(self) -> None:
        """Do the next thing."""
        host = self.random.choice(self.hosts)
        event = self.random.choice(("crash", "cable", "worker", "agent", "guard", "leave"))
        others_well = any(is_well(one) for one in self.hosts if one is not host)
        if not is_well(host):
            event = "return"
            if not host.is_up:
                host.boot()
            if not host.is_plugged:
                host.plug()
        elif event in ("crash", "cable"):
            if not others_well:
                return
            host.crash() if event == "crash" else host.unplug()
        elif event == "worker":
            workers = [
                one.pid for one in host.strangers() if "worker.sh" in one.command and one.name == "worker.sh"
            ]
            for pid in workers[:1]:
                kill(host, pid)
        else:
            for guard, agent in self.job.fleet.agents(host)[:1]:
                signum = signal.SIGTERM if event == "leave" else signal.SIGKILL
                try:
                    kill(host, agent if event == "agent" else guard, signum)
                except Exception:  # noqa: BLE001  it has ended meanwhile
                    event += " (gone)"
        self.done.append(f"{event} {host.name}")

    def end(self) -> None:
        """Put everything right."""
        for host in self.hosts:
            if not host.is_up:
                host.boot()
            if not host.is_plugged:
                host.plug()


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_a_job_goes_on_whatever_happens_to_its_hosts(dsl_command: Path, tmp_path: Path) -> None:
    with Cluster(5) as cluster:
        hosts = cluster.hosts[1:]
        with elastic(
            cluster, dsl_command, tmp_path / "job", SSH, "1:4", "--max-restarts", "100000",
            hosts=hosts, slots=1,
        ) as job:  # fmt: skip
            job.until_attempt(0, 4)
            chaos = Chaos(hosts, job, SEED)
            for _ in range(EVENTS):
                chaos.strike()
                time.sleep(
                    chaos.random.uniform(0, LONGEST_PAUSE_S)
                )  # events have no reason to wait for each other
                assert job.fleet.process.poll() is None, (chaos.done, job.fleet.stderr[-3000:])
            chaos.end()
            until(lambda: job.newest() and job.newest()[0].world_size == len(hosts), TOGETHER_S)
            attempt = job.newest()[0].attempt
            job.until_attempt(attempt, len(hosts))
            job.finish()
            gone_within(cluster, HEARTBEAT_S + 10)
        print(f"{len(chaos.done)} events, {attempt + 1} attempts: {', '.join(chaos.done)}")


WORKER = """\
import os, sys, time
import torch
import torch.distributed as dist

folder = sys.argv[1]
dist.init_process_group("gloo")
own = [os.environ[name] for name in ("DSL_ATTEMPT", "RANK", "WORLD_SIZE")]
own += [os.uname().nodename, os.environ["DSL_RESTART_REASON"], os.environ["TORCHELASTIC_RESTART_COUNT"]]
dist.barrier()
with open(f"{folder}/log", "a") as log:
    log.write(" ".join(own) + "\\n")
ends = torch.zeros(2)
while not ends[1]:
    time.sleep(0.02)
    ends = torch.tensor([1.0, float(os.path.exists(f"{folder}/done"))])
    dist.all_reduce(ends)
    assert ends[0] == dist.get_world_size()
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.timeout(240)
@pytest.mark.parametrize("loss", ["crash", pytest.param("unplug", marks=pytest.mark.stress)])
def test_training_goes_on_when_a_host_is_lost_that_of_rank_0_too(
    dsl_command: Path, tmp_path: Path, loss: str
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    with Cluster(4) as cluster:
        hosts = cluster.hosts[1:]
        names = [host.name for host in hosts]
        ways = Ways("ssh", ("--elastic_training", "--master_addr", hosts[0].address))
        options = (
            "--num_nodes",
            "1:3",
            "--max-restarts",
            "0",
            "--heartbeat",
            f"{HEARTBEAT_S:g}",
            "--grace",
            "2",
        )
        with running(
            cluster, dsl_command, folder, [str(worker), str(folder)],
            ways=ways, options=options, hosts=hosts, slots=1, is_python=True, lets_rank=True,
        ) as fleet:  # fmt: skip
            job = Job(fleet)
            assert [one.host for one in job.until_attempt(0, 3)] == names
            lost = hosts[0] if loss == "crash" else hosts[2]
            getattr(lost, loss)()
            assert [one.host for one in job.until_attempt(1, 2)] == [one for one in names if one != lost.name]
            lost.boot() if loss == "crash" else lost.plug()
            last = job.until_attempt(2, 3)
            assert [one.host for one in last] == names
            assert {(one.reason, one.restarts) for one in last} == {("membership", 0)}
            job.finish()
            gone_within(cluster)
