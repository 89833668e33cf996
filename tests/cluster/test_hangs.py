"""`dsl-stacks` names the rank that hangs, its line and its host, for real gloo jobs on three hosts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster, Host
from tests.kit.waiting import until
from tests.support.hangs import KINDS, ODD, RANKS, WORKER, check
from tests.support.memory import memory_limit

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

OFTEN = {"skip", "loader", "stopped", "ended"}
"""Kinds of hang that every run tries on several hosts."""

# Ends when no rank but those that compute has used much CPU time for a moment.
QUIET = """
import sys, time
from dsl.view.jobs import running_jobs
(job,) = [one for one in running_jobs() if sys.argv[2] in one.view.words]
print(job.view.pid)
def look():
    time.sleep(0.2)
    return {rank.rank: rank.cpu_ms for node in job.look("status")[0] for rank in node.ranks}
before, now = look(), look()
while any(now[rank] - before[rank] > 20 for rank in now if str(rank) != sys.argv[1]):
    before, now = now, look()
"""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.stress) for kind in sorted(KINDS)]
)
def test_the_rank_that_hangs_is_named_with_its_line_and_its_host(
    hosts: Cluster, dsl_command: Path, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=2\nnode2 slots=1\n")
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    line: list[str | Path] = [dsl_command, "-H", "hosts", "--master_addr", hosts[0].address]
    with (
        prepared(kind, hosts[1], tmp_path),
        hosts[0].start([*line, "--no_local_rank", WORKER, kind, tmp_path], env=env, cwd=tmp_path) as job,
    ):
        files = [tmp_path / f"ready-{rank}" for rank in range(RANKS)]
        until(lambda: all(file.exists() for file in files) or job.poll() is not None, 120)
        assert job.poll() is None, "the job has ended"
        computing = str(ODD) if kind in ("python_loop", "c_loop", "thrash") else ""
        quiet = [sys.executable, "-c", QUIET, computing, str(tmp_path)]
        pid = hosts[0].run(quiet, env=env, check=True).stdout.strip()
        begin = time.monotonic()
        answer = hosts[0].run([dsl_command.with_name("dsl-stacks"), pid], env=env, check=True)
        took_s = time.monotonic() - begin
        if kind == "frozen":
            hosts[1].run(["fsfreeze", "-u", tmp_path / "frozen"], check=True)
        job.kill()
    check(answer.stdout, took_s, kind, "node1")


@contextlib.contextmanager
def prepared(kind: str, host: Host, folder: Path) -> Iterator[None]:
    """What a kind of hang needs on the host of the odd rank."""
    with contextlib.ExitStack() as stack:
        if kind == "frozen":
            (folder / "frozen").mkdir()
            (folder / "image").write_bytes(bytes(16 << 20))
            host.run(["mkfs.ext4", "-q", folder / "image"], check=True)
            host.run(["mount", "-o", "loop", folder / "image", folder / "frozen"], check=True)
            stack.callback(until, lambda: host.run(["umount", folder / "frozen"]).returncode == 0)
            host.run(["fsfreeze", "-f", folder / "frozen"], check=True)
            stack.callback(host.run, ["fsfreeze", "-u", folder / "frozen"])
        if kind == "thrash":
            within = stack.enter_context(memory_limit(32 << 20))
            if within is None:
                pytest.skip("needs a kernel with a memory controller")
            *_, processes = within([])
            (folder / "limited").write_text(processes)
        yield


FAILING = """
import os, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
open(f"{folder}/ready-{rank}", "w").close()
while rank != "2" or not os.path.exists(f"{folder}/fail"):
    time.sleep(0.1)
sys.exit(3)
"""


def test_when_a_rank_fails_the_report_tells_what_those_of_all_hosts_did(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=2\nnode2 slots=1\n")
    (tmp_path / "train.py").write_text(FAILING)
    line: list[str | Path] = [dsl_command, "-H", "hosts", "--no_local_rank", "--stacks-on-failure"]
    env = {"DS_ACCELERATOR": "cpu", "XDG_RUNTIME_DIR": str(tmp_path)}
    with hosts[0].start(
        [*line, tmp_path / "train.py", tmp_path], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as job:
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(RANKS)), 60)
        (tmp_path / "fail").touch()
        _, text = job.communicate(timeout=60)
    assert job.returncode == 3
    assert "the others at that moment: all 3 ranks are in sleep() (train.py:6)" in text
