"""Delegates of several nodes on this machine, with torch's own rendezvous between them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.delegates import MORTAL, QUICK, SHIFTED, Driven, Nursery, driven, met, opening

from dsl._record import replace
from dsl.model.job import Notice
from dsl.model.judgement import Failed
from dsl.model.nodes import MeetingRefused, NodesFinished, PeerFailure
from dsl.model.outcome import Membership, MembershipChanged
from dsl.rendezvous.delegate_messages import Finish, Leave

FAILED = Failed(
    "rank", "1", 1, 1, 77, 126, 9, exec_stage="exec", exec_errno=13, exec_path="/ü", target="folder"
)
pytestmark = [pytest.mark.torch, pytest.mark.timeout(90)]

SOON_S = 10.0
"""Far more than `LEAVE_S`, after which a delegate goes whatever the store does; torch would wait for a minute."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    yield one
    one.close()


@pytest.fixture
def start(nursery: Nursery) -> Iterator[Callable[..., Driven]]:
    with driven(nursery) as starter:
        yield starter


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def open_and_meet(
    start: Callable[..., Driven],
    endpoint: str,
    hosts: str,
    nodes: tuple[int, int],
    **changes: Any,
) -> list[Driven]:
    """Delegates of hosts that are called by single letters; the first hosts the store."""
    found: list[Driven] = []
    for host in hosts:
        one = start(host)
        order = opening(host, endpoint, nodes, **changes)
        if found:  # on a busy machine it may come to the port before the first
            settings = (*order.point.settings, ("is_host", "0"))
            order = replace(order, point=replace(order.point, settings=settings))
        one.tell(order)
        one.meet()
        found.append(one)
    return found


def test_two_nodes_meet_fail_and_meet_again(endpoint: str) -> None:
    """As agents start them. A failure is told at once, restarts and reason are the same on both nodes."""
    with driven(None) as start:
        a, b = start("a"), start("b")
        for one, size in ((a, 2), (b, 3)):
            one.tell(opening(one.host, endpoint))
            one.meet(size)
        first, second = met(a, b, timeout_s=60)
        assert (first.meeting.node_rank, second.meeting.node_rank) == (0, 1)
        assert first.meeting.local_world_sizes == second.meeting.local_world_sizes == (2, 3)
        assert (first.meeting.address, first.hosts) == ("127.0.0.97", ("a", "b"))
        assert (second.meeting.address, second.meeting.port, second.hosts) == (
            first.meeting.address,
            first.meeting.port,
            first.hosts,
        )
        assert (first.meeting.round, first.meeting.restarts, first.meeting.reason) == (0, 0, "start")

        b.fail(4, 137, FAILED)
        assert a.wait(PeerFailure, SOON_S) == PeerFailure("b", 4, 137, FAILED, False)
        a.meet(2, reason="membership")
        b.meet(3, restarts=1, reason="failure")
        again = met(a, b)
        assert [(one.meeting.round, one.meeting.restarts, one.meeting.reason) for one in again] == [
            (1, 1, "failure")
        ] * 2
        a.tell(Finish())
        b.tell(Finish())
        a.wait(NodesFinished)
        b.wait(NodesFinished)
        assert a.has_ended(SOON_S)
        assert b.has_ended(SOON_S)
    assert [one for one in a.heard if isinstance(one, MeetingRefused)] == []


def test_unequal_sizes_and_roles(start: Callable[..., Driven], endpoint: str) -> None:
    starts = {"a": (2, "trainer"), "b": (1, "reader"), "c": (3, "trainer")}
    delegates = []
    for host, (size, role) in starts.items():
        delegates.append(start(host))
        delegates[-1].tell(opening(host, endpoint, (3, 3)))
        delegates[-1].meet(size, role)
    found = met(*delegates)
    assert {one.meeting.local_world_sizes for one in found} == {(2, 1, 3)}
    assert [(one.meeting.first_role_rank, one.meeting.role_size) for one in found] == [(0, 5), (0, 1), (2, 5)]


def test_a_node_that_comes_late_is_told_of_and_taken_in(start: Callable[..., Driven], endpoint: str) -> None:
    """It sorts first, so all ranks change; the rendezvous stays open."""
    (b,) = open_and_meet(start, endpoint, "b", (1, 3))
    assert met(b)[0].meeting.local_world_sizes == (1,)
    (a,) = open_and_meet(start, endpoint, "a", (1, 3))
    assert b.wait(MembershipChanged) == MembershipChanged(Membership(1, 1))
    b.meet(reason="membership")
    late, early = met(a, b)
    assert (late.meeting.node_rank, early.meeting.node_rank, late.hosts) == (0, 1, ("a", "b"))
    assert {one.meeting.reason for one in (late, early)} == {"membership"}


def test_a_node_leaves_and_the_job_goes_on(start: Callable[..., Driven], endpoint: str) -> None:
    a, b, c = open_and_meet(start, endpoint, "abc", (1, 3))
    met(a, b, c)
    c.tell(Leave())
    assert c.has_ended(SOON_S)
    assert [one.wait(MembershipChanged, SOON_S) for one in (a, b)] == [
        MembershipChanged(Membership(2), ("c",))
    ] * 2
    a.meet(reason="membership")
    b.meet(reason="membership")
    assert [one.hosts for one in met(a, b)] == [("a", "b")] * 2


def test_the_last_call_is_for_nodes_of_which_nobody_knows(
    start: Callable[..., Driven], endpoint: str
) -> None:
    """A round begins when all are back that were in the last one, or waited: nobody waits for more again."""
    settings = (("last_call_timeout", "10"),)
    a, b = open_and_meet(start, endpoint, "ab", (1, 4), settings=settings)
    met(a, b)
    (c,) = open_and_meet(start, endpoint, "c", (1, 4), settings=settings)
    begin_s = time.monotonic()
    assert [one.wait(MembershipChanged).membership.waiting for one in (a, b)] == [1, 1]
    a.meet(reason="membership")
    b.meet(reason="membership")
    assert {one.hosts for one in met(a, b, c)} == {("a", "b", "c")}
    a.meet(restarts=1, reason="failure")
    b.meet(reason="membership")
    c.tell(Leave())
    assert {one.hosts for one in met(a, b)} == {("a", "b")}
    assert time.monotonic() - begin_s < 9.0


def test_the_host_of_the_store_leaves_and_keeps_it_until_the_others_have_ended(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 2))
    met(a, b)
    a.tell(Leave())
    assert "keeps the store" in a.wait(Notice).text
    assert b.wait(MembershipChanged).left == ("a",)
    b.meet(reason="membership")
    assert met(b)[0].hosts == ("b",)
    assert not a.has_ended(0.5)
    b.tell(Finish())
    b.wait(NodesFinished)
    assert b.has_ended(SOON_S)
    assert a.has_ended(SOON_S)


def test_an_agent_that_dies_takes_its_delegate_along_and_the_others_are_told(
    start: Callable[..., Driven], endpoint: str
) -> None:
    """Of the node that goes, and of the store when its host goes."""
    a, b, c = open_and_meet(start, endpoint, "abc", (1, 3))
    met(a, b, c)
    c.hang_up()
    assert b.wait(MembershipChanged).left == ("c",)
    assert c.has_ended(SOON_S)
    a.hang_up()
    assert a.has_ended(SOON_S)
    assert "does not answer any more" in b.wait(Notice).text
    b.meet(reason="membership")
    assert b.wait(MeetingRefused).kind == "connection"
    assert [one for one in b.heard if isinstance(one, Notice)][1:] == []


def test_nodes_whose_hosts_and_pids_have_one_name_are_two(
    start: Callable[..., Driven], endpoint: str
) -> None:
    """Containers on one machine, or pods with its network: each has a pid namespace, and the machine's name."""
    a, b = [start("a", "import os; os.getpid = lambda: 7") for _ in range(2)]
    for one in (a, b):
        one.tell(opening("a", endpoint, (1, 2)))
        one.meet()
    first = met(a, b)
    assert {one.meeting.node_rank for one in first} == {0, 1}
    assert {one.hosts for one in first} == {("a", "a")}
    b.fail(1, 7)
    assert a.wait(PeerFailure) == PeerFailure("a", 1, 7, None, False)
    b.tell(Leave())
    assert a.wait(MembershipChanged) == MembershipChanged(Membership(1), ("a",))
    a.meet(reason="membership")
    again = met(a)[0]
    assert (again.hosts, again.joined, again.left) == (("a",), (), ("a",))


NODE_FAILED = (
    b'{"NodeFailed":{"node":["x",1,1],"round":%s,"failure":{"PeerFailure":{"host":%s,"rank":0,"code":%s,'
    b'"failed":null,"is_final":true}}}}'
)


@pytest.mark.parametrize(
    "item",
    [
        b'{"NodeLeft":{"node":["x"]}}',
        b'{"NodeLeft":{"node":[1,2,3]}}',
        b'{"NodeFailed":{"node":["x",1,1]}}',
        NODE_FAILED % (b"0", b"1", b"1"),
        NODE_FAILED % (b'"0"', b'"x"', b"1"),
        NODE_FAILED % (b"0", b'"x"', b"256"),
    ],
)
def test_news_that_make_no_sense_change_nothing(
    start: Callable[..., Driven], endpoint: str, item: bytes
) -> None:
    """Whoever reaches the store can write there."""
    a, b = open_and_meet(start, endpoint, "ab", (2, 2))
    met(a, b)
    write = (
        "import sys; from torch.distributed import TCPStore; "
        "host, port = sys.argv[1].split(':'); "
        "store = TCPStore(host, int(port), is_master=False, wait_for_workers=False); "
        "store.set('dsl/job/news/%d' % store.add('dsl/job/news', 1), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", write, endpoint, item.decode()], check=True, timeout=60)
    b.fail(1, 7, FAILED)
    assert a.wait(PeerFailure) == PeerFailure("b", 1, 7, FAILED, False)
    assert [one for one in a.heard if isinstance(one, (Notice, MembershipChanged))] == []


def test_a_node_that_dies_is_missed(start: Callable[..., Driven], endpoint: str) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 2), settings=MORTAL)
    met(a, b)
    b.signal(signal.SIGKILL)
    assert a.wait(MembershipChanged).left == ("b",)
    a.meet(reason="membership")
    assert met(a)[0].hosts == ("a",)


def test_a_node_that_was_frozen_is_told_that_the_others_have_gone_on(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 2), settings=MORTAL)
    met(a, b)
    b.signal(signal.SIGSTOP)
    changed = a.wait(MembershipChanged)
    assert (changed.left, changed.has_dropped_us) == (("b",), False)
    a.meet(reason="membership")
    assert met(a)[0].hosts == ("a",)
    b.signal(signal.SIGCONT)
    changed = b.wait(MembershipChanged)
    assert (changed.left, changed.has_dropped_us) == (("b",), True)
    b.meet(reason="membership")
    assert a.wait(MembershipChanged).membership.waiting == 1
    a.meet(reason="membership")
    assert {one.hosts for one in met(a, b)} == {("a", "b")}


@pytest.mark.parametrize("order", [Leave(), PeerFailure("b", 1, 1, None, is_final=True)])
def test_a_store_that_is_frozen_keeps_nobody(
    start: Callable[..., Driven], endpoint: str, order: Leave | PeerFailure
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 2))
    met(a, b)
    a.signal(signal.SIGSTOP)
    b.tell(order)
    assert b.has_ended(SOON_S)
    a.signal(signal.SIGCONT)


def test_a_final_failure_ends_the_others_and_nobody_can_join(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 3))
    met(a, b)
    b.fail(1, 3, final=True)
    assert a.wait(PeerFailure) == PeerFailure("b", 1, 3, None, True)
    assert b.has_ended(SOON_S)
    (c,) = open_and_meet(start, endpoint, "c", (1, 3))
    refused = c.wait(MeetingRefused)
    assert refused.kind == "closed"
    assert "job job" in refused.text


def test_the_host_of_the_store_fails_and_the_others_still_hear_of_it(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b, c = open_and_meet(start, endpoint, "abc", (3, 3))
    met(a, b, c)
    a.fail(0, 3, final=True)
    for one in (b, c):
        assert one.wait(PeerFailure).is_final
    assert a.has_ended(SOON_S)


def test_a_node_that_finishes_waits_for_the_others_and_goes_on_if_one_fails(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 2))
    met(a, b)
    a.tell(Finish())
    b.fail(1, 1)
    a.wait(PeerFailure)
    assert NodesFinished() not in a.heard
    b.meet(restarts=1, reason="failure")
    a.meet(reason="membership")
    met(a, b)
    a.tell(Finish())
    b.tell(Finish())
    a.wait(NodesFinished)
    b.wait(NodesFinished)


def test_a_spare_is_parked_and_takes_the_place_of_a_node_that_leaves(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (2, 2))
    met(a, b)
    (c,) = open_and_meet(start, endpoint, "c", (2, 2))
    assert "parked as a spare" in c.wait(Notice).text
    assert [one for one in a.heard if isinstance(one, MembershipChanged)] == []
    b.tell(Leave())
    assert a.wait(MembershipChanged).left == ("b",)
    a.meet(reason="membership")
    assert {one.hosts for one in met(a, c)} == {("a", "c")}


def test_a_spare_is_told_of_the_end(start: Callable[..., Driven], endpoint: str) -> None:
    (a,) = open_and_meet(start, endpoint, "a", (1, 1))
    met(a)
    (b,) = open_and_meet(start, endpoint, "b", (1, 1))
    assert "parked as a spare" in b.wait(Notice).text
    a.tell(Finish())
    a.wait(NodesFinished)
    assert b.wait(MeetingRefused).kind == "unneeded"


def test_a_spare_hears_of_a_failure_before_it_hears_of_the_end(
    start: Callable[..., Driven], endpoint: str
) -> None:
    (a,) = open_and_meet(start, endpoint, "a", (1, 1))
    met(a)
    (b,) = open_and_meet(start, endpoint, "b", (1, 1))
    assert "parked as a spare" in b.wait(Notice).text
    a.fail(0, 7, final=True)
    assert b.wait(MeetingRefused).kind == "unneeded"
    assert [one.code for one in b.heard if isinstance(one, PeerFailure)] == [7]


def test_a_file_is_a_store(start: Callable[..., Driven], tmp_path: Path) -> None:
    settings = (*QUICK, ("store_type", "file"))
    a, b = open_and_meet(start, str(tmp_path / "store"), "ab", (2, 2), settings=settings)
    met(a, b)
    a.fail(0, 1)
    assert b.wait(PeerFailure).host == "a"
    a.meet(restarts=1, reason="failure")
    b.meet(reason="membership")
    assert {one.meeting.restarts for one in met(a, b)} == {1}
    b.tell(Leave())
    assert a.wait(MembershipChanged).left == ("b",)


def test_wrong_run_ids_never_meet_and_each_is_told_what_is_missing(
    start: Callable[..., Driven], endpoint: str
) -> None:
    settings = (("join_timeout", "6"),)
    (a,) = open_and_meet(start, endpoint, "a", (2, 2), settings=settings)
    (b,) = open_and_meet(start, endpoint, "b", (2, 2), settings=settings, run_id="jobb")
    for one, name in ((a, "job"), (b, "jobb")):
        assert one.wait(Notice).text == f"waits for nodes: 1 of 2 are at {endpoint} with run id {name}"
        refused = one.wait(MeetingRefused)
        assert (refused.kind, "within 6 s" in refused.text) == ("timeout", True)


def test_a_store_that_is_not_there(start: Callable[..., Driven], endpoint: str) -> None:
    settings = (("read_timeout", "2"), ("is_host", "0"))
    (a,) = open_and_meet(start, endpoint, "a", (1, 1), settings=settings)
    refused = a.wait(MeetingRefused)
    assert refused.kind == "connection"
    assert re.search(rf"at {endpoint} \(connection refused\), tried for \d s: ", refused.text)


def test_a_store_that_ends_while_a_node_waits_has_ended(start: Callable[..., Driven], endpoint: str) -> None:
    """It is that of a node with another run id, which needs nobody else any more."""
    (a,) = open_and_meet(start, endpoint, "a", (2, 2))
    never_hosts = (("is_host", "0"),)  # on a busy machine it may come to the port before the first
    (b,) = open_and_meet(start, endpoint, "b", (2, 2), run_id="jobb", settings=never_hosts)
    b.wait(Notice)
    a.signal(signal.SIGKILL)
    refused = b.wait(MeetingRefused)
    assert refused.kind == "connection"
    assert f"at {endpoint} has ended (connection refused) while this node waited" in refused.text
    assert "tried for" not in refused.text


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"backend": "c11d"}, "there is no rendezvous backend 'c11d', torch here knows c10d, etcd"),
        ({"endpoint": "127.0.0.1:70000"}, "port number"),
    ],
)
def test_a_wrong_wish_is_refused_in_one_line(
    start: Callable[..., Driven], endpoint: str, changes: dict[str, object], text: str
) -> None:
    a = start("a")
    a.tell(opening("a", **{"endpoint": endpoint, **changes}))  # type: ignore[arg-type]
    refused = a.wait(MeetingRefused)
    assert refused.kind == "settings"
    assert text in refused.text
    assert "\n" not in refused.text


def test_an_etcd_server_that_is_not_there(start: Callable[..., Driven], endpoint: str) -> None:
    (a,) = open_and_meet(start, endpoint, "a", (1, 1), backend="etcd-v2", settings=(("read_timeout", "2"),))
    refused = a.wait(MeetingRefused)
    assert refused.kind == "connection"
    assert f"at {endpoint} (connection refused)" in refused.text


def test_without_torch_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with driven(None) as start:
        (a,) = open_and_meet(start, "localhost:0", "a", (1, 1))
        refused = a.wait(MeetingRefused)
    assert refused.kind == "settings"
    assert refused.text.startswith("a rendezvous of nodes that come and go needs torch, which ")


HANDLER = """
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

def offer():
    return create

def create(parameters):
    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    handler.get_backend = lambda: "somebodys"
    return handler
"""


def test_a_handler_that_somebody_has_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """An entry point of the group torchrun.handlers. What it does not tell is asked for again and again."""
    (tmp_path / "somebodys.py").write_text(HANDLER)
    (tmp_path / "somebodys-1.dist-info").mkdir()
    (tmp_path / "somebodys-1.dist-info/METADATA").write_text("Name: somebodys\nVersion: 1\n")
    entry = "[torchrun.handlers]\nsomebodys = somebodys:offer\n"
    (tmp_path / "somebodys-1.dist-info/entry_points.txt").write_text(entry)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with driven(None) as start:
        (a,) = open_and_meet(start, endpoint, "a", (2, 2), backend="somebodys")
        guest = (*QUICK, ("is_host", "0"))
        (b,) = open_and_meet(start, endpoint, "b", (2, 2), backend="somebodys", settings=guest)
        first = met(a, b, timeout_s=60)
        assert [one.meeting.node_rank for one in first] == [0, 1]
        b.fail(1, 1)
        assert a.wait(PeerFailure).host == "b"
        b.meet(restarts=1, reason="failure")
        assert a.wait(MembershipChanged).membership.waiting == 1
        a.meet(reason="membership")
        assert {(one.meeting.restarts, one.meeting.reason) for one in met(a, b)} == {(1, "failure")}
        b.tell(Leave())
        assert a.wait(MembershipChanged).left == ("b",)


def test_any_free_port_is_taken_and_told(start: Callable[..., Driven]) -> None:
    (a,) = open_and_meet(start, "localhost:0", "a", (1, 2))
    port = a.wait(Notice).text.removeprefix("the store of the rendezvous listens on port ")
    (b,) = open_and_meet(start, f"localhost:{port}", "b", (1, 2))
    assert {one.hosts for one in met(a, b)} <= {("a", "b"), ("a",)}


def test_clocks_an_hour_apart_are_named(start: Callable[..., Driven], endpoint: str) -> None:
    (a,) = open_and_meet(start, endpoint, "a", (2, 2))
    b = start("b", SHIFTED.format(offset_s=-3600))
    b.tell(opening("b", endpoint))
    b.meet()
    for one, side in ((a, "behind"), (b, "ahead of")):
        refused = one.wait(MeetingRefused)
        assert refused.kind == "clock"
        assert f"s {side} this one's" in refused.text
        assert any(f" {number} s " in refused.text for number in range(3595, 3606))


def test_signals_are_its_agents_business_and_a_meeting_can_be_left(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (2, 2))
    met(a, b)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        a.signal(signum)
    a.meet(reason="membership")
    b.meet(reason="membership")
    met(a, b)
    (c,) = open_and_meet(start, endpoint, "c", (2, 2))
    c.wait(Notice)
    c.tell(Leave())
    assert c.has_ended(SOON_S)
    assert [one for one in a.heard if isinstance(one, MembershipChanged)] == []


@pytest.mark.parametrize("host, shares", [("a", True), ("c", True), ("c", False)])
def test_a_node_under_torchrun_takes_part(
    start: Callable[..., Driven], endpoint: str, host: str, *, shares: bool
) -> None:
    """First or last, with its store for the workers or without; a restart of ours is one of its own."""
    ours = start(host)
    ours.tell(opening(host, endpoint))
    ours.meet(2)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=3", "--no-python"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--local-addr=127.0.0.98"),
        *("--rdzv-conf=is_host=0,join_timeout=30", "sh", "-c"),
        "while kill -0 $PPID; do sleep 0.2; done",  # it ends when its agent does, however that ends
    ]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "01"[not shares]}
    agent = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        first = met(ours, timeout_s=60)[0]
        is_first = host == "a"
        assert first.meeting.local_world_sizes == ((2, 3) if is_first else (3, 2))
        assert set(first.hosts) == {host, "127.0.0.98"}
        ours.meet(2, restarts=1, reason="failure")
        second = met(ours, timeout_s=60)[0]
        assert (second.meeting.round, second.meeting.local_world_sizes) == (
            1,
            first.meeting.local_world_sizes,
        )
        # torchrun keeps to what it was told first.
        assert (second.meeting.port == first.meeting.port) or (not is_first and not shares)
    finally:
        agent.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(20)
        agent.kill()
        agent.wait()


def test_meeting_again_takes_milliseconds(start: Callable[..., Driven], endpoint: str) -> None:
    """torch's own pauses of a second are not waited for: ten rounds would take twenty seconds."""
    a, b = open_and_meet(start, endpoint, "ab", (2, 2))
    met(a, b)
    begin_s = time.monotonic()
    for count in range(1, 11):
        a.meet(restarts=count, reason="failure")
        b.meet(reason="membership")
        met(a, b)
    assert time.monotonic() - begin_s < 10.0
