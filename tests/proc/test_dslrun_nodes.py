"""A job of several nodes whose places are fixed, as several commands on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from kit import processes
from kit.waiting import until
from tests.support.jobs import complete_lines, running
from tests.support.places import free_port

from dsl import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.jobs import Job

SUM = """
import datetime, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
value = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(value)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 3:
    sys.exit(5)
dist.barrier()
with open(sys.argv[1] + "/" + os.environ["RANK"], "w") as file:
    names = ["GROUP_RANK", "LOCAL_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]
    print(dist.get_world_size(), int(value), *[os.environ[name] for name in names], file=file)
dist.destroy_process_group()
"""

# Tells of its place, and runs until it is told to fail, or all are told to end.
WORKER = """#!/bin/sh
words="$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE"
echo "$words $ROLE_NAME:$ROLE_RANK/$ROLE_WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $DSL_RESTART_REASON" >> "$1/seen"
trap 'exit 0' TERM
until [ -e "$1/end" ]; do
  [ ! -e "$1/fail.$RANK.$TORCHELASTIC_RESTART_COUNT" ] || exit 7
  sleep 0.02
done
"""


class Nodes:
    """Commands that form one job, each with a directory of its own."""

    def __init__(self, dslrun: Path, directory: Path, stack: contextlib.ExitStack) -> None:
        self._dslrun = dslrun
        self.bin = dslrun.parent
        self._directory = directory
        self._stack = stack
        self.port = free_port()
        self.program = directory / "worker"
        self.program.write_text(WORKER)
        self.program.chmod(0o755)

    def start(
        self,
        *each: str,
        count: int = 0,
        first: int = 0,
        address: str = "127.0.0.1",
        program: Sequence[str] = (),
    ) -> list[Job]:
        """Start nodes from the ``first`` on, each with these options, the last one first."""
        words = program or ("--no-python", str(self.program), str(self._directory))
        jobs = []
        for rank, options in reversed(list(enumerate(each, first))):
            line = [str(self._dslrun), f"--nnodes={count or len(each)}", f"--node-rank={rank}"]
            line += [f"--master-addr={address}", f"--master-port={self.port}", *options.split(), *words]
            jobs.append(self._stack.enter_context(running(line, self._directory / f"node{rank}")))
        return jobs[::-1]

    def seen(self, count: int) -> list[str]:
        """What so many workers have told, in no order."""
        until(lambda: len(self._lines()) >= count, timeout_s=20)
        return sorted(self._lines())

    def _lines(self) -> list[str]:
        return complete_lines(self._directory / "seen")

    def fail(self, rank: int, restarts: int) -> None:
        """Make a worker fail."""
        (self._directory / f"fail.{rank}.{restarts}").touch()

    def end(self) -> None:
        """Make all workers end."""
        (self._directory / "end").touch()


@pytest.fixture
def nodes(dsl_command: Path, tmp_path: Path) -> Iterator[Nodes]:
    """Nodes of one job."""
    with contextlib.ExitStack() as stack:
        yield Nodes(dsl_command.with_name("dslrun"), tmp_path, stack)


@pytest.mark.torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("address", ["[::1]", "localhost"])
def test_unequal_nodes_with_roles_meet_and_restart_together(
    address: str, nodes: Nodes, tmp_path: Path
) -> None:
    """Commands as on three machines, a collective over all their workers, and another one after a failure."""
    script = tmp_path / "sum.py"
    script.write_text(SUM, encoding="utf-8")
    options = [
        "--nproc-per-node=2 --role=train",
        "--nproc-per-node=1 --role=serve",
        "--nproc-per-node=2 --role=train",
    ]
    jobs = nodes.start(
        *[f"{one} --max-restarts=1" for one in options], address=address, program=(str(script), str(tmp_path))
    )
    assert [job.wait(150) for job in jobs] == [0, 0, 0], [job.stderr() for job in jobs]
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(5)]
    assert found == [
        ["5", "31", group, local, role, size, "1"]
        for group, local, role, size in [
            ("0", "0", "0", "4"),
            ("0", "1", "1", "4"),
            ("1", "0", "0", "1"),
            ("2", "0", "2", "4"),
            ("2", "1", "3", "4"),
        ]
    ]


def test_ranks_and_roles_are_counted_over_unequal_nodes(nodes: Nodes) -> None:
    jobs = nodes.start(
        "--nproc-per-node=2 --role=train",
        "--nproc-per-node=3 --role=serve",
        "--nproc-per-node=1 --role=train",
    )
    assert nodes.seen(6) == [
        "0/6 0/2 0/3 train:0/3 0 start",
        "1/6 1/2 0/3 train:1/3 0 start",
        "2/6 0/3 1/3 serve:0/3 0 start",
        "3/6 1/3 1/3 serve:1/3 0 start",
        "4/6 2/3 1/3 serve:2/3 0 start",
        "5/6 0/1 2/3 train:2/3 0 start",
    ]
    nodes.end()
    assert [job.wait() for job in jobs] == [0, 0, 0], [job.stderr() for job in jobs]


def test_all_nodes_count_a_restart_and_a_final_failure_ends_the_others(nodes: Nodes) -> None:
    jobs = nodes.start("--max-restarts=1", "--nproc-per-node=2 --max-restarts=1")
    nodes.seen(3)
    nodes.fail(2, 0)
    assert nodes.seen(6)[1::2] == [f"{place} 1 failure" for place in (
        "0/3 0/1 0/2 default:0/3", "1/3 0/2 1/2 default:1/3", "2/3 1/2 1/2 default:2/3"
    )]  # fmt: skip
    nodes.fail(1, 1)
    assert [job.wait() for job in jobs] == [7, 7], [job.stderr() for job in jobs]
    assert "restart 1 of 1: rank 2 on host " in jobs[0].stderr()
    assert "the job is over: rank 1 on host " in jobs[0].stderr()
    assert "rank 1 (local rank 0, " in jobs[1].stderr()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "agent"])
def test_a_node_that_leaves_or_is_lost_ends_the_job_which_names_it(
    how: str, place: int, nodes: Nodes
) -> None:
    """Also where restarts are left: the nodes of such a job are those that they are."""
    jobs = nodes.start("--max-restarts=3", "--max-restarts=3", "--max-restarts=3")
    nodes.seen(3)
    gone = jobs.pop(place)
    if how == "SIGTERM":
        os.kill(gone.guard, signal.SIGTERM)
        assert gone.wait() == 143
    elif how == "agent":
        os.kill(agent_of(gone), signal.SIGKILL)
        assert gone.wait() == 137
    else:
        for one in gone.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    name = os.uname().nodename
    for job in jobs:
        assert job.wait() == 1, job.stderr()
        why = "has left the job" if how == "SIGTERM" else "is lost: "
        assert f"node {place} ({name}) {why}" in job.stderr()
        assert not job.left()
    until(lambda: not gone.left())


def agent_of(job: Job) -> int:
    """The child of the guard that is no delegate."""

    def found() -> list[int]:
        return [pid for pid in processes.children(job.guard) if b"dsl.rendezvous" not in words_of(pid)]

    return until(found)[0]


def words_of(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def test_a_node_that_is_interrupted_before_the_others_have_come_leaves_nothing(nodes: Nodes) -> None:
    (job,) = nodes.start("--log-dir=logs", count=2)
    until(lambda: processes.children(job.guard))
    os.kill(job.guard, signal.SIGINT)
    assert job.wait() in (130, -signal.SIGINT)
    until(lambda: not job.left())


def test_a_node_of_another_job_is_refused_in_one_line_with_2(nodes: Nodes) -> None:
    jobs = nodes.start("", "--rdzv-id=other", "")
    assert jobs[1].wait() == 2
    words = "its --rdzv-id is 'other', that of node 0 is 'none'"
    name = os.uname().nodename
    (said,) = [line for line in jobs[1].stderr().splitlines() if "waiting for" not in line]
    assert said.startswith(
        f"dslrun: error: node 0 at 127.0.0.1:{nodes.port} refuses this node 1, and says why"
    )
    assert "none" not in said
    until(lambda: f"warning: node 1 ({name}) at 127.0.0.1 cannot take part: {words}" in jobs[0].stderr())
    (right,) = nodes.start("", first=1, count=3)
    nodes.seen(3)
    nodes.end()
    assert [job.wait() for job in (jobs[0], right, jobs[2])] == [0, 0, 0]


HELLO = {
    "circle": "hello",
    "dsl": __version__,
    "run_id": "none",
    "nodes": 2,
    "place": 1,
    "host": "h",
    "token": "",
}
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b2J\r\x00\u202e"


def call(port: int, *lines: object) -> tuple[bytes, socket.socket]:
    """Say lines to whoever listens, as soon as somebody does; the first line of the answer, or what there is."""

    def connected() -> socket.socket | None:
        with contextlib.suppress(ConnectionError):
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        return None

    caller = until(connected, timeout_s=20)
    assert caller is not None
    answer = b""
    with contextlib.suppress(ConnectionError):
        caller.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        while not answer.endswith(b"\n") and (more := caller.recv(4096)):
            answer += more
    return answer, caller


def sit_down(port: int, host: str, *lines: object) -> tuple[bytes, socket.socket]:
    """Take the place of node 1, where somebody can who is sent on, and say lines; the answer to the last call."""
    answer, caller = call(port, {**HELLO, "host": host})
    with contextlib.suppress(ValueError, KeyError, TypeError):
        sent_on = json.loads(answer)
        inner, token = int(sent_on["port"]), sent_on["token"]
        caller.close()
        return call(inner, {**HELLO, "host": host, "token": token}, *lines)
    return answer, caller


def assert_whole(nodes: Nodes, job: Job) -> None:
    """Node 1 comes, and the job is that of two workers and nobody else."""
    (other,) = nodes.start("", first=1, count=2)
    assert [line.split()[0] for line in nodes.seen(2)] == ["0/2", "1/2"]
    nodes.end()
    assert [one.wait() for one in (job, other)] == [0, 0], [one.stderr() for one in (job, other)]
    assert all(line.isprintable() and len(line) < 1000 for line in job.stderr().splitlines())


def test_a_stranger_writes_nothing_of_his_to_the_terminal_and_learns_nothing(nodes: Nodes) -> None:
    """Whatever is wrong with what he says: nobody can find out by trying what is right."""
    (job,) = nodes.start("", count=2)
    wrong: list[object] = [{**HELLO, key: f"x{ESCAPES}"} for key in ("dsl", "run_id")]
    wrong += [
        {**HELLO, "host": ESCAPES, key: value} for key, value in (("nodes", 3), ("place", 0), ("place", 7))
    ]
    wrong += [{**HELLO, "run_id": "x" * 3000}, {**HELLO, "dsl": "0"}]
    answers = set()
    for one in wrong:
        answer, caller = call(nodes.port, one)
        answers.add(answer)
        caller.close()
    assert len(answers) == 1
    text = b"".join(answers).decode()
    assert not any(ours in text for ours in (__version__, "none", os.uname().nodename)), text
    garbage: object
    for garbage in (ESCAPES, {"circle": ESCAPES}, 10**1000, [[]] * 500):
        call(nodes.port, garbage)[1].close()
    sit_down(nodes.port, f"odd{ESCAPES}")[1].close()
    assert_whole(nodes, job)
    assert "\x1b" not in job.stderr()


@pytest.mark.parametrize("size", [-5, 0, 10**9, 1.5, True, "2", None])
def test_a_stranger_with_an_impossible_number_of_workers_is_no_node(size: object, nodes: Nodes) -> None:
    (job,) = nodes.start("", count=2)
    meet = {"do": "meet", "local_world_size": size, "role": "default", "restarts": 0, "reason": "start"}
    _, caller = sit_down(nodes.port, "odd", meet)
    with caller, contextlib.suppress(ConnectionError):
        while caller.recv(4096):  # until he is sent away
            pass
    assert_whole(nodes, job)


def test_knocks_lock_no_node_out(nodes: Nodes) -> None:
    """Somebody asks for a place again and again, and never takes it."""
    (job,) = nodes.start("", count=2)
    is_over = threading.Event()

    def knock() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError, AssertionError):
                call(nodes.port, HELLO)[1].close()

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        (other,) = nodes.start("", first=1, count=2)
        nodes.seen(2)
    finally:
        is_over.set()
        nodes.end()
        assert [one.wait() for one in (job, other)] == [0, 0]
        thread.join()


def test_a_node_that_waits_says_what_to_type_for_the_other(nodes: Nodes, tmp_path: Path) -> None:
    """The words are those of the user, but for the place."""
    program = tmp_path / "the program"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$1/args.$RANK"\n')
    program.chmod(0o755)
    words = ("--no-python", str(program), str(tmp_path), "it's", "$HOME", "a  b;", "--node-rank", "7", "")
    (job,) = nodes.start("--role=some", count=2, program=words)
    where = re.escape(
        f"this is node 0, waiting for 1 of 2 nodes: node 1, at 127.0.0.1:{nodes.port} for up to 600 s"
    )
    line = until(lambda: re.search(f"{where}; type on this machine: (.*); other machines need", job.stderr()))
    assert line is not None
    environ = {**os.environ, "PATH": f"{nodes.bin}:{os.environ['PATH']}"}
    other = subprocess.run(line[1], shell=True, env=environ, timeout=30, capture_output=True, check=False)
    assert other.returncode == 0, other.stderr
    assert job.wait() == 0
    said = "\n".join(words[2:]) + "\n"
    assert [(tmp_path / f"args.{rank}").read_text() for rank in (0, 1)] == [said, said]


def test_a_node_that_finds_nobody_says_where_and_for_how_long_and_what_to_type(nodes: Nodes) -> None:
    (job,) = nodes.start("--rdzv-conf=timeout=90", first=1, count=2)
    where = f"127.0.0.1:{nodes.port}"
    said = f"dslrun: waiting for node 0 for up to 90 s: nobody listens at {where} yet; type there: dslrun --nnodes=2 "
    until(lambda: f"{said}--node-rank 0 --master-addr=127.0.0.1 " in job.stderr())
    os.kill(job.guard, signal.SIGINT)
    job.wait()


def test_nodes_that_do_not_come_in_time_are_named(nodes: Nodes) -> None:
    (job,) = nodes.start("--rdzv-conf=timeout=1", count=3)
    assert job.wait() == 1
    text = "after 1 s the job is still waiting for 2 of 3 nodes: nodes 1-2"
    assert job.stderr() == f"dslrun: error: {text}\n"


def test_a_dry_run_waits_for_nobody(nodes: Nodes) -> None:
    (job,) = nodes.start("--nproc-per-node=2 --dry-run", count=3)
    assert job.wait() == 0
    assert job.stdout().startswith(f"node 0 ({os.uname().nodename}): 2 of 6 workers, ranks 0-1, meeting at ")


def test_no_torch_is_imported_for_nodes_with_fixed_places(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the command nor by its delegate."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    jobs = nodes.start("", "")
    nodes.seen(2)
    nodes.end()
    assert [job.wait() for job in jobs] == [0, 0], [job.stderr() for job in jobs]
