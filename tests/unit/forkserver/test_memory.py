"""Where objects of a server lie."""

from __future__ import annotations

from dsl.forkserver.memory import fill_holes

PAGE = 12


def _pages(size: int) -> int:
    """How many pages hold a hundred new objects."""
    return len({id(one) >> PAGE for one in [bytes(size) for _ in range(100)]})


def test_objects_made_later_lie_side_by_side() -> None:
    objects = [bytes(60) for _ in range(20_000)]
    del objects[::30]
    assert _pages(60) > 10
    held = fill_holes()
    assert _pages(60) <= 5
    assert held
    assert objects


def test_a_filled_memory_takes_little_more() -> None:
    held = fill_holes()
    assert len(fill_holes()) <= 40_000
    assert held
