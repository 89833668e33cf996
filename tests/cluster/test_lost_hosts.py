"""A host that is lost is named in time, a head that is lost leaves nothing behind."""

from __future__ import annotations

import time

import pytest
from tests.kit.cluster import Cluster
from tests.support.fleet import PLAIN, WILD, Launch, Ways, gone_within, lost

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
