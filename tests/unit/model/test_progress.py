"""When a job that fails again and again waits, when it is given up, and what is said of it."""

from __future__ import annotations

import pytest
from tests.support.events import a_plan, an_attempt, an_exit, end

from dsl._record import replace
from dsl.model.nodes import PeerFailure
from dsl.model.outcome import Tried
from dsl.model.progress import (
    CRASH_LOOP_S,
    MOST_FRUITLESS,
    MOST_KEPT,
    OTHER_HOSTS,
    SAME_HOSTS,
    Patience,
    add,
    after_failure,
    crash_loop,
    with_attempt,
)

CAUSE = "rank 0 1"
QUICK = Tried(0.5, CAUSE)
SHORT = Tried(SAME_HOSTS.within_s, CAUSE)
LONG = Tried(OTHER_HOSTS.within_s, CAUSE)
REGROUPED = Tried(0.5)


def kept(*attempts: Tried) -> tuple[Tried, ...]:
    """What is kept of these attempts."""
    tried: tuple[Tried, ...] = ()
    for one in attempts:
        tried = add(tried, one)
    return tried


@pytest.mark.parametrize(
    "attempts, same_hosts, other_hosts",
    [
        ([], 0.0, 0.0),
        ([QUICK], 0.0, 0.0),
        ([SHORT] * 2, 0.0, 0.0),
        ([SHORT] * 3, 0.0, 1.0),
        ([SHORT] * 4, 0.0, 2.0),
        ([SHORT] * 50, 0.0, 30.0),
        ([QUICK] * 5, 0.0, 4.0),
        ([QUICK] * 6, 0.1, 8.0),
        ([QUICK] * 7, 0.2, 16.0),
        ([QUICK] * 8, 0.4, 30.0),
        ([QUICK] * 12, 5.0, 30.0),
        ([QUICK] * 10_000, 5.0, 30.0),
        ([*[QUICK] * 9, SHORT], 0.0, 30.0),
        ([*[QUICK] * 9, SHORT, QUICK], 0.0, 30.0),
        ([*[QUICK] * 9, LONG], 0.0, 0.0),
        ([*[QUICK] * 9, REGROUPED], 0.0, 0.0),
        ([*[SHORT] * 5, LONG, *[SHORT] * 3], 0.0, 1.0),
        ([*[QUICK, Tried(0.5, "rank 1 1")] * 3], 0.1, 8.0),
    ],
)
def test_attempts_that_get_nowhere_are_followed_later_and_later(
    attempts: list[Tried], same_hosts: float, other_hosts: float
) -> None:
    tried = kept(*attempts)
    assert after_failure(tried, SAME_HOSTS, 1).wait_s == pytest.approx(same_hosts)
    assert after_failure(tried, OTHER_HOSTS, 1).wait_s == pytest.approx(other_hosts)


def test_no_count_of_attempts_is_too_large() -> None:
    assert after_failure([Tried(0.5, CAUSE, 10**9)], Patience(1.0, 0, 0.1, 5.0), 1).wait_s == 5.0


@pytest.mark.parametrize(
    "attempts, is_futile",
    [
        ([SHORT] * MOST_FRUITLESS, True),
        ([SHORT] * (MOST_FRUITLESS - 1), False),
        ([LONG] * MOST_FRUITLESS, False),
        ([REGROUPED] * MOST_FRUITLESS, False),
        ([*[SHORT] * (MOST_FRUITLESS - 1), Tried(1.0, "rank 1 1")], False),
    ],
)
def test_the_same_failure_over_and_over_is_enough(attempts: list[Tried], *, is_futile: bool) -> None:
    step = after_failure(kept(*attempts), OTHER_HOSTS, 1, gives_up=True)
    assert (step.kind == "futile") is is_futile


def test_each_patience_has_its_own_measure_of_what_is_futile() -> None:
    slow, quick = kept(*[SHORT] * MOST_FRUITLESS), kept(*[QUICK] * MOST_FRUITLESS)
    assert after_failure(slow, SAME_HOSTS, 1, gives_up=True).kind == "restart"
    assert after_failure(quick, SAME_HOSTS, 1, gives_up=True).kind == "futile"


def test_a_job_has_all_restarts_that_the_user_has_counted_and_no_more() -> None:
    tried = kept(*[SHORT] * MOST_FRUITLESS)
    assert after_failure(tried, OTHER_HOSTS, 1).kind == "restart"
    assert after_failure(tried, OTHER_HOSTS, 0).kind == "spent"
    assert after_failure(tried, OTHER_HOSTS, 0, gives_up=True).kind == "spent"


def test_equal_failures_soon_after_the_start_are_a_crash_loop() -> None:
    other = Tried(1.5, "rank 0 4")
    assert crash_loop(kept()) == ""
    assert crash_loop(kept(QUICK)) == ""
    assert crash_loop(kept(QUICK, other)) == ""
    assert crash_loop(kept(*[Tried(CRASH_LOOP_S, CAUSE)] * 2)) == ""
    text = "crash loop: 3 attempts in a row failed the same way within 12 s of their start"
    assert crash_loop(kept(other, QUICK, Tried(12.0, CAUSE), QUICK)) == text


def test_what_is_kept_does_not_grow() -> None:
    assert kept(*[QUICK, Tried(0.7, CAUSE), QUICK]) == (Tried(0.7, CAUSE, 3),)
    assert len(kept(*[Tried(0.5, f"rank {rank} 1") for rank in range(1000)])) == MOST_KEPT


def test_an_attempt_failed_here_or_elsewhere_or_not_at_all() -> None:
    failed = an_exit(0, code=3)
    here = replace(an_attempt(a_plan(1), [failed], end(failed)), duration_s=2.0)
    fine = replace(an_attempt(a_plan(1), [an_exit(0)], end()), duration_s=2.0)
    elsewhere = replace(fine, news=(PeerFailure("b", 5, 9, None, is_final=False),))
    assert with_attempt((), here) == (Tried(2.0, "rank 0 3"),)
    assert with_attempt((), elsewhere) == (Tried(2.0, "rank 5 9"),)
    assert with_attempt((), fine) == (Tried(2.0),)
