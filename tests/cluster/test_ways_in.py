"""What is in the way to a host, or comes from there instead of an agent; and what schedulers do on the way."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster, Mpi, Slurm, find_mpi
from tests.support.fleet import gone_within

NODE0 = "--master-addr node0 --master-port 29555 --preempt-signal USR1"
CPU = {"DS_ACCELERATOR": "cpu"}
# A worker that notes each signal, and ends once it has heard one and nothing more has come for a second.
COUNTS = """
import os, signal, time
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(time.monotonic()))
os.mknod(f"ready.{os.environ['RANK']}")
while not heard or time.monotonic() < heard[-1] + 1:
    time.sleep(0.02)
with open(f"heard.{os.environ['RANK']}", "w") as file:
    file.write(str(len(heard)))
"""
MEETS = """
import os, socket, time
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    socket.create_server(("", port)).accept()
else:
    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection((address, port), 5)
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)
"""


def _file(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _sbatch(hosts: Cluster, folder: Path, line: str) -> str:
    """Submit a batch script for two nodes, which writes the exit code of its line; its number."""
    script = _file(folder / "job", f"#!/bin/bash\ncd {folder}\n{line}\necho $? > code\n")
    words: list[str | Path] = ["--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"]
    words += ["--output", folder / "out"]
    return hosts[0].run(["sbatch", *words, script], env=CPU, check=True).stdout.strip()


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "line",
    [
        "{bin}/dsl --launcher slurm --one-agent-per-node --num_gpus 2 --preempt-signal USR1 {script}",
        "srun bash -c 'exec {bin}/dslrun --nnodes 2 --node-rank $SLURM_NODEID --nproc-per-node 2 {where}'",
    ],
    ids=["dsl", "dslrun"],
)
def test_a_preemption_that_slurm_tells_the_tasks_counts_for_the_job_and_each_worker_hears_it_once(
    hosts: Cluster, slurm: Slurm, dsl_command: Path, tmp_path: Path, wait_until: WaitUntil, line: str
) -> None:
    """slurmstepd signals every process of a step here: that of Debian finds them by their parents."""
    script = _file(tmp_path / "counts.py", COUNTS)
    job = _sbatch(
        hosts, tmp_path, line.format(bin=dsl_command.parent, script=script, where=f"{NODE0} {script}")
    )
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 4, timeout_s=60)
    hosts[0].run(["scancel", "--signal=USR1", job], check=True)
    wait_until(lambda: (tmp_path / "code").exists() and (tmp_path / "code").read_text(), timeout_s=60)
    said = (tmp_path / "out").read_text()
    assert (tmp_path / "code").read_text() == "75\n", said
    assert [path.read_text() for path in tmp_path.glob("heard.*")] == ["1"] * 4
    assert "preempted (SIGUSR1): ranks 0-3 ended" in said


@pytest.mark.guarantee("G2")
def test_workers_that_die_of_slurms_notice_before_their_agent_hears_of_it_have_not_failed(
    hosts: Cluster, slurm: Slurm, dsl_command: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    sleeps = "import os, time\nos.mknod(f\"ready.{os.environ['RANK']}\")\ntime.sleep(100)\n"
    script = _file(tmp_path / "sleeps.py", sleeps)
    words = "--launcher slurm --one-agent-per-node --num_gpus 2 --preempt-signal USR1"
    job = _sbatch(hosts, tmp_path, f"{dsl_command} {words} {script}")
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 4, timeout_s=60)
    hosts[0].run(["scancel", "--signal=USR1", job], check=True)
    wait_until(lambda: (tmp_path / "code").exists() and (tmp_path / "code").read_text(), timeout_s=60)
    assert (tmp_path / "code").read_text() == "75\n", (tmp_path / "out").read_text()


def test_a_job_for_each_task_of_srun_is_told_once(hosts: Cluster, slurm: Slurm, dsl_command: Path) -> None:
    words: list[str | Path] = ["srun", "--nodes=2", "--ntasks=2", dsl_command, "--no_python", "true"]
    result = hosts[0].run(words, env=CPU)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("srun has started this command 2 times, so 2 jobs run") == 1


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("name", ["mpich4", "mpich5", "impi"])
@pytest.mark.parametrize("trouble", ["unknown", "closed"])
def test_a_host_that_hydras_ssh_cannot_reach_ends_the_job_with_the_reason(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, name: str, trouble: str
) -> None:
    mpi = find_mpi(hosts, name)
    host, why = ("nowhere", "resolve") if trouble == "unknown" else ("node1", "refused")
    hostfile = _file(tmp_path / "hosts", f"node0 slots=1\n{host} slots=1\n")
    port = ["--ssh_port", "2"] if trouble == "closed" else []
    words: list[str | Path] = ["-H", hostfile, "--launcher", mpi.launcher, *port, "--no_python", "true"]
    result = hosts[0].run([dsl_command, *words], env={**CPU, **mpi.env}, timeout_s=50)
    gone_within(hosts)
    assert result.returncode == 1
    if name == "impi":  # its mpirun ends by itself, and does not show the words of ssh
        assert f"Unable to run bstrap_proxy on {host} " in result.stderr
        return
    errors = [line for line in result.stderr.splitlines() if line.startswith("dsl: error: ")]
    assert any(host in line and why in line for line in errors), result.stderr


@pytest.mark.parametrize("name", ["ssh", "pdsh", "openmpi4", "openmpi5", "mpich4", "mpich5", "impi"])
def test_localhost_may_stand_first_in_a_hostfile(
    hosts: Cluster, pdsh: dict[str, str], dsl_command: Path, tmp_path: Path, name: str
) -> None:
    launcher, env = name, pdsh
    if name[-1].isdigit() or name == "impi":
        mpi = find_mpi(hosts, name)
        launcher, env = mpi.launcher, dict(mpi.env)
    hostfile = _file(tmp_path / "hosts", "localhost slots=1\nnode2 slots=1\n")
    script = _file(tmp_path / "meets.py", MEETS)
    words: list[str | Path] = ["-H", hostfile, "--launcher", launcher, script]
    result = hosts[0].run([dsl_command, *words], env={**CPU, **env}, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_start_file_of_a_shell_may_print_as_much_as_it_likes(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    (hosts.home / ".bashrc").write_text("yes 'welcome, this is a shared machine' | head -c 400000\n")
    try:
        hostfile = _file(tmp_path / "hosts", "node1 slots=1\nnode2 slots=1\n")
        words: list[str | Path] = ["-H", hostfile, "--launcher", "ssh", "--no_python"]
        words += ["--no_local_rank", "hostname"]
        result = hosts[0].run([dsl_command, *words], env=CPU)
    finally:
        (hosts.home / ".bashrc").unlink()
    assert (result.returncode, sorted(result.stdout.split())) == (0, ["node1", "node2"]), result.stderr


def test_a_hostfile_may_come_by_a_pipe_and_variables_are_filled_in_on_the_host(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    _file(tmp_path / ".deepspeed_env", "\ufeffWHERE=/efa/$SSH_CONNECTION\nTOKEN=pa$$word\n")
    script = _file(tmp_path / "shows.py", "import os; print(os.environ['WHERE'], os.environ['TOKEN'])\n")
    lines = "'node1 slots=1' 'node2 slots=1'"
    command = f"{dsl_command} -H <(printf '%s\\n' {lines}) --launcher ssh --no_local_rank {script}"
    result = hosts[0].run(["bash", "-c", command], env=CPU, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    shown = [line.split() for line in result.stdout.splitlines()]
    assert sorted([words[0], words[2], words[-1]] for words in shown) == [
        [f"/efa/{hosts[0].address}", hosts[place].address, "pa$$word"] for place in (1, 2)
    ]


def test_an_agent_that_dies_has_its_last_words_in_the_report(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    """Its interpreter has a module that fails when the workers are to be started."""
    spoilt = tmp_path / "python"
    code = (
        "import sys, dsl.agent.node as node\n"
        "class Spoilt:\n    def __init__(self, *_a, **_k): raise RuntimeError('no room for the agent')\n"
        "node.Session = Spoilt\nsys.exit(node.main(sys.argv[3:]))"
    )
    _file(spoilt, f'#!/bin/sh\nexec {sys.executable} -c "$(cat {tmp_path}/code)" "$@"\n')
    _file(tmp_path / "code", code)
    spoilt.chmod(0o755)
    hostfile = _file(tmp_path / "hosts", f"node1 slots=1 python={spoilt}\nnode2 slots=1\n")
    for launcher in ("ssh", "pdsh"):
        words: list[str | Path] = ["-H", hostfile, "--launcher", launcher, "--no_python", "true"]
        result = hosts[0].run([dsl_command, *words], env={**CPU, "PDSH_RCMD_TYPE": "ssh"})
        gone_within(hosts)
        assert result.returncode == 1
        assert "node1: RuntimeError: no room for the agent" in result.stderr, result.stderr


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


HOSTFILE = "node2 slots=2\nnode0 slots=1\nnode1 slots=3\n"
# MPICH 4.0.2 sometimes hangs when it is shut down, without dsl, too.
ASK_MPI = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
print(os.uname().nodename, world.rank, world.size, total, os.environ["RANK"], flush=True)
if MPI.Get_library_version().startswith("MPICH Version:\t4.0"):
    world.barrier()
    os._exit(0)
"""
FAIL = """
import os, time
if os.environ["RANK"] == "4":
    print(time.time(), flush=True)
    os._exit(7)
time.sleep(60)
"""
LAUNCHER_S = 2.5
"""What a launcher may take to end when all agents have: far more than it needs on a busy machine."""


def command(
    dsl_command: Path, tmp_path: Path, mpi: Mpi, program: str, *options: str
) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "hosts").write_text(HOSTFILE, encoding="utf-8")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    variables = "".join(f"{name}={value}\n" for name, value in mpi.python.items())
    (tmp_path / ".deepspeed_env").write_text(variables, encoding="utf-8")
    words = [str(dsl_command), "-H", "hosts", "--launcher", mpi.launcher, "--no_local_rank", *options]
    words += ["train.py"]
    return words, {"PATH": mpi.env["PATH"], "DS_ACCELERATOR": "cpu"}


def test_a_program_that_uses_mpi_keeps_its_ranks(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, mpi: Mpi
) -> None:
    words, env = command(dsl_command, tmp_path, mpi, ASK_MPI)
    result = hosts[0].run(words, env=env, cwd=tmp_path, check=True)
    places = ["node2 0", "node2 1", "node0 2", "node1 3", "node1 4", "node1 5"]
    assert sorted(result.stdout.splitlines()) == sorted(f"{place} 6 15 {place[-1]}" for place in places)


@pytest.mark.guarantee("G2", "G3", "G4")
def test_a_failure_ends_the_launcher_at_once(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, mpi: Mpi
) -> None:
    """Of a task that ends with a code Open MPI 4 would make three seconds."""
    words, env = command(dsl_command, tmp_path, mpi, FAIL)
    result = hosts[0].run(words, env=env, cwd=tmp_path)
    took_s = time.time() - float(result.stdout)
    assert result.returncode == 7
    assert "rank 4 (local rank 1, pid" in result.stderr
    assert "host node1) failed first: exit code 7" in result.stderr
    assert took_s < LAUNCHER_S


RANK = "import os; print(os.uname().nodename, os.environ['RANK'], os.environ.get('WAND_A'))"


def _line(dsl: Path, folder: Path, *words: str) -> list[str | Path]:
    """Run a worker on each of two hosts."""
    _file(folder / "hosts", "node0 slots=1\nnode1 slots=1\n")
    script = _file(folder / "rank.py", RANK)
    return [dsl, "-H", folder / "hosts", "--no_local_rank", "-x", "WAND_*", *words, script]


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_a_job_waits_for_a_host_that_boots(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, wait_until: WaitUntil, launcher: str
) -> None:
    hosts[1].crash()
    errors = tmp_path / "errors"
    words = ["--launcher", launcher, "--wait-hosts", "90"]
    with errors.open("w") as err:
        job = hosts[0].start(
            _line(dsl_command, tmp_path, *words), env={**CPU, "WAND_A": "1"}, stdout=subprocess.PIPE, stderr=err,
            cwd=tmp_path, text=True,
        )  # fmt: skip
        with job:
            wait_until(lambda: "waiting up to" in errors.read_text(), timeout_s=60)
            hosts[1].boot()
            out, _ = job.communicate(timeout=90)
    assert job.returncode == 0, errors.read_text()
    assert "s for host node1: " in errors.read_text()
    assert sorted(text.rpartition(": ")[2] for text in out.splitlines()) == ["node0 0 1", "node1 1 1"]
    gone_within(hosts)


def test_another_program_than_ssh_has_its_failure_told_and_its_workers_ended(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    words = ["--ssh-program", "ssh -o BatchMode=yes {host}"]
    result = hosts[0].run(_line(dsl_command, tmp_path, *words), env={**CPU, "WAND_A": "1"}, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(text.rpartition(": ")[2] for text in result.stdout.splitlines()) == [
        "node0 0 1",
        "node1 1 1",
    ]
    _file(tmp_path / "rank.py", "import os, time\nos.environ['RANK'] == '1' and os._exit(7)\ntime.sleep(60)")
    line: list[str | Path] = [dsl_command, "-H", tmp_path / "hosts", *words, tmp_path / "rank.py"]
    result = hosts[0].run(line, env=CPU, cwd=tmp_path)
    assert result.returncode == 7, result.stderr
    assert "host node1) failed first: exit code 7" in result.stderr
    gone_within(hosts)
