"""A cluster of three hosts for the tests of this directory, and the proof that each test leaves nothing on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import MPI, Cluster, Mpi, Slurm, find_mpi
from tests.support.backends import BACKENDS, Backend, find_backend
from tests.support.fleet import PLAIN, SSH, Launch, Ways, everybody
from tests.support.steadiness import LEFT_BEHIND

LEFT_S = 10.0
"""What a job may take to be gone from every host, once its command has ended."""


@pytest.hookimpl(trylast=True)  # after the one that marks them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(scope="session")
def the_cluster() -> Iterator[Cluster]:
    """Three hosts, booted when the first test asks for them. Tests take `hosts`."""
    if "CI" not in os.environ:  # there nothing is skipped
        namespaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--", "true"]
        if subprocess.run(namespaces, capture_output=True, check=False).returncode:
            pytest.skip("needs root that may make namespaces")
        if shutil.which("apt-get") is None:
            pytest.skip("needs apt-get")
    with Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def hosts(the_cluster: Cluster, wait_until: WaitUntil) -> Iterator[Cluster]:
    """The three hosts: `hosts[0].run([...])`. After the test nothing may be left on any of them.

    A host that the test has crashed, unplugged or frozen is put right again.
    """
    the_cluster.restore()
    yield the_cluster
    for host in the_cluster:
        if host.is_up and host.cgroup is not None:
            host.thaw()
        if host.is_up and not host.is_plugged:
            host.plug()
    try:
        wait_until(lambda: not the_cluster.leftovers(), timeout_s=LEFT_S)
    except AssertionError:
        leftovers = the_cluster.leftovers()
        for host in leftovers:
            host.crash()
        listing = "; ".join(f"{host}: {', '.join(some)}" for host, some in leftovers.items())
        pytest.fail(f"{LEFT_BEHIND}: {listing}")
    finally:
        the_cluster.restore()


@pytest.fixture
def pdsh(hosts: Cluster) -> dict[str, str]:
    """The variables that make pdsh use ssh; it is installed on every host."""
    return {"PDSH_RCMD_TYPE": "ssh"}


@pytest.fixture(params=MPI)
def mpi(hosts: Cluster, request: pytest.FixtureRequest) -> Mpi:
    """Each MPI library in turn: `hosts[0].run([*mpi.command(hosts), "hostname"], env=mpi.env)`."""
    return find_mpi(hosts, request.param)


@pytest.fixture(scope="session")
def the_slurm(the_cluster: Cluster) -> Slurm:
    """Slurm, started when the first test asks for it. Tests take `slurm`."""
    slurm = Slurm(the_cluster)
    slurm.up()
    return slurm


@pytest.fixture
def slurm(hosts: Cluster, the_slurm: Slurm) -> Iterator[Slurm]:
    """Slurm on the three hosts, all idle: `hosts[0].run(["srun", "-N3", "hostname"])`. No job outlives a test."""
    the_slurm.clear()
    yield the_slurm
    hosts.restore()
    the_slurm.clear()


@pytest.fixture
def ways(hosts: Cluster, request: pytest.FixtureRequest) -> Ways:
    """A launcher by its name, ssh unless the test is parametrized; an MPI library stands for its launcher."""
    name = getattr(request, "param", "ssh")
    if name == "ssh":
        return SSH
    if name == "pdsh":
        return Ways(name, env=request.getfixturevalue("pdsh"))
    if name == "slurm":
        request.getfixturevalue("slurm")
        return Ways(name)
    mpi = find_mpi(hosts, name)
    return Ways(mpi.launcher, env=mpi.env)


@pytest.fixture
def launch(hosts: Cluster, dsl_command: Path, testchild: Path, tmp_path: Path) -> Launch:
    """Launch the helper program on the hosts: `with launch(PLAIN, ways, "--grace", "1") as job`."""
    return Launch(hosts, dsl_command, testchild, tmp_path)


@pytest.fixture
def neighbour(hosts: Cluster, launch: Launch) -> Iterator[set[tuple[str, int, int]]]:
    """The processes of another job of the same user on the same hosts. All of them live at the end."""
    with launch(PLAIN, SSH, name="neighbour") as job:
        job.ready(6)
        own = everybody(hosts)
        yield own
        assert own <= everybody(hosts), "another job of the same user was touched"
        job.process.terminate()
        assert job.wait() == 143


@pytest.fixture(params=BACKENDS)
def backend(hosts: Cluster, request: pytest.FixtureRequest) -> Backend:
    """Each launcher in turn: `hosts[0].run([dsl_command, "-H", file, *backend.words, ...], env=backend.env)`."""
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    return find_backend(hosts, request.param)
