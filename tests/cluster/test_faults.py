"""On several hosts, whatever fails, the job ends everywhere, at once, and says which rank, host and code."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import MPI, Cluster, Slurm
from tests.support.fleet import PLAIN, SSH, WILD, Launch, Ways, gone_within, kill, running

pytestmark = pytest.mark.guarantee("G1", "G2", "G3", "G4")

LAUNCHERS = ("ssh", "pdsh", *MPI, "slurm")

# Of those that share their way of ending programs one stands for all in every run.
ALIKE = ("openmpi4", "mpich4", "impi", "mvapich-standin")
SAMPLE = [pytest.param(name, marks=[pytest.mark.stress] if name in ALIKE else []) for name in LAUNCHERS]
GRACE_S = 0.5
SOON_S = 10.0
"""Far more than a job needs to end; what it takes is measured by the benches."""


def fails(*how: str) -> tuple[str, ...]:
    """Rank 3 does that when it is let go, all others wait."""
    return (
        *("note", "{}/ready", "%r %p"),
        *("only", "3", "[", "wait", "{}/go", "stamp", "{}/struck", *how, "]", "pause"),
    )


FAILURES = {
    "exit": (fails("exit", "7"), 7, "exit code 7"),
    "SIGKILL": (fails("raise", "KILL"), 137, "killed by SIGKILL"),
    "SIGSEGV": (fails("raise", "SEGV"), 139, "killed by SIGSEGV"),
}


@pytest.mark.parametrize(
    "how", ["exit", *(pytest.param(how, marks=pytest.mark.stress) for how in ("SIGKILL", "SIGSEGV"))]
)
@pytest.mark.parametrize("ways", LAUNCHERS, indirect=True)
def test_a_worker_that_fails_ends_the_job_on_all_hosts(
    hosts: Cluster, launch: Launch, ways: Ways, how: str
) -> None:
    words, code, text = FAILURES[how]
    with launch(words, ways) as job:
        job.ready(6)
        job.let_go()
        assert job.wait() == code
        seconds = time.monotonic() - job.struck_s()
        gone_within(hosts)
    verdict = f"dsl: rank 3 (local rank 1, pid {job.pids['3']}, host node1) failed first: {text}"
    assert job.stderr.startswith(verdict), job.stderr
    assert "dsl: stopped by dsl: ranks 0-2,4-5\n" in job.stderr
    assert seconds < SOON_S


@pytest.mark.parametrize("ways", ["ssh", "pdsh"], indirect=True)
def test_an_exception_of_python_comes_home(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '4': raise ValueError('no such batch')\ntime.sleep(60)\n"
    )
    with running(hosts, dsl_command, tmp_path / "job", [str(script)], ways=ways, is_python=True) as job:
        assert job.wait() == 1
        gone_within(hosts)
    assert "rank 4 (local rank 0, pid " in job.stderr
    assert "host node2) failed first" in job.stderr
    assert "ValueError: no such batch" in job.stderr
    assert 'train.py", line 2' in job.stderr


def test_a_worker_that_cannot_be_executed_on_one_host_ends_the_job(
    hosts: Cluster, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    programs = [host.root / "run/of_another_machine" for host in hosts]
    try:
        for host, program in zip(hosts, programs, strict=True):
            if host.index == 1:
                program.write_bytes(b"\x7fELF of another machine")
                program.chmod(0o755)
            else:
                program.symlink_to(testchild)
        with running(
            hosts, dsl_command, tmp_path / "job", ["/run/of_another_machine", "pause"], ways=SSH
        ) as job:
            assert job.wait() == 126
            gone_within(hosts)
    finally:
        for program in programs:
            program.unlink(missing_ok=True)
    assert "host node1" in job.stderr
    assert "Exec format error" in job.stderr or "cannot be executed" in job.stderr, job.stderr


def test_a_worker_that_fails_ends_sixteen_hosts(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    with Cluster(16) as hosts:
        launch = Launch(hosts, dsl_command, testchild, tmp_path)
        with launch(FAILURES["exit"][0], SSH) as job:
            job.ready(32)
            job.let_go()
            assert job.wait() == 7
            seconds = time.monotonic() - job.struck_s()
            gone_within(hosts)
        assert "rank 3 (local rank 1, " in job.stderr
        assert "host node1) failed first: exit code 7" in job.stderr
        assert "stopped by dsl: ranks 0-2,4-31\n" in job.stderr
        assert seconds < SOON_S


SIGNALS = {"INT": 130, "TERM": 143, "KILL": -9}


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("ways", SAMPLE, indirect=True)
def test_a_signal_to_the_command_ends_the_job_and_no_other(
    hosts: Cluster, launch: Launch, ways: Ways, name: str, neighbour: set[tuple[str, int, int]]
) -> None:
    signum = getattr(signal, f"SIG{name}")
    with launch(PLAIN, ways, "--grace", "2", has_terminal=True) as job:
        job.ready(6)
        begin_s = time.monotonic()
        # A terminal signals its whole foreground group.
        (job.process.send_group if name == "INT" else job.process.send_signal)(signum)
        assert job.wait() in (SIGNALS[name], -signum)
        assert time.monotonic() - begin_s < SOON_S
        gone_within(hosts, but=neighbour)
    if name != "KILL":
        assert (
            f"SIG{name} received: stopping all hosts (grace 2 s, a second signal kills at once)" in job.stderr
        )
        what = "terminated (SIGTERM)" if name == "TERM" else "interrupted (SIGINT)"
        assert f"{what}: ranks 0-5 ended\n" in job.stderr.replace("Ctrl-C)", "SIGINT)")


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("ways", SAMPLE, indirect=True)
def test_nothing_is_left_of_workers_that_do_not_want_to_end(
    hosts: Cluster, launch: Launch, ways: Ways, name: str
) -> None:
    with launch(WILD, ways, "--grace", str(GRACE_S)) as job:
        job.ready(18)
        job.process.send_signal(getattr(signal, f"SIG{name}"))
        assert job.wait() in (SIGNALS[name], -getattr(signal, f"SIG{name}"))
        gone_within(hosts, SOON_S + GRACE_S)


VICTIMS = ("the agent of the command", "the guard of a host", "the agent of a host", "what reaches the hosts")


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("ways", SAMPLE, indirect=True)
def test_whoever_of_the_job_is_killed_nothing_is_left(
    hosts: Cluster, launch: Launch, ways: Ways, victim: str, neighbour: set[tuple[str, int, int]]
) -> None:
    with launch(WILD, ways, "--grace", str(GRACE_S)) as job:
        job.ready(18)
        if victim == "the agent of the command":
            os.kill(job.own_agent(), signal.SIGKILL)
        elif victim == "what reaches the hosts":
            os.kill(job.starters()[-1], signal.SIGKILL)
        else:
            guard, agent = job.agents(hosts[1], but=neighbour)[0]
            kill(hosts[1], guard if victim == "the guard of a host" else agent)
        code = job.wait()
        gone_within(hosts, SOON_S + GRACE_S, but=neighbour)
    assert code in (1, 137), job.stderr
    assert "Traceback" not in job.stderr
    assert job.stderr.strip()


def test_a_second_signal_shortens_the_grace_on_all_hosts(hosts: Cluster, launch: Launch) -> None:
    with launch(WILD, SSH, "--grace", "60") as job:
        job.ready(18)
        job.process.terminate()
        job.until_said("SIGTERM received")
        assert job.process.poll() is None
        job.process.terminate()
        assert job.wait(SOON_S) == 143
        gone_within(hosts)
    assert "dsl: SIGTERM received again: the grace is over\n" in job.stderr


@pytest.mark.parametrize("ways", ["ssh", "pdsh", "openmpi5", "mpich5", "slurm"], indirect=True)
def test_a_preemption_gives_every_host_its_grace_and_can_be_queued_again(
    hosts: Cluster, launch: Launch, ways: Ways
) -> None:
    words = ("catch", "USR1", *PLAIN[:-1], "await", "USR1", "1", "sleep", "300", "note", "{}/saved", "%r %p")
    options = ("--preempt-signal", "USR1", "--preempt-grace", "30", "--grace", "1")
    with launch(words, ways, *options) as job:
        job.ready(6)
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait() == 75, job.stderr
        gone_within(hosts)
    assert len((job.folder / "saved").read_text().splitlines()) == 6
    assert "the job was preempted, exit code 75" in job.stderr


def test_a_command_that_is_killed_leaves_no_allocation_of_slurm(
    hosts: Cluster, launch: Launch, wait_until: WaitUntil, slurm: Slurm
) -> None:
    with launch(PLAIN, Ways("slurm")) as job:
        job.ready(6)
        job.process.kill()
        job.wait()
        wait_until(lambda: not hosts[0].run(["squeue", "--noheader"], check=True).stdout, SOON_S)
        gone_within(hosts)
