"""Delegates of several nodes on this machine, with torch's own rendezvous between them."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kit.waiting import until
from tests.support.delegates import QUICK, Driven, a_store, driven, listens, met, opening, torchrun
from tests.support.jobs import install_plug_in

from dsl._record import replace
from dsl.model.job import Notice
from dsl.rendezvous.delegate_messages import (
    ByTorch,
    Claim,
    Claimed,
    Finish,
    Leave,
    MeetingRefused,
    NodesFinished,
    Outranked,
    Waiting,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(90)]

SOON_S = 10.0
"""Far more than `LEAVE_S`, after which a delegate goes whatever the store does; torch would wait for a minute."""


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
    """As agents start them. A node that meets again is one that waits for the others."""
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
        assert first.meeting.round == 0

        b.meet(3)
        a.wait(Waiting)
        a.meet(2)
        assert [one.meeting.round for one in met(a, b)] == [1, 1]
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
    b.wait(Waiting)
    b.meet()
    late, early = met(a, b)
    assert (late.meeting.node_rank, early.meeting.node_rank, late.hosts) == (0, 1, ("a", "b"))


def test_an_agent_that_dies_takes_its_delegate_along_and_the_others_are_told_of_the_store(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b, c = open_and_meet(start, endpoint, "abc", (1, 3))
    met(a, b, c)
    c.hang_up()
    assert c.has_ended(SOON_S)
    a.hang_up()
    assert a.has_ended(SOON_S)
    assert "does not answer any more" in b.wait(Notice).text
    b.meet()
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


@pytest.mark.parametrize("order", [Leave(), Leave(closes=True)])
def test_a_store_that_is_frozen_keeps_nobody(
    start: Callable[..., Driven], endpoint: str, order: Leave
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 2))
    met(a, b)
    a.signal(signal.SIGSTOP)
    b.tell(order)
    assert b.has_ended(SOON_S)
    a.signal(signal.SIGCONT)


def test_nobody_can_join_a_job_that_is_over(start: Callable[..., Driven], endpoint: str) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 3))
    met(a, b)
    b.tell(Leave(closes=True))
    assert b.has_ended(SOON_S)
    (c,) = open_and_meet(start, endpoint, "c", (1, 3))
    refused = c.wait(MeetingRefused)
    assert refused.kind == "closed"
    assert "job job" in refused.text


def test_a_node_that_finishes_waits_for_the_others(start: Callable[..., Driven], endpoint: str) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (1, 2))
    met(a, b)
    a.tell(Finish())
    assert NodesFinished() not in a.heard
    b.tell(Finish())
    a.wait(NodesFinished)


def test_a_spare_is_told_of_the_end(start: Callable[..., Driven], endpoint: str) -> None:
    (a,) = open_and_meet(start, endpoint, "a", (1, 1))
    met(a)
    (b,) = open_and_meet(start, endpoint, "b", (1, 1))
    assert "or for a place among them" in b.wait(Notice).text
    a.tell(Finish())
    a.wait(NodesFinished)
    assert b.wait(MeetingRefused).kind == "unneeded"


def test_a_file_is_a_store(start: Callable[..., Driven], tmp_path: Path) -> None:
    settings = (*QUICK, ("store_type", "file"))
    a, b = open_and_meet(start, str(tmp_path / "store"), "ab", (2, 2), settings=settings)
    met(a, b)
    a.meet()
    b.wait(Waiting)
    b.meet()
    assert [one.meeting.round for one in met(a, b)] == [1, 1]


def test_wrong_run_ids_never_meet_and_each_is_told_what_is_missing(
    start: Callable[..., Driven], endpoint: str
) -> None:
    settings = (("join_timeout", "6"),)
    (a,) = open_and_meet(start, endpoint, "a", (2, 2), settings=settings)
    (b,) = open_and_meet(start, endpoint, "b", (2, 2), settings=settings, run_id="jobb")
    for one, name in ((a, "job"), (b, "jobb")):
        said = one.wait(Notice).text
        assert said.startswith(f"waits for 2 nodes in all at {endpoint} with run id {name}")
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
    install_plug_in(tmp_path, "somebodys", "torchrun.handlers", "somebodys = somebodys:offer", HANDLER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with driven(None) as start:
        (a,) = open_and_meet(start, endpoint, "a", (2, 2), backend="somebodys")
        guest = (*QUICK, ("is_host", "0"))
        (b,) = open_and_meet(start, endpoint, "b", (2, 2), backend="somebodys", settings=guest)
        first = met(a, b, timeout_s=60)
        assert [one.meeting.node_rank for one in first] == [0, 1]
        b.meet()
        a.wait(Waiting)
        a.meet()
        met(a, b)


def test_any_free_port_is_taken_and_told(start: Callable[..., Driven]) -> None:
    (a,) = open_and_meet(start, "localhost:0", "a", (1, 2))
    port = a.wait(Notice).text.removeprefix("the store of the rendezvous listens on port ")
    (b,) = open_and_meet(start, f"localhost:{port}", "b", (1, 2))
    assert {one.hosts for one in met(a, b)} <= {("a", "b"), ("a",)}


def test_signals_are_its_agents_business_and_a_meeting_can_be_left(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b = open_and_meet(start, endpoint, "ab", (2, 2))
    met(a, b)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        a.signal(signum)
    a.meet()
    b.meet()
    met(a, b)
    (c,) = open_and_meet(start, endpoint, "c", (2, 2))
    c.wait(Notice)
    c.tell(Leave())
    assert c.has_ended(SOON_S)


@pytest.mark.parametrize("host, shares", [("a", True), ("c", True), ("c", False)])
def test_a_node_under_torchrun_takes_part(
    start: Callable[..., Driven], endpoint: str, host: str, *, shares: bool
) -> None:
    """First or last, with its store for the workers or without; a restart of ours is one of its own."""
    ours = start(host)
    ours.tell(opening(host, endpoint))
    ours.meet(2)
    conf = "is_host=0,join_timeout=30"
    script = "while kill -0 $PPID; do sleep 0.2; done"  # it ends when its agent does, however that ends
    words = ("--nproc-per-node=3", "--no-python", "sh", "-c", script)
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "01"[not shares]}
    with torchrun(endpoint, "127.0.0.98", *words, conf=conf, **environ):
        (first,) = met(ours, timeout_s=60)
        ours.meet(2)
        (second,) = met(ours, timeout_s=60)
    is_first = host == "a"
    assert first.meeting.local_world_sizes == ((2, 3) if is_first else (3, 2))
    assert set(first.hosts) == {host, "127.0.0.98"}
    assert second.meeting.round == 1
    assert second.meeting.local_world_sizes == first.meeting.local_world_sizes
    # torchrun keeps to what it was told first.
    assert (second.meeting.port == first.meeting.port) or (not is_first and not shares)


# ---- who conducts the job


def claim(one: Driven, endpoint: str, port: int, *, hosts: bool = True, **changes: object) -> None:
    """Open the store and claim, as an agent does that would conduct at this port."""
    order = opening(one.host, endpoint, **changes)  # type: ignore[arg-type]
    if not hosts:
        settings = (*order.point.settings, ("is_host", "0"))
        order = replace(order, point=replace(order.point, settings=settings))
    one.tell(order)
    one.tell(Claim(port, f"{port:064x}"))


def test_the_node_that_hosts_the_store_conducts_whoever_asks_first(
    start: Callable[..., Driven], endpoint: str
) -> None:
    """The others learn where, and with which key; each has a place of its own."""
    b, a = start("b"), start("a")
    claim(b, endpoint, 1002, hosts=False)
    claim(a, endpoint, 1001)
    first, second = a.wait(Claimed), b.wait(Claimed)
    assert (first.at_address, first.at_port, first.key) == ("127.0.0.97", 1001, f"{1001:064x}")
    assert (second.at_address, second.at_port, second.key) == ("127.0.0.97", 1001, f"{1001:064x}")
    assert {first.place, second.place} == {1, 2}
    assert (first.node, second.node, second.address) == ("127.0.0.97", "127.0.0.98", "127.0.0.98")
    assert [(one.conducts, one.hosts_store, one.store) for one in (first, second)] == [
        (True, True, endpoint),
        (False, True, endpoint),
    ]


@pytest.mark.parametrize("is_file", [False, True])
def test_any_node_conducts_if_none_hosts_the_store_and_the_next_one_if_it_goes(
    start: Callable[..., Driven], endpoint: str, tmp_path: Path, *, is_file: bool
) -> None:
    changes = {"settings": (*QUICK, ("store_type", "file"))} if is_file else {}
    place = str(tmp_path / "store") if is_file else endpoint
    with contextlib.nullcontext() if is_file else a_store(endpoint):
        nodes = [start("a"), start("b"), start("c")]
        for port, one in enumerate(nodes, 1001):
            claim(one, place, port, hosts=False, **changes)
        found = [one.wait(Claimed) for one in nodes]
        (conductor,) = [one for one in nodes if found[nodes.index(one)].conducts]
        assert {(one.number, one.hosts_store) for one in found} == {(1, False)}
        assert len({one.at_port for one in found}) == 1
        assert {one.place for one in found} == {1, 2, 3}
        conductor.tell(Leave())
        others = [one for one in nodes if one is not conductor]
        for one in others:
            one.tell(Claim(2000, "0" * 64, lost=1))
        again = [one.wait(Claimed) for one in others]
        assert {one.number for one in again} == {2}
        assert sorted(one.conducts for one in again) == [False, True]


def test_a_conductor_that_lives_stays_and_one_that_was_frozen_steps_down(
    start: Callable[..., Driven], endpoint: str
) -> None:
    with a_store(endpoint):
        a, b = start("a"), start("b")
        claim(a, endpoint, 1001, hosts=False)
        assert a.wait(Claimed).conducts
        claim(b, endpoint, 1002, hosts=False)
        assert not b.wait(Claimed).conducts
        b.tell(Claim(1002, "0" * 64, lost=1))
        found = b.wait(Claimed)
        assert (found.number, found.conducts) == (1, False)
        a.signal(signal.SIGSTOP)
        b.tell(Claim(1002, "0" * 64, lost=1))
        found = b.wait(Claimed)
        assert (found.number, found.conducts) == (2, True)
        a.signal(signal.SIGCONT)
        a.wait(Outranked)


def test_nobody_joins_a_job_that_its_conductor_has_closed(
    start: Callable[..., Driven], endpoint: str
) -> None:
    with a_store(endpoint):
        a, b = start("a"), start("b")
        claim(a, endpoint, 1001, hosts=False)
        a.wait(Claimed)
        a.tell(Leave(closes=True))
        assert a.has_ended(10.0)
        claim(b, endpoint, 1002, hosts=False)
        assert b.wait(MeetingRefused).kind == "closed"


def test_without_a_store_it_is_one_line(start: Callable[..., Driven], endpoint: str) -> None:
    a = start("a")
    claim(a, endpoint, 1001, hosts=False, settings=(*QUICK, ("read_timeout", "1")))
    assert a.wait(MeetingRefused).kind == "connection"


def waiting(endpoint: str, *, hosts: bool) -> contextlib.AbstractContextManager[object]:
    """A node under torchrun, which waits for another one."""
    conf = f"is_host={int(hosts)},join_timeout=60"
    return torchrun(endpoint, "127.0.0.98", "--no-python", "true", conf=conf)


def test_a_node_under_torchrun_is_noticed_by_the_conductor_and_by_whoever_comes_later(
    start: Callable[..., Driven], endpoint: str
) -> None:
    a, b = start("a"), start("b")
    claim(a, endpoint, 1001)
    a.wait(Claimed)
    with waiting(endpoint, hosts=False):
        a.wait(ByTorch, 60)
        claim(b, endpoint, 1002, hosts=False)
        b.wait(ByTorch)
        a.meet()
        met(a)


def test_nobody_conducts_if_a_node_under_torchrun_hosts_the_store(
    start: Callable[..., Driven], endpoint: str
) -> None:
    with waiting(endpoint, hosts=True):
        until(lambda: listens(endpoint), 60)
        a = start("a")
        claim(a, endpoint, 1001)
        a.wait(ByTorch)
