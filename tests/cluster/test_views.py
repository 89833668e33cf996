"""One view, one output and one file of events for a job on several hosts."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster import Cluster, Host
from tests.kit.waiting import until
from tests.support.backends import Backend
from tests.support.jobs import complete_lines
from tests.support.recorded import only, recorded

WORKER = """#!/bin/sh
echo "$RANK $$" >> "$1"
exec sleep 600
"""

LOOK = """
import json, sys
from dsl.view.jobs import running_jobs
found = []
for job in running_jobs():
    if sys.argv[1] not in job.view.words:
        continue
    nodes, missing = job.look("status")
    ranks = {f"{node.host} {rank.rank}": rank.pid for node in nodes for rank in node.ranks}
    found.append([job.view.nodes, job.view.workers, job.view.is_whole, ranks, missing])
print(json.dumps(found))
"""


def look(host: Host, folder: Path, program: Path) -> Any:
    """What a view on this host sees: nodes, workers, whether that is all, the pids of the ranks, missing hosts.

    The hosts share the directories of sockets with this machine, so jobs of other tests are passed over.
    """
    command = [sys.executable, "-c", LOOK, str(program)]
    result = host.run(command, env={"XDG_RUNTIME_DIR": str(folder)}, timeout_s=60)
    return json.loads(result.stdout)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "worker"
    path.write_text(WORKER)
    path.chmod(0o755)
    return path


def test_one_view_shows_the_ranks_of_all_hosts(
    hosts: Cluster, backend: Backend, dsl_command: Path, program: Path, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=2\nnode2 slots=1\n")
    line: list[str | Path] = [dsl_command, "-H", "hosts", *backend.words, "--metrics", "job.prom"]
    line += ["--no_local_rank", "--no_python", program, tmp_path / "seen"]
    env = {"DS_ACCELERATOR": "cpu", "XDG_RUNTIME_DIR": str(tmp_path), **backend.env}
    with hosts[0].start(line, env=env, cwd=tmp_path) as job, contextlib.ExitStack() as stack:
        stack.callback(job.kill)
        until(lambda: len(complete_lines(tmp_path / "seen")) == 4, timeout_s=60)
        lines = complete_lines(tmp_path / "seen")
        pids = {rank: int(pid) for rank, pid in (one.split() for one in lines)}
        ((nodes, workers, is_whole, ranks, missing),) = look(hosts[0], tmp_path, program)
        assert (nodes, workers, is_whole, missing) == (3, 4, True, [])
        places = {"0": "node0", "1": "node1", "2": "node1", "3": "node2"}
        assert ranks == {f"{places[rank]} {rank}": pid for rank, pid in pids.items()}
        labels = [f'{{host="{place}",node="{place[-1]}",rank="{rank}"}}' for rank, place in places.items()]
        metrics = tmp_path / "job.prom"
        until(lambda: all(f"dsl_rank_threads{one} 1.0\n" in metrics.read_text() for one in labels))


def test_node_0_shows_all_nodes_and_another_node_its_part(
    hosts: Cluster, dsl_command: Path, program: Path, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        for rank in (1, 0):
            folder = tmp_path / f"run{rank}"
            folder.mkdir(mode=0o700)
            line = f"--nnodes=2 --node-rank={rank} --nproc-per-node=2 --master-addr=node0 --master-port=29500"
            command: list[str | Path] = [dsl_command.with_name("dslrun"), *line.split()]
            command += ["--no-python", program, tmp_path / "seen"]
            job = hosts[rank].start(command, env={"XDG_RUNTIME_DIR": str(folder)})
            stack.enter_context(job)
            stack.callback(job.kill)
        until(lambda: len(complete_lines(tmp_path / "seen")) == 4, timeout_s=60)
        ((nodes, workers, is_whole, ranks, missing),) = look(hosts[0], tmp_path / "run0", program)
        assert (nodes, workers, is_whole, missing) == (2, 4, True, [])
        assert sorted(ranks) == ["node0 0", "node0 1", "node1 2", "node1 3"]
        ((nodes, workers, is_whole, ranks, missing),) = look(hosts[1], tmp_path / "run1", program)
        assert (workers, is_whole, sorted(ranks)) == (4, False, ["node1 2", "node1 3"])


HOSTS = "node0 slots=1\nnode1 slots=2\nnode2 slots=1\n"
WORKER_BACKGROUND = """#!/bin/sh
echo "early $RANK"
echo "$RANK" >> "$1/ready"
while ! test -e "$1/go"; do sleep 0.01; done
i=0
while [ $i -lt 200 ]; do echo "late $RANK $i"; i=$((i + 1)); done
test "$RANK" != 2 || exit 6
sleep 60
"""


@pytest.fixture
def line(dsl_command: Path, tmp_path: Path, backend: Backend) -> tuple[list[str | Path], dict[str, Any]]:
    """The command of a job whose rank 2 fails, once it may go on; and the options of the process."""
    (tmp_path / "hosts").write_text(HOSTS)
    program = tmp_path / "worker"
    program.write_text(WORKER_BACKGROUND)
    program.chmod(0o755)
    env = {
        "DS_ACCELERATOR": "cpu",
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        **backend.env,
    }
    words: list[str | Path] = [dsl_command, "-H", "hosts", *backend.words, "--no_local_rank"]
    words += ["--no_python", program, tmp_path]
    return words, {"env": env, "cwd": tmp_path}


@pytest.mark.guarantee("G1", "G2", "G6")
def test_the_head_of_a_job_goes_to_the_background(
    hosts: Cluster, line: tuple[list[str | Path], dict[str, Any]], dsl_command: Path, tmp_path: Path
) -> None:
    words, options = line
    started = hosts[0].run([words[0], "--detach", *words[1:]], timeout_s=60, **options)
    assert started.returncode == 0, started.stderr
    assert " runs in the background; " in started.stderr
    (folder,) = (tmp_path / "state/dsl/jobs").iterdir()
    until(lambda: len(complete_lines(tmp_path / "ready")) == 4, timeout_s=60)
    (tmp_path / "go").touch()
    attached = hosts[0].run([dsl_command.with_name("dsl-attach")], timeout_s=60, **options)
    assert attached.returncode == 6
    assert {f"early {rank}" for rank in range(4)} <= set(attached.stdout.splitlines())
    assert {f"late 2 {number}" for number in range(200)} <= set(attached.stdout.splitlines())
    assert attached.stdout == (folder / "output").read_text()
    assert "rank 2" in attached.stdout
    assert hosts[0].run([dsl_command.with_name("dsl-wait")], timeout_s=60, **options).returncode == 6


@pytest.mark.guarantee("G6")
def test_a_view_follows_the_output_of_all_hosts(
    hosts: Cluster, line: tuple[list[str | Path], dict[str, Any]], dsl_command: Path, tmp_path: Path
) -> None:
    words, options = line
    shown, viewed = tmp_path / "shown", tmp_path / "viewed"
    with (
        shown.open("wb") as stdout,
        viewed.open("wb") as view,
        hosts[0].start(words, stdout=stdout, **options) as job,
    ):
        until(lambda: shown.read_text().count("early") == 4, timeout_s=60)
        listed = hosts[0].run([dsl_command.with_name("dsl-ps"), "--json"], timeout_s=60, **options)
        (pid,) = [one["pid"] for one in json.loads(listed.stdout)["jobs"] if one["cwd"] == str(tmp_path)]
        attach: list[str | Path] = [dsl_command.with_name("dsl-attach"), str(pid)]
        with hosts[0].start(attach, stdout=view, **options) as viewer:
            until(lambda: viewed.read_text().count("early") == 4, timeout_s=60)
            (tmp_path / "go").touch()
            assert job.wait(60) == 6
            assert viewer.wait(60) == 0
    assert viewed.read_bytes() == shown.read_bytes()


FAILS_ONCE = """#!/bin/sh
echo "$RANK is here"
[ "$RANK" != 2 ] || [ -e "$1" ] || { : > "$1"; exit 3; }
"""


def test_one_file_has_the_events_of_all_hosts(
    hosts: Cluster, backend: Backend, dsl_command: Path, tmp_path: Path
) -> None:
    program = tmp_path / "worker"
    program.write_text(FAILS_ONCE)
    program.chmod(0o755)
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=2\n")
    words = ["-H", "hosts", *backend.words, "--max-restarts=1", "--no_local_rank", "--no_python"]
    words += ["--events=e"]
    line: list[str | Path] = [dsl_command, *words, program, tmp_path / "mark"]
    result = hosts[0].run(line, env={"DS_ACCELERATOR": "cpu", **backend.env}, cwd=tmp_path, timeout_s=120)
    found = recorded(tmp_path / "e")
    assert len({one["job"] for one in found}) == 1
    assert [one["name"] for one in found[0]["hosts"]] == ["node0", "node1"]
    # Some launchers start an agent for each rank.
    joined = {name for one in only("Membership", found) for name in one["joined"]}
    assert {name.rpartition("host ")[2] for name in joined} == {"node0", "node1"}
    meetings = {(one["attempt"], one["member"]): one["local_world_sizes"] for one in only("Meeting", found)}
    assert meetings == {(number, name): [1, 2] for number in (0, 1) for name in joined}
    for kind in ("Started", "FirstOutput", "Exited"):
        seen = {(one["attempt"], one["host"], one["rank"]) for one in only(kind, found)}
        last = {(1, "node0", 0), (1, "node1", 1), (1, "node1", 2)}
        assert seen >= last
    assert (0, "node1", 2) in {(one["attempt"], one["host"], one["rank"]) for one in only("Exited", found)}
    (cause,) = [one["cause"] for one in only("Report", found) if one["cause"]]
    assert (cause["rank"], cause["code"]) == (2, 3)
    (restart,) = only("Restarting", found)
    assert "rank 2" in restart["why"]
    assert "host node1" in restart["why"]
    assert all("clock_offset_ns" in one for one in only("Started", found))
    assert (found[-1]["event"], found[-1]["code"], found[-1]["attempts"]) == ("JobEnded", 0, 2), result
