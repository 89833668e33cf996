"""The hosts are what the other tests take them for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster, Host, Slurm, standing


def test_what_is_left_on_a_host_is_found(hosts: Cluster, wait_until: WaitUntil) -> None:
    hosts[0].run(["ssh", "node1", "setsid sleep 77 </dev/null >/dev/null 2>&1 &"], check=True)

    def found() -> list[tuple[Host, str]]:
        return [(host, text.split(" ", 1)[1]) for host, texts in hosts.leftovers().items() for text in texts]

    wait_until(lambda: found() == [(hosts[1], "sleep 77")])
    hosts[1].run(["pkill", "-x", "sleep"], check=True)


def test_a_second_cluster_with_the_same_addresses_is_apart(hosts: Cluster) -> None:
    with Cluster(2) as other:
        assert other[0].address == hosts[0].address
        assert other.state != hosts.state
        other[0].run(["ssh", "node1", "touch ~/here"], check=True)
        assert (other.home / "here").exists()
        assert not (hosts.home / "here").exists()
        other[1].crash()
        assert hosts[0].run(["ssh", "node1", "hostname"], check=True).stdout == "node1\n"
        assert {*other.carriers()} <= standing()
    assert not other.state.exists()


def test_a_host_ends_with_whoever_started_it(hosts: Cluster, wait_until: WaitUntil) -> None:
    program = (
        "from tests.kit.cluster import Cluster; import time\n"
        "with Cluster(1) as one: print(one[0].pid, one.state, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        pid, state = process.stdout.readline().split()
        process.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    shutil.rmtree(state)
    if hosts[0].cgroup is not None:
        cgroup = hosts[0].cgroup.parent.parent / Path(state).name

        def removed() -> bool:
            hosts.remove_stale_cgroups()  # what carried the host may live for a moment longer
            return not cgroup.exists()

        wait_until(removed)


def test_a_job_of_slurm_ends_with_its_test(hosts: Cluster, slurm: Slurm, wait_until: WaitUntil) -> None:
    process = hosts[0].start(["srun", "-N3", "sleep", "60"])
    wait_until(lambda: len(hosts.leftovers()) == 3)
    process.kill()
    process.wait()
    slurm.clear()
    wait_until(lambda: not hosts.leftovers())
