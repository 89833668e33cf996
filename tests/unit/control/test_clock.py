"""The clocks of two machines: what is said of them is true however long a heartbeat takes either way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsl.control.clock import KEPT, OURS, Clock, Sample, add, estimate, is_earlier, measure

MS = 1_000_000
S = 1000 * MS


@given(st.integers(-(10**15), 10**15), st.integers(0, 10 * S), st.integers(0, 10 * S), st.integers(0, 10 * S))
def test_the_true_offset_is_within_the_error(offset: int, there: int, work: int, back: int) -> None:
    begin = 10**18
    heard = begin + there + offset
    end = begin + there + work + back
    found = measure(begin, heard, heard + work, end, 5, 5 + there + work + back)
    assert found is not None
    assert abs(found.offset_ns - offset) <= found.error_ns


def test_a_clock_that_was_set_on_the_way_spoils_the_sample() -> None:
    assert measure(0, 500, 600, 1000 + 2 * MS, 0, 1000) is None
    assert measure(0, 500, 400, 1000, 0, 1000) is None
    assert measure(0, 500, 500 + 3 * MS, 1000, 0, 1000) is None


def test_the_best_sample_counts_and_what_is_old_is_less_exact() -> None:
    samples = add((Sample(0, 100, 10 * MS),), Sample(1 * S, 0, 5 * MS))
    assert estimate(samples, 1 * S) == Clock(0, 5 * MS)
    later = estimate(samples, 2 * S)
    assert later is not None
    assert later.error_ns == 6 * MS
    assert estimate((), 0) is None


def test_samples_from_before_a_clock_was_set_are_forgotten() -> None:
    old = (Sample(0, 0, MS), Sample(1, 0, MS))
    new = Sample(2, 3600 * S, MS)
    assert add(old, new) == (new,)
    assert add(old, Sample(2, MS, MS)) == (*old, Sample(2, MS, MS))


def test_only_so_many_samples_are_kept_and_not_the_worst() -> None:
    samples: tuple[Sample, ...] = ()
    for number in range(3 * KEPT):
        samples = add(samples, Sample(number, 0, MS if number == 5 else 50 * MS + number))
    assert len(samples) == KEPT
    best = estimate(samples, 3 * KEPT)
    assert best is not None
    assert best.error_ns == MS


def test_which_of_two_failures_was_first_is_said_only_where_it_can_be_known() -> None:
    ahead, unsure = Clock(10 * S, 2 * MS), Clock(0, 3 * MS)
    assert is_earlier(1000, OURS, 1001, OURS) is True
    assert is_earlier(1001, OURS, 1000, OURS) is False
    assert is_earlier(1000, OURS, 1000, OURS) is None
    assert is_earlier(10 * S, ahead, 6 * MS, unsure) is True
    assert is_earlier(10 * S + 6 * MS, ahead, 0, unsure) is False
    assert is_earlier(10 * S, ahead, 5 * MS, unsure) is None
    assert is_earlier(0, OURS, 1, None) is None


@given(
    st.integers(-S, S), st.integers(0, S), st.integers(-S, S), st.integers(0, S), st.integers(0, 3 * S),
    st.integers(0, 3 * S), st.floats(-1, 1), st.floats(-1, 1),
)  # fmt: skip
def test_what_is_said_is_true(
    offset_a: int, error_a: int, offset_b: int, error_b: int, a: int, b: int, wrong_a: float, wrong_b: float
) -> None:
    """The clocks may be off by all of their errors."""
    read_a = a + offset_a + int(wrong_a * error_a)
    read_b = b + offset_b + int(wrong_b * error_b)
    said = is_earlier(read_a, Clock(offset_a, error_a), read_b, Clock(offset_b, error_b))
    assert said is None or said == (a < b)
