"""What the nodes of a round tell each other through its store, and what torch's agents read and write there."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest

from dsl.errors import RendezvousError
from dsl.rendezvous.rounds import (
    Round,
    arrive_at_exit,
    exit_keys,
    read_master,
    read_roles,
    tell_master,
    tell_role,
)
from dsl.rendezvous.torch_side import View, view_of


class Store:
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


@pytest.mark.parametrize("is_assigned", [True, False])
def test_all_are_at_the_end_when_the_last_one_is(*, is_assigned: bool) -> None:
    store = Store()
    nodes = rounds(store, 2, is_assigned=is_assigned)
    assert not arrive_at_exit(nodes[1])
    assert not store.check(exit_keys(nodes[0]))
    assert arrive_at_exit(nodes[0]) == is_assigned
    assert store.check(exit_keys(nodes[0]))
    assert exit_keys(nodes[0]) == exit_keys(nodes[1])


class Desc(SimpleNamespace):
    """Stands in for torch's descriptor of a node."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.addr, self.pid, self.local_id))


@pytest.mark.parametrize("has_spares", [True, False])
def test_a_state_is_read_also_without_a_list_of_spares_as_in_older_versions(*, has_spares: bool) -> None:
    a, b, c, d = [Desc(addr=name, pid=1, local_id=0) for name in "abcd"]
    state = SimpleNamespace(round=2, complete=True, closed=False, participants={b: 1, a: 0}, wait_list={c})
    if has_spares:
        state.redundancy_list = {d}
    waiting = [("c", 1, 0), *([("d", 1, 0)] if has_spares else [])]
    assert view_of(pickle.dumps(state)) == View(
        2, is_complete=True, participants=(("a", 1, 0), ("b", 1, 0)), waiting=tuple(waiting)
    )
