"""Jobs in every shape of an allocation: each worker has a device that Slurm has given, and Slurm's variables fit it.

Another job has the first GPU of each host, and this Slurm hides no devices: a device that was taken by the number
of a slot would be the other job's.
"""

from __future__ import annotations

import itertools
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster, Slurm
from tests.kit.cluster.gpus import show_gpus
from tests.support.batch import Batch

from dsl.resources.hosts import expand_nodes
from dsl.words import TASKS

pytestmark = pytest.mark.cluster

REAL = {"DS_ACCELERATOR": ""}
"""Workers are for the devices that the hosts have."""

ASKED = {
    "none": (),
    "gres": ("--gres=gpu:2",),
    "per-node": ("--gpus-per-node=2",),
    "total": ("--gpus={twice}",),
    "odd-total": ("--gpus={odd}",),
    "per-task": ("--gpus-per-task=1",),
    "bind-single": ("--gpus-per-node=2", "--gpu-bind=single:1"),
    "bind-map": ("--gpus-per-node=2", "--gpu-bind=map_gpu:1,0"),
}
"""How a job asks for GPUs; with ``{twice}`` as many as there are nodes, and one more."""

SCRIPT = """#!/bin/bash
scontrol show job --details $SLURM_JOB_ID | grep IDX: > given
first=$(scontrol show hostnames | head -1)
run() {
    name=$1; shift
    mkdir $name
    "$@" > $name.log 2>&1 < /dev/null
    echo $? > $name.code
}
show=(--no_python --no_local_rank $PWD/show.sh)
run dsl dsl "${show[@]}" $PWD/dsl
run agents dsl --one-agent-per-node "${show[@]}" $PWD/agents
run fewer dsl --num_gpus 1 "${show[@]}" $PWD/fewer
run step srun -N1 -n1 dsl "${show[@]}" $PWD/step
run steps srun -N$SLURM_NNODES -n$SLURM_NNODES --ntasks-per-node=1 dsl "${show[@]}" $PWD/steps
run dslrun srun -N$SLURM_NNODES -n$SLURM_NNODES --ntasks-per-node=1 sh -c "exec dslrun --nnodes $SLURM_NNODES \\
    --nproc-per-node gpu --node-rank \\$SLURM_NODEID --master-addr $first --master-port 29517 \\
    --no-python $PWD/show.sh $PWD/dslrun"
"""
COMMANDS = ("dsl", "agents", "fewer", "step", "steps", "dslrun")
WHOLE = ("dsl", "agents")
"""Commands of which each takes the whole allocation."""

SHOW = "#!/bin/sh\nexec env -0 > $1/$(hostname).$$\n"


class Shape(NamedTuple):
    """What a job asks Slurm for."""

    nodes: int
    tasks: int
    """Per node; 0: it does not say."""
    asked: str

    @property
    def options(self) -> list[str]:
        gpus = [word.format(twice=2 * self.nodes, odd=self.nodes + 1) for word in ASKED[self.asked]]
        tasks = [f"--ntasks-per-node={self.tasks}"] if self.tasks else []
        return [f"--nodes={self.nodes}", *tasks, *gpus]

    def __str__(self) -> str:
        return f"{self.nodes}x{self.tasks or 'any'}-{self.asked}"


class Outcome(NamedTuple):
    """What came of a command."""

    code: int
    text: str
    workers: list[dict[str, str]]
    """The environments of all workers, and the host of each as HOST."""


USUAL = (
    *(Shape(2, tasks, asked) for tasks in (1, 2) for asked in ("per-node", "per-task")),
    *(Shape(2, 2, asked) for asked in ("total", "bind-single", "bind-map")),
    *(Shape(1, 2, "bind-single"), Shape(3, 0, "odd-total"), Shape(2, 2, "none")),
)
EVERY = [Shape(*one) for one in itertools.product((1, 2, 3), (0, 1, 2), ASKED)]


@pytest.fixture
def gpus(hosts: Cluster, slurm: Slurm, wait_until: WaitUntil) -> Iterator[None]:
    """Each host has four, of which another job has the first."""
    del slurm  # it has ended all jobs
    for host in hosts:
        show_gpus(host, 4)
    words = ["sbatch", "--parsable", "-N3", "--ntasks-per-node=1", "--gpus-per-node=1", "--output=/dev/null"]
    other = hosts[0].run([*words, "--wrap", "exec sleep 600"], check=True).stdout.strip()

    def runs() -> bool:
        words = ["squeue", "--noheader", "--format=%T", "--job", other]
        return hosts[0].run(words, check=True).stdout.strip() == "RUNNING"

    wait_until(runs, timeout_s=30)
    yield
    hosts[0].run(["scancel", other], check=True)


@pytest.fixture(scope="module", autouse=True)
def hosts_without_gpus(the_cluster: Cluster) -> Iterator[None]:
    """The hosts of later tests."""
    yield
    for host in the_cluster:
        host.crash()
    the_cluster.restore()


def given(folder: Path) -> dict[str, list[str]]:
    """The devices that Slurm has given on each host."""
    found: dict[str, list[str]] = {}
    for line in (folder / "given").read_text(encoding="utf-8").splitlines():
        facts = dict(word.partition("=")[::2] for word in line.split())
        ranges = facts["GRES"].partition("IDX:")[2].partition(")")[0].split(",")
        bounds = [one.split("-") for one in ranges]
        numbers = [str(one) for pair in bounds for one in range(int(pair[0]), int(pair[-1]) + 1)]
        found |= dict.fromkeys(expand_nodes(facts["Nodes"]), numbers)
    return found


def outcome(folder: Path, command: str) -> Outcome:
    workers = []
    for path in (folder / command).iterdir():
        pairs = [one.partition("=")[::2] for one in path.read_text(errors="replace").split("\0") if one]
        workers.append({**dict(pairs), "HOST": path.name.partition(".")[0]})
    code = int((folder / f"{command}.code").read_text(encoding="utf-8"))
    return Outcome(code, (folder / f"{command}.log").read_text(encoding="utf-8"), workers)


def misfits(worker: dict[str, str]) -> list[str]:
    """The launcher's variables that say something else to a worker than ours."""
    ours = (worker["RANK"], worker["LOCAL_RANK"], worker["WORLD_SIZE"])
    pairs = [pair for *names, _ in TASKS for pair in zip(names, ours, strict=True)]
    wrong = [f"{name}={worker[name]}" for name, own in pairs if worker.get(name, own) != own]
    if int(worker.get("SLURM_NTASKS", "1")) > 1 and "SLURM_NTASKS_PER_NODE" not in worker:
        wrong.append("no SLURM_NTASKS_PER_NODE")
    return wrong


def check_job(workers: list[dict[str, str]]) -> None:
    """Ranks are whole, Slurm's variables fit them, and no device of Slurm's has two workers."""
    worlds = {int(worker["WORLD_SIZE"]) for worker in workers}
    assert worlds == {len(workers)}
    assert sorted(int(worker["RANK"]) for worker in workers) == list(range(len(workers)))
    sizes = Counter(worker["HOST"] for worker in workers)
    for host, size in sizes.items():
        locals_ = sorted(int(worker["LOCAL_RANK"]) for worker in workers if worker["HOST"] == host)
        assert locals_ == list(range(size))
    for worker in workers:
        assert not misfits(worker)
        told = worker.get("SLURM_NTASKS_PER_NODE")
        assert told is None or int(told) == sizes[worker["HOST"]]


def devices_of(workers: list[dict[str, str]]) -> dict[str, list[str]]:
    """The device of each worker, by host, as CUDA's runtime picks it."""
    found = defaultdict(list)
    for worker in workers:
        shown = worker.get("CUDA_VISIBLE_DEVICES", "").split(",")
        found[worker["HOST"]].append(shown[int(worker["LOCAL_RANK"])])
    return {host: sorted(devices) for host, devices in found.items()}


@pytest.mark.guarantee("G5")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "shape", [pytest.param(one, marks=[] if one in USUAL else [pytest.mark.stress]) for one in EVERY], ids=str
)
@pytest.mark.usefixtures("gpus")
def test_workers_have_the_devices_and_the_ranks_of_their_allocation(
    shape: Shape, hosts: Cluster, tmp_path: Path, wait_until: WaitUntil
) -> None:
    script, show = tmp_path / "job.sh", tmp_path / "show.sh"
    script.write_text(SCRIPT, encoding="utf-8")
    show.write_text(SHOW, encoding="utf-8")
    show.chmod(show.stat().st_mode | stat.S_IXUSR)
    job = Batch(hosts, tmp_path, script, options=shape.options, env=REAL)
    wait_until(job.ended, timeout_s=120)
    for name in COMMANDS:
        found = outcome(tmp_path, name)
        print(f"{shape} {name}: exit code {found.code}, {len(found.workers)} workers: {found.text}")
        check(name, found, given(tmp_path))


def check(name: str, found: Outcome, slurms: dict[str, list[str]]) -> None:
    """Whether a command has done what it can with the devices of its job, or has refused in one line."""
    if not found.workers:
        assert found.code
        # The script's own srun may refuse the step, too.
        who = "dsl" if name in (*WHOLE, "fewer") else "srun|dsl|dslrun"
        assert len(set(re.findall(f"^(?:{who}): error: .*", found.text, re.MULTILINE))) == 1
        return
    assert found.code == 0
    by_host = defaultdict(list)
    for worker in found.workers:
        by_host[worker["HOST"]].append(worker)
    for workers in by_host.values() if name == "steps" else [found.workers]:
        check_job(workers)
    if not slurms:
        return  # Slurm counts no devices here, and hides none
    for host, devices in devices_of(found.workers).items():
        assert len(set(devices)) == len(devices)
        assert set(devices) <= set(slurms[host])
        if name in WHOLE:
            assert devices == slurms[host]
        elif name == "fewer":
            assert len(devices) == 1
        else:
            assert {",".join(devices)} == {worker["SLURM_STEP_GPUS"] for worker in by_host[host]}
    if name in WHOLE:
        assert by_host.keys() == slurms.keys()
