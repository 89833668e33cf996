"""ssh to more hosts than it reaches at once: the agents stay behind and connect by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.cluster import Cluster

ENV = {"DS_ACCELERATOR": "cpu", "DSL_SSH_FANOUT": "2"}
WORKER = """
import os, sys
print(os.environ["RANK"], os.uname().nodename, flush=True)
assert "DSL_CONTROL_KEY" not in os.environ
sys.exit(7 if sys.argv[-1] == os.environ["RANK"] else 0)
"""


def hostfile(tmp_path: Path, *names: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text("".join(f"{name} slots=2\n" for name in names), encoding="utf-8")
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")
    return path


def test_every_rank_runs_where_it_belongs(hosts: Cluster, dsl_command: Path, tmp_path: Path) -> None:
    path = hostfile(tmp_path, *hosts.names)
    words: list[str | Path] = [dsl_command, "-H", path, "--launcher", "ssh", tmp_path / "worker.py"]
    ended = hosts[0].run(words, env=ENV, check=False)
    expected = [f"{rank} {name}" for rank, name in enumerate(name for name in hosts.names for _ in range(2))]
    assert (ended.returncode, sorted(ended.stdout.splitlines()), ended.stderr) == (0, expected, "")


@pytest.mark.guarantee("G2", "G3")
def test_a_failure_is_told_as_with_few_hosts(hosts: Cluster, dsl_command: Path, tmp_path: Path) -> None:
    path = hostfile(tmp_path, *hosts.names)
    words: list[str | Path] = [dsl_command, "-H", path, "--launcher", "ssh", tmp_path / "worker.py", "3"]
    ended = hosts[0].run(words, env=ENV, check=False)
    assert ended.returncode == 7
    assert "rank 3 (local rank 1, " in ended.stderr
    assert "host node1) failed first: exit code 7" in ended.stderr


@pytest.mark.guarantee("G8")
def test_hosts_that_cannot_be_reached_are_named(hosts: Cluster, dsl_command: Path, tmp_path: Path) -> None:
    """One line a problem, and nothing is left where an agent had come up."""
    path = hostfile(tmp_path, "node0", "nowhere", "node1", "nobody")
    words: list[str | Path] = [dsl_command, "-H", path, "--launcher", "ssh", tmp_path / "worker.py"]
    ended = hosts[0].run(words, env=ENV, check=False)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("dsl: error: host nowhere: cannot be reached")
    assert lines[1].startswith("dsl: error: host nobody: cannot be reached")
