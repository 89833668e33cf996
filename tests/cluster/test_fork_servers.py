"""Fork servers on several hosts: what a job does through any launcher, and when its nodes come and go, stays as it is."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster import Cluster
from tests.kit.waiting import until
from tests.support.fleet import SSH, Fleet, Ways, gone_within, kill, running
from tests.support.forks import HIDDEN

# `decimal` is what the fork server imports: an executed worker does not have it.
FORKED = ("--start-method", "forkserver", "--preload", "decimal")
WORKER = (
    """
import json, os, sys, time
folder = sys.argv[1]
facts = {
    "forked": "decimal" in """
    + HIDDEN
    + """, "parent": os.getppid(), "host": os.uname().nodename,
    "cpus": sorted(os.sched_getaffinity(0)), "argv": sys.argv[1:],
    "env": {name: os.environ.get(name) for name in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "DSL_ATTEMPT",
        "DSL_RESTART_REASON", "OMP_NUM_THREADS",
    )},
}
rank, attempt = os.environ["RANK"], os.environ.get(sys.argv[2], "0")
name = f"{folder}/told.{attempt}.{rank}"
with open(name + ".part", "w") as file:
    json.dump(facts, file)
os.rename(name + ".part", name)
print("rank", rank, flush=True)
while not os.path.exists(f"{folder}/done"):
    if os.path.exists(f"{folder}/fail.{rank}.{attempt}"):
        print("failing", file=sys.stderr)
        sys.exit(7)
    time.sleep(0.02)
"""
)
LAUNCHERS = (
    ("ssh", ()),
    ("pdsh", ()),
    ("openmpi5", ("--one-agent-per-node",)),
    ("slurm", ("--one-agent-per-node",)),
)
SOON_S = 60.0
HEARTBEAT_S = 8.0
"""Three hosts on two CPUs: one that is only late must not be taken for lost."""


def told(folder: Path, attempt: int | str) -> list[dict[str, Any]]:
    """What the workers of an attempt have told, by rank."""
    paths = [path for path in folder.glob(f"told.{attempt}.*") if path.suffix != ".part"]
    return [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: int(path.suffix[1:]))]


def until_told(folder: Path, attempt: int, count: int, fleet: Fleet | None = None) -> list[dict[str, Any]]:
    """Wait until so many workers of an attempt have told of themselves."""

    def enough() -> list[dict[str, Any]]:
        if fleet is not None and fleet.process.poll() is not None:
            raise AssertionError(f"ended with {fleet.process.returncode}: {fleet.stderr}")
        found = told(folder, attempt)
        return found if len(found) >= count else []

    try:
        return until(enough, SOON_S)
    except AssertionError:
        raise AssertionError(f"{told(folder, attempt)}; {fleet and fleet.stderr}") from None


def parents(workers: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Who has forked the workers of each host."""
    found: dict[str, set[int]] = {}
    for one in workers:
        found.setdefault(one["host"], set()).add(one["parent"])
    return found


@contextlib.contextmanager
def job(
    hosts: Cluster,
    command: Path,
    folder: Path,
    ways: Ways,
    *options: str,
    method: tuple[str, ...] = FORKED,
    **more: Any,
) -> Iterator[Fleet]:
    """Two workers on each of the hosts. ``more``: see `running`."""
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    words = [str(script), str(folder), "DSL_ATTEMPT"]
    options = (*method, "--grace", "2", *options)
    with running(hosts, command, folder, words, ways=ways, options=options, is_python=True, **more) as fleet:
        yield fleet


def neutral(one: dict[str, Any]) -> dict[str, Any]:
    """What must not differ between a forked worker and an executed one."""
    env = {
        name: value
        for name, value in one["env"].items()
        if name not in ("MASTER_PORT", "TORCHELASTIC_RUN_ID")
    }
    return {"host": one["host"], "cpus": one["cpus"], "env": env}


@pytest.mark.parametrize("ways, own", LAUNCHERS, indirect=["ways"], ids=[name for name, _ in LAUNCHERS])
def test_through_each_launcher_the_workers_are_those_that_would_be_executed(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways, own: tuple[str, ...]
) -> None:
    """Ranks, variables, binding, files, console and exit code; each host has one fork server."""
    seen = []
    for name, method in (("plain", ()), ("forked", FORKED)):
        folder = tmp_path / name
        options = (
            *own,
            "--bind",
            "auto",
            "--log-dir",
            f"{folder}/logs",
            "--tee",
            "3",
            "--tag-output",
            "never",
        )
        with job(hosts, dsl_command, folder, ways, *options, method=method) as fleet:
            workers = until_told(folder, 0, 6, fleet)
            (folder / "done").touch()
            assert fleet.wait(SOON_S) == 0, fleet.stderr
            assert sorted(fleet.stdout.splitlines()) == [f"rank {rank}" for rank in range(6)]
            assert "fork server" not in fleet.stderr
            gone_within(hosts)
        assert [one["forked"] for one in workers] == [name == "forked"] * 6
        files = sorted((path.parent.name, path.read_text()) for path in folder.rglob("stdout.log"))
        seen.append(([neutral(one) for one in workers], files))
    assert seen[0] == seen[1]
    assert [one["host"] for one in seen[1][0]] == [f"node{rank // 2}" for rank in range(6)]
    assert {host: len(pids) for host, pids in parents(workers).items()} == {f"node{n}": 1 for n in range(3)}


@pytest.mark.guarantee("G1", "G2", "G3")
@pytest.mark.parametrize("ways, own", LAUNCHERS[::3], indirect=["ways"], ids=["ssh", "slurm"])
def test_a_failure_stops_all_hosts_and_is_named(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways, own: tuple[str, ...]
) -> None:
    folder = tmp_path / "job"
    with job(hosts, dsl_command, folder, ways, *own) as fleet:
        until_told(folder, 0, 6, fleet)
        (folder / "fail.3.0").touch()
        assert fleet.wait() == 7, fleet.stderr
        gone_within(hosts)
    assert "rank 3 (local rank 1, pid" in fleet.stderr
    assert "host node1) failed first: exit code 7" in fleet.stderr


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("ways", ["ssh", "slurm"], indirect=True)
def test_a_killed_head_leaves_no_worker_and_no_fork_server(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways
) -> None:
    own = ("--one-agent-per-node",) if ways.launcher == "slurm" else ()
    folder = tmp_path / "job"
    with job(hosts, dsl_command, folder, ways, *own) as fleet:
        until_told(folder, 0, 6, fleet)
        fleet.process.kill()
        gone_within(hosts, 15)


@pytest.mark.guarantee("G1", "G3")
def test_a_fork_server_that_is_killed_ends_the_job_and_is_named_with_its_host(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    with job(hosts, dsl_command, folder, SSH) as fleet:
        workers = until_told(folder, 0, 6, fleet)
        kill(hosts[1], workers[2]["parent"])
        assert fleet.wait() == 137, fleet.stderr
        gone_within(hosts)
    (line,) = [line for line in fleet.stderr.splitlines() if "fork server" in line]
    assert "node1" in line
    assert "was killed by SIGKILL" in line


def test_hosts_that_go_and_come_back_and_workers_that_fail_keep_the_other_fork_servers(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    elastic = ("--elastic_training", "--master_addr", hosts[0].address, "--num_nodes", "1:3")
    options = (*elastic, "--heartbeat", f"{HEARTBEAT_S:g}", "--max-restarts", "2")
    with job(hosts, dsl_command, folder, SSH, *options, lets_rank=True) as fleet:
        first = until_told(folder, 0, 6, fleet)
        (folder / "fail.3.0").touch()
        second = until_told(folder, 1, 6, fleet)
        hosts[1].crash()
        third = until_told(folder, 2, 4, fleet)
        hosts[1].boot()
        fourth = until_told(folder, 3, 6, fleet)
        (folder / "done").touch()
        assert fleet.wait(SOON_S) == 0, fleet.stderr
        gone_within(hosts)
    for attempt, workers, reason, restarts in (
        (0, first, "start", "0"),
        (1, second, "failure", "1"),
        (2, third, "membership", "1"),
        (3, fourth, "membership", "1"),
    ):
        assert all(one["forked"] for one in workers), attempt
        env = [one["env"] for one in workers]
        assert [one["RANK"] for one in env] == [str(rank) for rank in range(len(env))]
        assert {one["WORLD_SIZE"] for one in env} == {str(len(env))}
        assert {one["DSL_RESTART_REASON"] for one in env} == {reason}
        assert {one["TORCHELASTIC_RESTART_COUNT"] for one in env} == {restarts}
    assert parents(first) == parents(second)
    left = {host: parents(first)[host] for host in ("node0", "node2")}
    assert parents(third) == left
    assert {host: parents(fourth)[host] for host in left} == left


def until_round(folder: Path, size: int, rounds: list[str]) -> list[dict[str, Any]]:
    """Wait until nodes that count their attempts by themselves have met anew, with so many workers; their port is noted."""

    def ports() -> list[str]:
        return sorted({path.name.split(".")[1] for path in folder.glob("told.*")} - set(rounds))

    # Nodes may have met before without one that came late: a round of the past is none of those that follow.
    port = until(lambda: [port for port in ports() if len(told(folder, port)) == size], SOON_S)[0]
    rounds += [one for one in ports() if one != port] + [port]
    return told(folder, port)


@pytest.mark.torch
def test_nodes_of_dslrun_that_leave_and_join_keep_the_other_fork_servers(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    """torch's rendezvous, with a worker that imports no torch."""
    folder = tmp_path / "job"
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    words = [
        *(
            str(dsl_command.with_name("dslrun")),
            "--nnodes",
            "1:3",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "2",
        ),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:29400", "--rdzv-id", "forked"),
        *("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,join_timeout=60", *FORKED),
        *(str(script), str(folder), "MASTER_PORT"),
    ]
    with contextlib.ExitStack() as stack:

        def begin(number: int) -> Any:
            file = stack.enter_context((folder / f"stderr.{number}").open("ab"))
            process = hosts[number].start(words, env={"OMP_NUM_THREADS": "1"}, stderr=file, cwd=folder)
            stack.callback(process.kill)
            return process

        nodes = [begin(number) for number in range(3)]
        rounds: list[str] = []
        first = until_round(folder, 6, rounds)
        (folder / f"fail.3.{rounds[-1]}").touch()
        second = until_round(folder, 6, rounds)
        nodes[2].send_signal(signal.SIGTERM)
        third = until_round(folder, 4, rounds)
        nodes[2].wait(SOON_S)
        nodes[2] = begin(2)
        fourth = until_round(folder, 6, rounds)
        (folder / "done").touch()
        assert [node.wait(SOON_S) for node in nodes] == [0, 0, 0]
        gone_within(hosts)
    for workers, size, restarts in ((first, 6, "0"), (second, 6, "1"), (third, 4, "1"), (fourth, 6, "1")):
        assert all(one["forked"] for one in workers)
        env = [one["env"] for one in workers]
        assert [one["RANK"] for one in env] == [str(rank) for rank in range(size)]
        assert {one["WORLD_SIZE"] for one in env} == {str(size)}
        assert {one["TORCHELASTIC_RESTART_COUNT"] for one in env} == {restarts}
        assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in env}) == 1
    assert parents(second) == parents(first)
    stayed = {host: pids for host, pids in parents(first).items() if host != "node2"}
    for workers in (third, fourth):
        assert {host: pids for host, pids in parents(workers).items() if host != "node2"} == stayed
