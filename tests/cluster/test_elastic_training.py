"""An elastic job whose workers really talk to each other: those that lose a peer fail, and that costs no restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.cluster import Cluster
from tests.support.elastic import HEARTBEAT_S, Job
from tests.support.fleet import Ways, gone_within, running

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

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
