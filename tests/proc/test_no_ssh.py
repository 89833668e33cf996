"""`dsl --no_ssh`: the commands of a job, one for each host, are connected, here on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.jobs import Job
from tests.support.places import Commands, free_port

TELLS = """
echo "$RANK/$WORLD_SIZE $CROSS_RANK/$CROSS_SIZE $MASTER_ADDR:$MASTER_PORT $DSL_ATTEMPT" >> "$1/seen"
trap 'exit 0' TERM
"""
SUM = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(value)
with open(sys.argv[1] + "/" + os.environ["RANK"], "w") as file:
    print(dist.get_world_size(), int(value), file=file)
dist.destroy_process_group()
"""
HOSTS = "alpha slots=1\nempty slots=0\nbeta slots=2\n"
PLACES = (0, 2)
WAITS = ("--wait-hosts", "60")


class Hosts(Commands):
    """The commands for the hosts of a hostfile."""

    def __init__(self, dsl: Path, directory: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(directory, stack, TELLS, "DSL_ATTEMPT")
        self._dsl = dsl
        self.port = free_port()
        (directory / "hosts").write_text(HOSTS)

    def start(self, place: int, *options: str, program: tuple[str, ...] = ()) -> Job:
        """Start the command of one host."""
        line = [str(self._dsl), "-H", str(self.directory / "hosts"), "--no_ssh", "--node_rank", str(place)]
        line += [
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            str(self.port),
            "--no_local_rank",
            *WAITS,
            *options,
        ]
        words = program or ("--no_python", str(self.program), str(self.directory))
        return self.run(f"host{place}", [*line, *words])

    def start_all(self, *options: str, program: tuple[str, ...] = ()) -> list[Job]:
        """Start those of all hosts, node 0 last."""
        return [self.start(place, *options, program=program) for place in reversed(PLACES)][::-1]

    def seen(self, count: int) -> list[str]:
        """What so many workers have told, in no order."""
        until(lambda: len(self.lines()) >= count, timeout_s=20)
        return sorted(self.lines())


@pytest.fixture
def hosts(dsl_command: Path, tmp_path: Path) -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        yield Hosts(dsl_command, tmp_path, stack)


@pytest.mark.guarantee("G2", "G3")
def test_the_failure_of_one_host_ends_all_with_one_verdict_and_code(hosts: Hosts) -> None:
    jobs = hosts.start_all()
    at = f"127.0.0.1:{hosts.port} 0"
    assert hosts.seen(3) == [f"0/3 0/2 {at}", f"1/3 1/2 {at}", f"2/3 1/2 {at}"]
    hosts.fail(2, 0)
    assert [job.wait() for job in jobs] == [7, 7], [job.stderr() for job in jobs]
    (line,) = {next(one for one in job.stderr().splitlines() if "failed first" in one) for job in jobs}
    assert line.startswith("dsl: rank 2 (local rank 1, pid ")
    assert line.endswith(", host beta) failed first: exit code 7")
    assert not any(job.left() for job in jobs)


def test_all_hosts_start_again_together_and_end_well_together(hosts: Hosts) -> None:
    jobs = hosts.start_all("--max-restarts", "1")
    hosts.seen(3)
    hosts.fail(1, 0)
    assert [line[-1] for line in hosts.seen(6)] == ["0", "1"] * 3
    hosts.end()
    assert [job.wait() for job in jobs] == [0, 0], [job.stderr() for job in jobs]


@pytest.mark.parametrize("place", [0, 1])
def test_a_host_that_is_lost_ends_the_others(place: int, hosts: Hosts) -> None:
    jobs = hosts.start_all()
    hosts.seen(3)
    gone, other = jobs[place], jobs[1 - place]
    for one in gone.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    assert other.wait() == 1, other.stderr()
    assert f"node {place} ({('alpha', 'beta')[place]})" in other.stderr()
    assert not other.left()
    until(lambda: not gone.left())


def test_a_host_waits_for_the_others_as_long_as_the_user_says(hosts: Hosts) -> None:
    job = hosts.start(0, "--wait-hosts", "0.5")
    assert job.wait() == 1
    assert "after 0.5 s the job is still waiting for node 1" in job.stderr()


def test_a_store_of_torch_in_place_of_node_0_is_no_node_of_the_job(hosts: Hosts) -> None:
    """The command there is that of DeepSpeed."""
    with socket.create_server(("127.0.0.1", hosts.port)):
        job = hosts.start(2, "--wait-hosts", "0.5")
        assert job.wait() == 1
    assert "still waiting for node 0 after 0.5 s: " in job.stderr()
    assert not hosts.lines()


def test_without_a_wait_the_worker_starts_at_once_as_with_deepspeed(hosts: Hosts) -> None:
    """Each command knows nothing of the others, which may be of DeepSpeed."""
    job = hosts.start(2, "--wait-hosts", "0")
    at = f"127.0.0.1:{hosts.port} "
    assert hosts.seen(2) == [f"1/3 2/3 {at}", f"2/3 2/3 {at}"]
    hosts.fail(2, "")
    assert job.wait() == 7
    assert "failed first on this node: exit code 7" in job.stderr()


@pytest.mark.needs_package("py-spy")
def test_the_watch_for_hangs_sees_the_ranks_of_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text("import os\nos.read(os.pipe()[0], 1)\n")
    words = ("--hang-timeout", "1", "--hang-action", "stop")
    jobs = hosts.start_all(*words, program=(str(tmp_path / "hang.py"),))
    assert [job.wait() for job in jobs] == [124, 124], [job.stderr() for job in jobs]
    assert all("the job hung, without progress for " in job.stderr() for job in jobs)


@pytest.mark.torch
@pytest.mark.timeout(180)
def test_the_port_of_the_meeting_is_free_for_torch(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    jobs = hosts.start_all(program=(str(tmp_path / "sum.py"), str(tmp_path)))
    assert [job.wait(150) for job in jobs] == [0, 0], [job.stderr() for job in jobs]
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3 7\n"] * 3
