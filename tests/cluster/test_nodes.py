"""Elastic trainings on several hosts: `dslrun` and torchrun in one job, nodes that come and go while it trains."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.chaos import MOST, Chaos, chaos
from tests.kit.cluster import Cluster, Host
from tests.kit.cluster.packages import debian_packages
from tests.kit.elastic import EXAMPLE, PORT, Step, Training, etcd, rendezvous, steps, store
from tests.support.delegates import QUICK, Nursery, driven, met, opening
from tests.support.fleet import gone_within

from dsl.rendezvous.delegate_messages import Claim, Claimed, Finish, Leave, NodesFinished, Waiting

pytestmark = pytest.mark.torch

SAVE_EVERY = 20
PACE_S = 0.05
SOON_S = 60.0
"""Far more than nodes need to meet and workers to import torch; what it takes is measured by the benches."""
SETTINGS = {"last_call_timeout": 1, "keep_alive_interval": 1, "join_timeout": 60}
"""torch's rendezvous waits half a minute for further nodes when it is not told otherwise."""


@pytest.fixture(scope="module")
def commands() -> dict[str, Path]:
    """Ours and torch's."""
    scripts = Path(sys.executable).parent
    return {name: scripts / name for name in ("dslrun", "torchrun")}


@pytest.fixture(scope="module")
def curve(commands: Mapping[str, Path]) -> dict[int, float]:
    """The loss at each of many steps, of one worker that nobody has disturbed."""
    words = [str(commands["dslrun"]), str(EXAMPLE), "--device", "cpu", "--steps", "4000"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return {step.number: step.loss for step in steps(result.stdout)}


def right(training: Training, curve: Mapping[int, float]) -> list[Step]:
    """All steps, after a look at them: none is missing, and each has the loss of an undisturbed training."""
    done = training.steps()
    numbers = {step.number for step in done}
    assert numbers == set(range(1, max(numbers) + 1))
    wrong = [step for step in done if step.loss != pytest.approx(curve[step.number], abs=2e-6)]
    assert not wrong
    return done


@contextlib.contextmanager
def backend(name: str, host: Host) -> Iterator[dict[str, str]]:
    """Options of a rendezvous that is held on that host: by the first command there, or by an etcd."""
    if name == "c10d":
        yield rendezvous(name, f"{host.name}:{PORT}", **SETTINGS)
        return
    with etcd(host) as endpoint:
        yield rendezvous(name, endpoint, **SETTINGS)


PAIRS = (
    ("dslrun", "torchrun", "c10d"),
    ("torchrun", "dslrun", "c10d"),
    ("dslrun", "torchrun", "etcd-v2"),
    pytest.param("torchrun", "dslrun", "etcd-v2", marks=pytest.mark.stress),
    pytest.param("dslrun", "dslrun", "etcd-v2", marks=pytest.mark.stress),
)


@pytest.mark.parametrize("first, second, name", PAIRS)
def test_both_commands_form_one_job(
    hosts: Cluster, tmp_path: Path, commands: Mapping[str, Path], curve: Mapping[int, float],
    first: str, second: str, name: str,
) -> None:  # fmt: skip
    """Either may hold the store, and have the first ranks."""
    with backend(name, hosts[0]) as options, Training(hosts, tmp_path, nodes="2", options=options) as job:
        job.script = ["--steps", "40", "--save-every", str(SAVE_EVERY)]
        job.join(hosts[0], commands[first])
        job.join(hosts[1], commands[second], workers=2)
        job.until_step(40, SOON_S, world=3)
        codes = [node.process.wait(SOON_S) for node in job.nodes]
        assert codes == [0, 0], job.said()
        right(job, curve)
        assert {step.restarts for step in job.steps()} == {0}


@pytest.mark.parametrize("name", ["c10d", pytest.param("etcd-v2", marks=pytest.mark.stress)])
def test_a_training_goes_on_from_one_node_to_three_and_back(
    hosts: Cluster, tmp_path: Path, commands: Mapping[str, Path], curve: Mapping[int, float], name: str
) -> None:  # fmt: skip
    """The second node sorts before the first one, the third behind it. Nothing is done twice."""
    options = {"--shutdown-timeout": "5", "--max-restarts": "0"}
    with backend(name, hosts[1]) as where:
        with Training(hosts, tmp_path, nodes="1:3", options={**where, **options}) as job:
            job.script = ["--steps", "1000000", "--save-every", str(SAVE_EVERY), "--pace", str(PACE_S)]
            job.join(hosts[1], commands["dslrun"])
            job.advances(SOON_S, world=1)
            second = job.join(hosts[0], commands["dslrun"])
            job.advances(SOON_S, world=2)
            third = job.join(hosts[2], commands["dslrun"])
            job.advances(SOON_S, world=3)
            for node in (second, third):
                node.process.send_signal(signal.SIGTERM)
            job.until_step(job.last() + 2, SOON_S, world=1)
            codes = [node.process.wait(SOON_S) for node in (second, third)]
            assert codes == [143, 143], job.said()
            assert job.finish(SOON_S) == [0], job.said()
        done = right(job, curve)
        assert [one.world for one in job.beginnings()] == [1, 2, 3, 1]
        assert {one.restarts for one in job.beginnings()} == {0}
        assert {one.reason for one in job.beginnings()[1:]} == {"membership"}
        assert len({step.number for step in done}) == len(done)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def etcd_here(the_cluster: Cluster, tmp_path: Path, wait_until: WaitUntil) -> Iterator[str]:
    """Endpoint of a server; the cluster is there if the package is."""
    port, peer = free_port(), free_port()
    command = [
        *(str(debian_packages() / "usr/bin/etcd"), "--enable-v2", f"--data-dir={tmp_path}"),
        *(
            f"--listen-client-urls=http://127.0.0.1:{port}",
            f"--advertise-client-urls=http://127.0.0.1:{port}",
        ),
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_up() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/keys/", timeout=1):
                return True
        except OSError:
            return False

    try:
        wait_until(is_up)
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    yield one
    one.close()


def test_nodes_meet_by_torch_and_one_comes_late(etcd_here: str, nursery: Nursery) -> None:
    with driven(nursery) as start:
        delegates = []
        for host in "abc":
            delegates.append(start(host))
            delegates[-1].tell(opening(host, etcd_here, (1, 3), backend="etcd-v2", settings=QUICK))
        a, b, c = delegates
        a.meet()
        b.meet()
        assert {one.hosts for one in met(a, b)} == {("a", "b")}
        c.meet()
        for one in (a, b):
            one.wait(Waiting)
        a.meet()
        b.meet()
        met(a, b, c)
        for one in (a, b, c):
            one.tell(Finish())
        for one in (a, b, c):
            one.wait(NodesFinished)


def test_one_node_conducts_and_the_next_one_if_it_goes(etcd_here: str, nursery: Nursery) -> None:
    with driven(nursery) as start:
        nodes = [start(host) for host in "ab"]
        for one in nodes:
            one.tell(opening(one.host, etcd_here, backend="etcd-v2", settings=QUICK))
            one.tell(Claim(1001, "0" * 64))
        first, second = sorted(nodes, key=lambda one: one.wait(Claimed).conducts, reverse=True)
        first.tell(Leave())
        second.tell(Claim(1002, "0" * 64, lost=1))
        found = second.wait(Claimed)
        assert (found.number, found.conducts) == (2, True)


# ---- nodes that come, leave, and are lost in every way


END_S = 60.0


@pytest.fixture(scope="module")
def wide(the_cluster: Cluster) -> Iterator[Cluster]:
    """Four hosts for nodes and one for the store. The other cluster says whether there can be any."""
    with Cluster(MOST + 1, prefix="wide", network="10.78.0") as cluster:
        yield cluster


def survives(job: Chaos, events: int) -> None:
    """Let things happen; the training goes on after each, and ends in order on all nodes."""
    with job.training:
        job.begin()
        job.run(events)
        job.settle()
        counts = [node.restart_counts() for node in job.training.alive()]
        codes = job.training.finish(END_S)
        told = "\n".join(map(str, job.harms))
        assert not [harm for harm in job.harms if harm.failure], told
        assert not job.deserters, told
        assert codes == [0] * MOST, f"{told}\n{job.training.said()}"
        assert len(counts) == MOST
        assert all(count == counts[0] and len(count) == 1 for count in counts), (counts, told)
        numbers = {step.number for step in job.training.steps()}
        assert numbers == set(range(1, max(numbers) + 1))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1])
def test_a_training_goes_on_whatever_happens_to_its_nodes(wide: Cluster, tmp_path: Path, seed: int) -> None:
    with store(wide[-1]) as endpoint:
        survives(chaos(wide, tmp_path, endpoint, dslrun(), seed), 4)
    nothing_is_left(wide)


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])
def test_a_training_goes_on_through_a_hundred_events(wide: Cluster, tmp_path: Path, backend: str) -> None:
    held = store if backend == "c10d" else etcd
    with held(wide[-1]) as endpoint:
        survives(chaos(wide, tmp_path, endpoint, dslrun(), 7, backend), 100)
    nothing_is_left(wide)


def dslrun() -> str:
    """Ours."""
    return str(Path(sys.executable).with_name("dslrun"))


def nothing_is_left(cluster: Cluster) -> None:
    """On any host."""
    try:
        gone_within(cluster)
    finally:
        cluster.restore()
