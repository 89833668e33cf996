"""`dsl-stacks --for` names a host whose ranks are slow, for a real gloo job on three hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.cluster import Cluster
from tests.kit.waiting import until
from tests.support.uneven import TRAIN


@pytest.mark.torch
@pytest.mark.timeout(240)
def test_the_ranks_of_a_slow_host_are_named_with_it(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=2\nnode2 slots=2\n")
    (tmp_path / "train.py").write_text(TRAIN)
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    words = ["-H", "hosts", "--master_addr", hosts[0].address, "--no_local_rank", "train.py", "ready", "12"]
    with hosts[0].start([dsl_command, *words], env=env, cwd=tmp_path) as job:
        until(lambda: len([*tmp_path.glob("ready-*")]) == 5 or job.poll() is not None, 120)
        assert job.poll() is None, "the job has ended"
        answer = hosts[0].run([dsl_command.with_name("dsl-stacks"), "--for", "6"], env=env, check=True)
        job.kill()
    first = answer.stdout.splitlines()[0]
    assert first.startswith("ranks 1-2 (host node1) hold the others up: "), answer.stdout
    assert "in Images.__getitem__ (train.py:8); the others wait" in first
