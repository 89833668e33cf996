"""When a job that fails again and again waits, and when it is given up."""

from __future__ import annotations

import pytest

from dsl.agent.progress import FRUITLESS_S, LONGEST_PAUSE_S, MOST_FRUITLESS, Tried, is_futile, pause_s

SHORT = Tried(1.0, "rank 0 failed with 1")
LONG = Tried(FRUITLESS_S, "rank 0 failed with 1")
REGROUPED = Tried(1.0)


@pytest.mark.parametrize(
    "tried, expected",
    [
        ([], 0.0),
        ([SHORT], 0.0),
        ([SHORT] * 2, 0.0),
        ([SHORT] * 3, 1.0),
        ([SHORT] * 4, 2.0),
        ([SHORT] * 50, LONGEST_PAUSE_S),
        ([*[SHORT] * 5, LONG], 0.0),
        ([*[SHORT] * 5, REGROUPED], 0.0),
        ([*[SHORT] * 5, LONG, *[SHORT] * 3], 1.0),
    ],
)
def test_attempts_that_get_nowhere_are_followed_later_and_later(tried: list[Tried], expected: float) -> None:
    assert pause_s(tried) == expected


def test_the_same_failure_over_and_over_is_enough() -> None:
    assert is_futile([SHORT] * MOST_FRUITLESS)
    assert not is_futile([SHORT] * (MOST_FRUITLESS - 1))
    assert not is_futile([LONG] * MOST_FRUITLESS)
    assert not is_futile([REGROUPED] * MOST_FRUITLESS)
    assert not is_futile([*[SHORT] * (MOST_FRUITLESS - 1), Tried(1.0, "rank 1 failed with 1")])
