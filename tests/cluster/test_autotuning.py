"""Experiments of a tuning on several hosts: real hosts and slots, and nothing left of one that hangs."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

from tests.kit.cluster import Cluster
from tests.support.tunings import Tuning

UNEVEN = ("node2 slots=4", "node0 slots=2", "node1 slots=3")
PATIENCE_S = 90.0


def tune(tuning: Tuning, hosts: Cluster, *words: str) -> CompletedProcess[str]:
    """Tune from the first host, by ssh."""
    tuning.hosts(*UNEVEN)
    line = tuning.words("tune", "--launcher", "ssh", *words)
    env = {"DS_ACCELERATOR": "cpu"}
    return hosts[0].run(line, env=env, cwd=tuning.folder, timeout_s=PATIENCE_S)


def test_experiments_of_one_host_each_fill_all_hosts(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    tuning = Tuning(dsl_command, tmp_path)
    tuning.configure(n=[1, 2, 3, 4], wait_for=[8])  # all four run at once, or none ends
    result = tune(tuning, hosts, "--num_nodes", "1", "--num_gpus", "2")
    assert result.returncode == 0, result.stderr
    assert {(one["host"], one["slots"]) for one in tuning.runs("begin")} == {
        *(("node2", "0,1"), ("node2", "2,3")),
        *(("node0", "0,1"), ("node1", "0,1")),
    }
    assert tuning.runs("doubled") == []
    assert tuning.best() == {"n": 4, "wait_for": 8}


def test_experiments_on_all_hosts_run_side_by_side_and_one_that_hangs_is_ended_everywhere(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    """`hosts` finds what is left on any of them."""
    tuning = Tuning(dsl_command, tmp_path)
    tuning.configure({"exp_timeout_s": 12}, act=["ok", "hang"], n=[1], wait_for=[6])
    result = tune(tuning, hosts, "--num_gpus", "1")
    assert result.returncode == 0, result.stderr
    assert {act: one["outcome"] for act, one in tuning.outcomes("act").items()} == {
        "ok": "ok",
        "hang": "timeout",
    }
    places = {
        act: {(one["host"], one["slots"]) for one in tuning.runs("begin") if one["act"] == act}
        for act in ("ok", "hang")
    }
    assert places["ok"] | places["hang"] == {(f"node{host}", slot) for host in range(3) for slot in "01"}
    assert not places["ok"] & places["hang"]
    assert {one["world_size"] for one in tuning.runs("begin")} == {"3"}
