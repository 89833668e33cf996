"""Real jobs through every launcher: the right ranks and devices on the right hosts, a true exit code, and training."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.kit.cluster import MPI, Cluster, Host, Mpi, Slurm, find_mpi
from tests.kit.cluster.host import HostProcess
from tests.kit.waiting import until
from tests.support.backends import BACKENDS, Backend

from dsl.plan.remote import RANK_LAUNCHERS
from dsl.words import TASKS

ROOT = Path(__file__).parent.parent.parent
TRAIN = ROOT / "examples" / "train_ddp.py"
STEPS = 5
PATIENCE_S = 180.0
"""Far more than six workers take that import torch on a busy machine."""

EVEN = "node0 slots=2\nnode1 slots=2\nnode2 slots=2\n"
UNEVEN = "node2 slots=4\nnode0 slots=2\nnode1 slots=3\n"

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "MASTER_ADDR",
    "MASTER_PORT",
)
WORKER = f"""
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
print(os.uname().nodename, *[os.environ.get(name) for name in {NAMES}], flush=True)
Path("here" + rank).touch()
if len(sys.argv) > 1:  # the rank that fails, once all are there
    while len(list(Path().glob("here*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.005)
    if sys.argv[1] == rank:
        print("a last word", file=sys.stderr, flush=True)
        os._exit(7)
    time.sleep(60)
"""


class Jobs:
    """Starts jobs on the first host, in a directory that all of them see."""

    def __init__(self, hosts: Cluster, command: Path, folder: Path) -> None:
        self.hosts, self.command, self.folder = hosts, command, folder
        self.words: tuple[str | Path, ...] = (command,)
        (folder / "worker.py").write_text(WORKER, encoding="utf-8")

    def run(self, backend: Backend, hostfile: str, *words: str | Path) -> CompletedProcess[str]:
        """Run one to its end."""
        line, options = self._call(backend, hostfile, words)
        return self.hosts[0].run(line, **options, timeout_s=PATIENCE_S)

    def start(self, backend: Backend, hostfile: str, *words: str | Path, **streams: Any) -> HostProcess:
        """Start one."""
        line, options = self._call(backend, hostfile, words)
        return self.hosts[0].start(line, **options, **streams)

    def _call(
        self, backend: Backend, hostfile: str, words: tuple[str | Path, ...]
    ) -> tuple[list[str | Path], dict[str, Any]]:
        (self.folder / "hosts").write_text(hostfile, encoding="utf-8")
        line = [*self.words, "-H", "hosts", *backend.words, "--no_local_rank", *words]
        return line, {"env": {"DS_ACCELERATOR": "cpu", **backend.env}, "cwd": self.folder}


@pytest.fixture
def jobs(hosts: Cluster, dsl_command: Path, tmp_path: Path) -> Jobs:
    """Run a job: `jobs.run(backend, EVEN, "worker.py")`."""
    return Jobs(hosts, dsl_command, tmp_path)


def lines(*hosts: tuple[str, str], master: Host) -> list[str]:
    """What the workers say of themselves, by rank, if each host has these devices."""
    places = [(name, rank, devices) for name, devices in hosts for rank in range(len(devices.split(",")))]
    return sorted(
        f"{name} {rank} {local_rank} {len(places)} {len(devices.split(','))} {devices} {master.address} 29500"
        for rank, (name, local_rank, devices) in enumerate(places)
    )


@pytest.mark.guarantee("G2", "G3")
def test_chosen_slots_have_their_ranks_and_devices_and_a_failure_its_code(
    hosts: Cluster, backend: Backend, jobs: Jobs
) -> None:
    """Nothing of what the launcher itself says about the failure is shown."""
    where = "node2:1,3@node0:1@node1:0,2"
    words = ("--include", where, "worker.py", "3")
    result = jobs.run(backend, UNEVEN, *words)
    expected = lines(("node2", "1,3"), ("node0", "1"), ("node1", "0,2"), master=hosts[2])
    assert sorted(result.stdout.splitlines()) == expected, result.stderr
    said = re.sub(r"pid \d+", "pid N", result.stderr)
    assert said.splitlines() == [
        "a last word",
        "dsl: rank 3 (local rank 0, pid N, host node1) failed first: exit code 7",
        "dsl: last output of rank 3:",
        "dsl:   | a last word",
        "dsl: stopped by dsl: ranks 0-2,4",
    ]
    assert result.returncode == 7


SPEAKS = """
import os, signal, sys, time
from pathlib import Path
attempts, rank = Path("attempts"), os.environ["RANK"]
spoken = Path(f"spoken{attempts.stat().st_size if attempts.exists() else 0}")
if rank == sys.argv[1]:
    print("here", flush=True)
    spoken.touch()
elif rank == "3":
    while sys.argv[1] != "none" and not spoken.exists():
        time.sleep(0.005)
    attempts.open("a").write("x")
    os._exit(7)
signal.pause()
"""


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("speaker, attempts", [("none", 3), ("0", 5)])
def test_a_failure_before_any_output_on_any_host_is_tried_three_times(
    backend: Backend, jobs: Jobs, speaker: str, attempts: int
) -> None:
    (jobs.folder / "speaks.py").write_text(SPEAKS, encoding="utf-8")
    words = ("--max-restarts=4", "--restart-on=any", "speaks.py", speaker)
    result = jobs.run(backend, EVEN, *words)
    assert (result.returncode, (jobs.folder / "attempts").read_text()) == (7, "x" * attempts), result.stderr
    why = "not tried again: exit code 7 3 times in a row, before any output of the script"
    assert (why in result.stderr) == (attempts == 3), result.stderr


@pytest.mark.parametrize("backend", ["ssh"], indirect=True)
def test_what_stands_in_for_deepspeed_reaches_the_hosts_and_leaves_nothing_there(
    backend: Backend, jobs: Jobs
) -> None:
    jobs.words += ("--stand-in", "--", "deepspeed")
    text = "import os; print(os.uname().nodename, 'stand_in' in str(os.environ).lower())"
    (jobs.folder / "show.py").write_text(text, encoding="utf-8")
    result = jobs.run(backend, EVEN, "show.py")
    assert result.returncode == 0, result.stderr
    expected = [f"node{number} False" for number in (0, 0, 1, 1, 2, 2)]
    assert sorted(result.stdout.splitlines()) == expected


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("backend", ["ssh"], indirect=True)
def test_a_verdict_on_a_terminal_does_not_repeat_what_the_terminal_shows(
    backend: Backend, jobs: Jobs
) -> None:
    """The same as on one node: the worker's last output came from another host, and is still on the screen."""
    outer, inner = os.openpty()
    streams: dict[str, Any] = {"stdin": inner, "stdout": inner, "stderr": inner, "has_terminal": True}
    with jobs.start(backend, EVEN, "worker.py", "3", **streams) as process:
        os.close(inner)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal has no writer any more
            while part := os.read(outer, 65536):
                shown += part
        assert process.wait(PATIENCE_S) == 7
    os.close(outer)
    text = shown.decode()
    assert "host node1) failed first: exit code 7" in text
    assert text.count("a last word") == 1
    assert "last output of" not in text


@pytest.mark.parametrize(
    "options, places",
    [
        # The launching host has no part in the job.
        ("--exclude node0@node1:1", [("node2", "0,1,2,3"), ("node1", "0,2")]),
        ("--one-agent-per-node --num_nodes 2 --num_gpus 2", [("node2", "0,1"), ("node0", "0,1")]),
    ],
)
def test_a_part_of_the_hosts_and_of_their_slots(
    hosts: Cluster, backend: Backend, jobs: Jobs, options: str, places: list[tuple[str, str]]
) -> None:
    result = jobs.run(backend, UNEVEN, *options.split(), "worker.py")
    assert sorted(result.stdout.splitlines()) == lines(*places, master=hosts[2]), result.stderr
    assert (result.returncode, result.stderr) == (0, "")


def test_a_launcher_that_fails_says_why(backend: Backend, jobs: Jobs) -> None:
    result = jobs.run(backend, EVEN, "--launcher_args=--no-such-option", "worker.py")
    assert result.stdout == ""
    assert result.returncode not in (0, 7)
    words = {"ssh": "unknown option -- -", "pdsh": "invalid option -- '-'"}
    assert words.get(backend.launcher, "no-such-option") in result.stderr
    assert "sage:" not in result.stderr


# Training.


def losses(result: CompletedProcess[str]) -> tuple[list[str], str]:
    """The steps of rank 0, and what all six ranks have at the end."""
    steps = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    ends = re.findall(rf"^rank (\d) ended at step {STEPS} (loss .*)$", result.stdout, re.MULTILINE)
    assert sorted(rank for rank, _ in ends) == list("012345"), result.stdout + result.stderr
    (end,) = {text for _, text in ends}
    return steps, end


@pytest.fixture(scope="module")
def alone(the_cluster: Cluster, dsl_command: Path) -> tuple[list[str], str]:
    """The losses of the same six ranks on one host."""
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "6"}
    result = the_cluster[1].run([dsl_command, TRAIN, *training()], env=env, timeout_s=PATIENCE_S, check=True)
    return losses(result)


def training() -> tuple[str, ...]:
    return ("--steps", str(STEPS), "--log-every", "1", "--device", "cpu")


KINDS = {"ssh", "openmpi4", "slurm"}
"""One launcher of each kind. Under all of them, the tests above compare what the workers are told."""


@pytest.mark.torch
@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(
    "backend",
    [pytest.param(word, marks=[] if word in KINDS else [pytest.mark.stress]) for word in BACKENDS],
    indirect=True,
)
def test_a_network_is_trained_on_three_hosts_as_on_one(
    backend: Backend, jobs: Jobs, alone: tuple[list[str], str]
) -> None:
    result = jobs.run(backend, EVEN, TRAIN, *training())
    assert (result.returncode, noise_of_torch(result.stderr)) == (0, [])
    assert losses(result) == alone


def noise_of_torch(text: str) -> list[str]:
    """What is said, but for torch's complaint that an address has no name."""
    return [line for line in text.splitlines() if "[c10d] The hostname of the client socket" not in line]


@pytest.mark.torch
@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("way", ["ssh", pytest.param("srun", marks=pytest.mark.stress)])
def test_nodes_that_know_their_places_train_without_a_head(
    way: str,
    hosts: Cluster,
    dsl_command: Path,
    tmp_path: Path,
    alone: tuple[list[str], str],
    request: pytest.FixtureRequest,
) -> None:
    """dslrun is started on each of two nodes, by ssh or by srun, and told its node rank."""
    options = "--nnodes 2 --nproc-per-node 3 --master-addr node1 --master-port 29511"
    line = f"OMP_NUM_THREADS=1 exec {dsl_command.with_name('dslrun')} {options} --node-rank {{}} {TRAIN} {' '.join(training())}"
    if way == "srun":
        request.getfixturevalue("slurm")
        words = ["srun", "-Q", "-N2", "-w", "node1,node2", "sh", "-c", line.format("$SLURM_NODEID")]
    else:
        starts = [f"ssh node{rank + 1} '{line.format(rank)}' & p{rank}=$!" for rank in range(2)]
        words = ["bash", "-c", "\n".join([*starts, "wait $p0 && wait $p1"])]
    result = hosts[0].run(words, cwd=tmp_path, timeout_s=PATIENCE_S)
    told = {
        "dslrun: starting with 2 nodes: node1, node2",
        "dslrun: all workers of this node ended well, waiting for the other nodes",
    }
    assert (result.returncode, set(noise_of_torch(result.stderr)) - told) == (0, set())
    assert losses(result) == alone


@pytest.mark.parametrize("backend", [*MPI, "slurm"], indirect=True)
def test_tasks_keep_what_their_launcher_tells_them(backend: Backend, jobs: Jobs) -> None:
    """Scripts that ask their launcher find the same ranks there."""
    names = {"openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")}
    names["slurm"] = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    theirs = names.get(backend.launcher, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"))
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    script = f"import os; print(*[os.environ[name] for name in {(*theirs, *ours)}])\n"
    (jobs.folder / "ask.py").write_text(script, encoding="utf-8")
    result = jobs.run(backend, EVEN, "ask.py")
    ranks = [f"{rank} 6 {rank % 2}" for rank in range(6)]
    assert sorted(result.stdout.splitlines()) == [f"{rank} {rank}" for rank in ranks]
    assert backend.launcher in RANK_LAUNCHERS


OTHERS = f"""
import os
told = [name for *names, _ in {TASKS} for name in names if name in os.environ]
print(os.environ["RANK"], os.environ["WORLD_SIZE"], *told)
"""


@pytest.mark.parametrize("backend", [*MPI, "slurm"], indirect=True)
def test_workers_of_one_agent_per_node_do_not_see_its_rank(backend: Backend, jobs: Jobs) -> None:
    """DeepSpeed asserts that OMPI_COMM_WORLD_LOCAL_RANK is LOCAL_RANK."""
    (jobs.folder / "ask.py").write_text(OTHERS, encoding="utf-8")
    result = jobs.run(backend, EVEN, "--one-agent-per-node", "ask.py")
    assert sorted(result.stdout.splitlines()) == [f"{rank} 6" for rank in range(6)], result.stderr


def test_workers_do_not_see_the_rank_of_the_task_that_runs_dslrun(
    hosts: Cluster, mpi: Mpi, jobs: Jobs
) -> None:
    """As where a cluster starts one task on each node."""
    (jobs.folder / "ask.py").write_text(OTHERS, encoding="utf-8")
    places = "--tag-output never --nnodes 3 --nproc-per-node 2 --master-addr node0 --master-port 29512"
    rank = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
    line = f"exec {jobs.command.with_name('dslrun')} {places} --node-rank {rank} {jobs.folder}/ask.py"
    result = hosts[0].run(
        [*mpi.command(hosts), "sh", "-c", line], env=mpi.env, cwd=jobs.folder, timeout_s=PATIENCE_S
    )
    assert sorted(result.stdout.splitlines()) == [f"{rank} 6" for rank in range(6)], result.stderr


@pytest.mark.parametrize("words", [(), ("--one-agent-per-node",)])
def test_a_launcher_inside_of_another_counts_its_own_tasks(
    words: tuple[str, ...], hosts: Cluster, slurm: Slurm, jobs: Jobs
) -> None:
    """Every task of srun inherits the rank of the mpirun around dsl."""
    assert slurm.head is hosts[0]
    (jobs.folder / "ask.py").write_text(OTHERS, encoding="utf-8")
    (jobs.folder / "hosts").write_text(EVEN, encoding="utf-8")
    outer = find_mpi(hosts, "openmpi4")
    words = ("--tag-output", "never", *words)
    command = ["mpirun", "-n", "1", str(jobs.command), "-H", "hosts", "--launcher", "slurm", *words, "ask.py"]
    result = hosts[0].run(
        command, env={"DS_ACCELERATOR": "cpu", **outer.env}, cwd=jobs.folder, timeout_s=PATIENCE_S
    )
    own = "" if "--one-agent-per-node" in words else " SLURM_PROCID SLURM_LOCALID SLURM_NTASKS"
    assert sorted(result.stdout.splitlines()) == [f"{rank} 6{own}" for rank in range(6)], result.stderr


def test_ranks_of_slurm_are_those_of_mpi(hosts: Cluster, slurm: Slurm, jobs: Jobs) -> None:
    """The descriptor by which MPI talks to Slurm reaches the workers."""
    assert slurm.head is hosts[0]
    script = """
import os
from mpi4py.MPI import COMM_WORLD as world
print(os.environ["RANK"], world.rank, world.size, world.allreduce(world.rank), os.uname().nodename)
"""
    (jobs.folder / "ask.py").write_text(script, encoding="utf-8")
    variables = find_mpi(hosts, "mpich5").python
    lines = "".join(f"{name}={value}\n" for name, value in variables.items())
    (jobs.folder / ".deepspeed_env").write_text(lines, encoding="utf-8")
    result = jobs.run(Backend("slurm", {}, ("--launcher_args=--mpi=pmi2",)), EVEN, "ask.py")
    expected = [f"{rank} {rank} 6 15 node{rank // 2}" for rank in range(6)]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize("backend", ["ssh", "pdsh", "openmpi4", "mpich4", "slurm"], indirect=True)
def test_a_script_is_sourced_on_each_host_and_a_named_file_of_variables_is_read_here(
    backend: Backend, jobs: Jobs
) -> None:
    (jobs.folder / "lib").mkdir()
    (jobs.folder / "lib" / "mine.py").write_text("NAME = 'mine'\n", encoding="utf-8")
    (jobs.folder / "my env.sh").write_text('export SOURCED="on $(hostname)"\n', encoding="utf-8")
    (jobs.folder / "my.vars").write_text("NAMED='a \"b\" $c'\n", encoding="utf-8")
    script = (
        "import os, mine; print(mine.NAME, os.environ['SOURCED'], os.environ['NAMED'], os.uname().nodename)"
    )
    (jobs.folder / "ask.py").write_text(script, encoding="utf-8")
    env = {"DS_ENV_FILE": "my.vars", "PYTHONPATH": str(jobs.folder / "lib"), **backend.env}
    words = ("--venv_script", "my env.sh", "ask.py")
    result = jobs.run(backend._replace(env=env), "node1 slots=1\nnode2 slots=1\n", *words)
    expected = [f'mine on {name} a "b" $c {name}' for name in ("node1", "node2")]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr


@pytest.mark.parametrize("backend", ["ssh", "pdsh"], indirect=True)
def test_ssh_takes_another_port(hosts: Cluster, backend: Backend, jobs: Jobs) -> None:
    daemon = hosts[2].start(["/usr/sbin/sshd", "-D", "-p", "2222"])
    try:
        until(lambda: not hosts[0].run(["bash", "-c", "exec 3</dev/tcp/node2/2222"]).returncode, 20)
        (jobs.folder / "ask.py").write_text(
            "import os; print(os.environ['SSH_CONNECTION'])", encoding="utf-8"
        )
        result = jobs.run(backend, "node2 slots=1\n", "--ssh_port", "2222", "ask.py")
    finally:
        daemon.terminate()
        daemon.wait(10)
    assert result.stdout.split()[2:] == [hosts[2].address, "2222"], result.stderr
