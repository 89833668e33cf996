"""Elastic trainings on several hosts: `dslrun` and torchrun in one job, nodes that come and go while it trains."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster, Host
from tests.kit.elastic import EXAMPLE, PORT, Step, Training, etcd, rendezvous, steps
from tests.kit.waiting import until
from tests.support.fleet import Ways, gone_within, running

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
@pytest.mark.parametrize("newcomer", ["dslrun", pytest.param("torchrun", marks=pytest.mark.stress)])
def test_a_training_goes_on_from_one_node_to_three_and_back(
    hosts: Cluster, tmp_path: Path, commands: Mapping[str, Path], curve: Mapping[int, float],
    newcomer: str, name: str,
) -> None:  # fmt: skip
    """The second node sorts before the first one, the third behind it. Nothing is done twice."""
    options = {"--shutdown-timeout": "5", "--max-restarts": "0"}
    with backend(name, hosts[1]) as where:
        with Training(hosts, tmp_path, nodes="1:3", options={**where, **options}) as job:
            job.script = ["--steps", "1000000", "--save-every", str(SAVE_EVERY), "--pace", str(PACE_S)]
            job.join(hosts[1], commands["dslrun"])
            job.advances(SOON_S, world=1)
            second = job.join(hosts[0], commands[newcomer])
            job.advances(SOON_S, world=2)
            third = job.join(hosts[2], commands["dslrun"])
            job.advances(SOON_S, world=3)
            for node in (second, third):
                node.process.send_signal(signal.SIGTERM)
            job.until_step(job.last() + 2, SOON_S, world=1)
            codes = [node.process.wait(SOON_S) for node in (second, third)]
            assert codes == [1 if newcomer == "torchrun" else 143, 143], job.said()
            assert job.finish(SOON_S) == [0], job.said()
        done = right(job, curve)
        assert [one.world for one in job.beginnings()] == [1, 2, 3, 1]
        assert {one.restarts for one in job.beginnings()} == {0}
        # Under torchrun rank 0 does not know it.
        reasons = {one.reason for one in job.beginnings()[1:]} - (
            {"unknown"} if newcomer == "torchrun" else set()
        )
        assert reasons == {"membership"}
        assert len({step.number for step in done}) == len(done)


def test_the_command_of_dsl_takes_a_training_through_a_lost_host(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, curve: Mapping[int, float]
) -> None:
    ways = Ways("ssh", ("--elastic_training", "--num_nodes", "1:3", "--master_addr", hosts[0].address))
    folder = tmp_path / "job"
    script = [str(EXAMPLE), "--device", "cpu", "--steps", "1000000", "--save-every", str(SAVE_EVERY)]
    script += [
        "--pace",
        str(PACE_S),
        "--checkpoints",
        f"{folder}/checkpoints",
        "--stop-file",
        f"{folder}/stop",
    ]
    options = ("--heartbeat", "3", "--grace", "2", "--max-restarts", "0")
    with running(
        hosts,
        dsl_command,
        folder,
        script,
        ways=ways,
        options=options,
        slots=1,
        is_python=True,
        lets_rank=True,
    ) as job:

        def advances(world: int) -> None:
            last = max((step.number for step in steps(job.stdout)), default=0)
            until(
                lambda: [one for one in steps(job.stdout) if one.world == world and one.number > last], SOON_S
            )

        advances(3)
        hosts[1].crash()
        advances(2)
        hosts[1].boot()
        advances(3)
        (folder / "stop").touch()
        assert job.wait(SOON_S) == 0, job.stderr
        gone_within(hosts)
    done = steps(job.stdout)
    assert {step.number for step in done} == set(range(1, max(step.number for step in done) + 1))
    assert not [step for step in done if step.loss != pytest.approx(curve[step.number], abs=2e-6)]
    assert {step.restarts for step in done} == {0}
