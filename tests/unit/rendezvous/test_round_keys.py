"""What the nodes of a round tell each other through its store, and what torch's agents read and write there."""

from __future__ import annotations

import json

import pytest

from dsl.errors import RendezvousError
from dsl.rendezvous.round_keys import (
    NodeFacts,
    Round,
    agree,
    arrive_at_exit,
    exit_keys,
    read_facts,
    read_master,
    read_roles,
    tell_facts,
    tell_master,
    tell_role,
)
from dsl.rendezvous.store_messages import News, NodeLeft, StateChanged


class Store:
    """A store that never waits."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.keys[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def add(self, key: str, number: int) -> int:
        self.set(key, str(int(self.keys.get(key, b"0")) + number))
        return int(self.keys[key])


def rounds(store: Store, count: int, *, is_assigned: bool = True) -> list[Round]:
    return [Round(store, rank, count, is_assigned) for rank in range(count)]


def roles_of(
    store: Store, starts: list[tuple[str, int]], *, is_assigned: bool = True
) -> list[tuple[tuple[int, ...], int, int]]:
    def wait(keys: list[str]) -> None:
        assert store.check(keys)

    nodes = rounds(store, len(starts), is_assigned=is_assigned)
    for node, (role, size) in zip(nodes, starts, strict=True):
        tell_role(node, role, size)
    return [read_roles(node, wait) for node in nodes]


@pytest.mark.parametrize("is_assigned", [True, False])
def test_ranks_of_roles_are_counted_in_the_order_of_the_nodes(*, is_assigned: bool) -> None:
    found = roles_of(Store(), [("trainer", 2), ("reader", 1), ("trainer", 3)], is_assigned=is_assigned)
    assert found == [((2, 1, 3), 0, 5), ((2, 1, 3), 0, 1), ((2, 1, 3), 2, 5)]


def test_the_keys_are_those_that_torchs_agent_reads() -> None:
    """`SimpleElasticAgent._assign_worker_ranks` of torch 2.4 to 2.15."""
    store = Store()
    roles_of(store, [("trainer", 2), ("reader", 1)])
    assert json.loads(store.keys["torchelastic/role_info/1"]) == {
        "role": "reader",
        "rank": 1,
        "local_world_size": 1,
    }
    assert json.loads(store.keys["torchelastic/assigned_ranks/0"]) == [0, 3, 0, 2]
    assert json.loads(store.keys["torchelastic/assigned_ranks/1"]) == [2, 3, 0, 1]


def test_where_rank_0_listens() -> None:
    store = Store()
    assert read_master(store) is None
    tell_master(rounds(store, 1)[0], "10.0.0.1", 4711)
    assert store.keys == {"MASTER_ADDR": b"10.0.0.1", "MASTER_PORT": b"4711"}
    assert read_master(store) == ("10.0.0.1", 4711)


def test_nodes_that_are_not_ours_have_no_facts() -> None:
    store = Store()
    nodes = rounds(store, 3)
    alpha, gamma = NodeFacts("alpha", 2, "failure", "a"), NodeFacts("gamma", 1, "membership", "c")
    tell_facts(nodes[0], alpha)
    tell_facts(nodes[2], gamma)
    assert read_facts(nodes[1]) == (alpha, None, gamma)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no",
        "[]",
        "[" * 100_000,
        "{}",
        '{"NodeFacts": {"host": "a", "restarts": -1, "reason": "start", "node": "x"}}',
        '{"NodeFacts": {"host": "a", "restarts": 1e9, "reason": "start", "node": "x"}}',
        '{"NodeFacts": {"host": "a", "restarts": 1, "reason": "fun", "node": "x"}}',
        '{"NodeFacts": {"host": 1, "restarts": 1, "reason": "start", "node": "x"}}',
    ],
)
def test_what_no_node_of_ours_has_written_is_no_fact_and_no_error(text: str) -> None:
    store = Store()
    (node,) = rounds(store, 1)
    store.set("dsl/facts/0", text)
    assert read_facts(node) == (None,)


def test_names_of_hosts_are_printable() -> None:
    (node,) = rounds(Store(), 1)
    tell_facts(node, NodeFacts("a\x1b[2Jb", 0, "start", "x"))
    assert read_facts(node) == (NodeFacts("ab", 0, "start", "x"),)


@pytest.mark.parametrize("size", [-5, 0, 65_537])
def test_no_node_starts_an_impossible_number_of_workers(size: int) -> None:
    with pytest.raises(RendezvousError, match=f"node 1 says that it starts {size} workers"):
        roles_of(Store(), [("trainer", 1), ("trainer", size)])


@pytest.mark.parametrize("port", ["0", "-1", "65536", "x", "9" * 5000])
def test_rank_0_listens_at_a_port(port: str) -> None:
    store = Store()
    store.set("MASTER_ADDR", "a")
    store.set("MASTER_PORT", port)
    with pytest.raises(RendezvousError, match="names no port for rank 0"):
        read_master(store)


@pytest.mark.parametrize(
    "reasons, expected",
    [
        ("start start", "start"),
        ("start membership", "membership"),
        ("membership failure", "failure"),
        ("failure start", "failure"),
    ],
)
def test_all_nodes_agree_on_the_reason(reasons: str, expected: str) -> None:
    facts = [NodeFacts("alpha", count, reason, "x") for count, reason in enumerate(reasons.split())]  # type: ignore[arg-type]
    assert agree([*facts, None], 7) == (1, expected)


def test_a_node_cannot_count_more_restarts_than_there_were_rounds() -> None:
    assert agree([NodeFacts("a", 1, "failure", "x"), NodeFacts("b", 999_999_999, "failure", "y")], 2) == (
        2,
        "failure",
    )


@pytest.mark.parametrize("is_assigned", [True, False])
def test_all_are_at_the_end_when_the_last_one_is(*, is_assigned: bool) -> None:
    store = Store()
    nodes = rounds(store, 2, is_assigned=is_assigned)
    assert not arrive_at_exit(nodes[1])
    assert not store.check(exit_keys(nodes[0]))
    assert arrive_at_exit(nodes[0]) == is_assigned
    assert store.check(exit_keys(nodes[0]))
    assert exit_keys(nodes[0]) == exit_keys(nodes[1])


def test_news_come_in_order_and_only_those_that_come_after_the_reader() -> None:
    store = Store()
    writer = News(store, "job", can_wait=False)
    writer.post(StateChanged())
    reader, stranger = News(store, "job", can_wait=False), News(store, "other", can_wait=False)
    for number in range(3):
        writer.post(NodeLeft(("a", number, 0)))
    assert reader.read() == [NodeLeft(("a", number, 0)) for number in range(3)]
    assert reader.read() == []
    assert stranger.read() == []


def test_what_is_no_item_is_passed_over() -> None:
    store = Store()
    reader, writer = News(store, "job", can_wait=False), News(store, "job", can_wait=False)
    for text in ("no", "[]", "\xff", "[" * 100_000, '{"NodeLeft": {}}'):
        store.set(f"dsl/job/news/{store.add('dsl/job/news', 1)}", text)
    writer.post(StateChanged())
    assert reader.read() == [StateChanged()]


def test_a_writer_that_died_between_two_steps_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    reader, writer = News(store, "job", can_wait=False), News(store, "job", can_wait=False)
    store.add("dsl/job/news", 1)
    writer.post(StateChanged())
    now_s = [100.0]
    monkeypatch.setattr("dsl.rendezvous.store_messages.time.monotonic", lambda: now_s[0])
    assert reader.read() == []
    now_s[0] += 3
    assert reader.read() == [StateChanged()]
