"""Nodes that meet through an etcd server. It is one of the packages of the hosts, and needs none of them itself."""

from __future__ import annotations

import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster
from tests.kit.cluster.packages import debian_packages
from tests.support.delegates import QUICK, Nursery, driven, met, opening

from dsl.model.nodes import NodesFinished, PeerFailure
from dsl.model.outcome import Membership, MembershipChanged
from dsl.rendezvous.delegate_messages import Finish, Leave

pytestmark = pytest.mark.torch


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def etcd(the_cluster: Cluster, tmp_path: Path, wait_until: WaitUntil) -> Iterator[str]:
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


def test_nodes_meet_fail_come_and_leave(etcd: str, nursery: Nursery) -> None:
    with driven(nursery) as start:
        delegates = []
        for host in "abc":
            delegates.append(start(host))
            delegates[-1].tell(opening(host, etcd, (1, 3), backend="etcd-v2", settings=QUICK))
        a, b, c = delegates
        a.meet()
        b.meet()
        assert {one.hosts for one in met(a, b)} == {("a", "b")}
        a.fail(0, 1)
        assert b.wait(PeerFailure).host == "a"
        a.meet(restarts=1, reason="failure")
        b.meet(reason="membership")
        assert {(one.meeting.restarts, one.meeting.reason) for one in met(a, b)} == {(1, "failure")}
        c.meet()
        assert [one.wait(MembershipChanged) for one in (a, b)] == [
            MembershipChanged(Membership(2, 1), ())
        ] * 2
        a.meet(reason="membership")
        b.meet(reason="membership")
        met(a, b, c)
        c.tell(Leave())
        assert [one.wait(MembershipChanged).left for one in (a, b)] == [("c",)] * 2
        a.meet(reason="membership")
        b.meet(reason="membership")
        met(a, b)
        a.tell(Finish())
        b.tell(Finish())
        a.wait(NodesFinished)
        b.wait(NodesFinished)
