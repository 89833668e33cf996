"""An elastic job under random events, which a seed repeats: as long as one host is there, it goes on.

``DSL_CHAOS_SEED`` names another seed, ``DSL_CHAOS_EVENTS`` how many events there are.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster, Host
from tests.kit.waiting import until
from tests.support.elastic import HEARTBEAT_S, Job, elastic
from tests.support.fleet import SSH, gone_within, kill

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
