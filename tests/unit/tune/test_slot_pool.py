"""SlotPool for experiments: the numbers are those of DeepSpeed's tuner, the slots are the real ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.model.job import Host
from dsl.tune.setup import SlotGroup, SlotPool, count_lanes


def hosts(**slots: tuple[int, ...]) -> list[Host]:
    return [Host(name, some) for name, some in slots.items()]


@pytest.mark.parametrize(
    "pool, nodes, each, lanes",
    [
        (hosts(a=(0, 1, 2, 3)), 1, 1, 4),
        (hosts(a=(0, 1, 2, 3)), 1, 3, 1),
        (hosts(a=(0, 1, 2, 3), b=(0, 1, 2, 3)), 2, 2, 2),
        (hosts(a=(0,), b=(0, 1, 2), c=(0, 1, 2)), 3, 1, 1),
        (hosts(a=(0,), b=(0, 1, 2), c=(0, 1, 2)), 2, 1, 3),
        (hosts(a=(0,), b=(0, 1, 2), c=(0, 1, 2)), 1, 2, 2),
        (hosts(a=(0, 1)), 1, 3, 0),
    ],
)
def test_as_many_experiments_run_as_there_is_room_for(
    pool: list[Host], nodes: int, each: int, lanes: int
) -> None:
    assert count_lanes(pool, nodes, each) == lanes


def test_an_experiment_gets_the_real_slots_of_a_filter() -> None:
    slots = SlotPool(hosts(w0=(2, 5), w2=(4, 7)), 2, 1)
    first, second = slots.take(), slots.take()
    assert [one and one.filter for one in (first, second)] == ["w0:2@w2:4", "w0:5@w2:7"]
    assert slots.take() is None


def test_what_an_experiment_gives_back_another_one_takes() -> None:
    slots = SlotPool(hosts(a=(3, 1)), 1, 1)
    first, second = slots.take(), slots.take()
    assert first is not None
    assert second is not None
    slots.give_back(first)
    assert slots.take() == SlotGroup((Host("a", (3,)),))


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_no_slot_is_ever_given_to_two(sizes: list[int], nodes: int, each: int, random: object) -> None:
    pool = [Host(f"h{index}", tuple(range(10, 10 + size))) for index, size in enumerate(sizes)]
    slots = SlotPool(pool, nodes, each)
    held: list[SlotGroup] = []
    for _ in range(30):
        if held and random.random() < 0.4:  # type: ignore[attr-defined]
            slots.give_back(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        elif (place := slots.take()) is not None:
            held.append(place)
        taken = [(host.name, slot) for place in held for host in place.hosts for slot in host.slots]
        assert len(taken) == len(set(taken)) == len(held) * nodes * each
    while held:
        slots.give_back(held.pop())
    # Taken greedily, as many fit as the hosts have room for at all.
    room = [size // each for size in sizes]
    most = max(k for k in range(40) if sum(min(one, k) for one in room) >= nodes * k)
    assert count_lanes(pool, nodes, each) == most
