"""SIGINT in the first moments of a job on several hosts: no traceback, and nothing is left on any of them."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster
from tests.kit.cluster.host import Host
from tests.support.interrupts import assert_silent

ENV = {"DS_ACCELERATOR": "cpu"}
COMMANDS = {
    "dsl": ("-H", "hosts", "--launcher", "ssh", "--no_local_rank", "--no_python"),
    "dslrun": ("--nnodes", "2", "--node-rank", "0", "--master-addr", "node0", "--master-port", "29511", "--no-python"),
}  # fmt: skip


def temporary_files(host: Host) -> str:
    """Their names: other tests may have left some."""
    return str(host.run(["ls", "/run/tmp"], check=True).stdout)


@pytest.mark.guarantee("G1", "G2")
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
