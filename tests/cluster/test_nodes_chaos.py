"""Nodes that come, leave, and are lost in every way while a training goes on: no job is lost, nothing is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.chaos import MOST, Chaos, chaos
from tests.kit.cluster import Cluster
from tests.kit.elastic import etcd, store
from tests.support.fleet import gone_within

pytestmark = pytest.mark.torch

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
