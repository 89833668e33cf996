"""When a job that fails again and again waits, when it is given up, and what is said of it."""

from __future__ import annotations

import pytest
from tests.support.events import a_plan, an_attempt, an_exit, end

from dsl._record import replace
from dsl.conductor.restarts import (
    CRASH_LOOP_S,
    MOST_FRUITLESS,
    MOST_KEPT,
    MOST_SILENT,
    OTHER_HOSTS,
    SAME_HOSTS,
    Patience,
    Tried,
    add,
    after_failure,
    crash_loop,
    with_attempt,
)
from dsl.model.codes import parse_codes
from dsl.model.request import Policy

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


def test_an_attempt_failed_or_did_not() -> None:
    failed = an_exit(0, code=3)
    here = replace(an_attempt(a_plan(1), [failed], end(failed)), duration_s=2.0)
    fine = replace(an_attempt(a_plan(1), [an_exit(0)], end()), duration_s=2.0)
    assert with_attempt((), here) == (Tried(2.0, "rank 0 3", code=3),)
    assert with_attempt((), fine) == (Tried(2.0),)


def policy(restart_on: str = "", give_up_on: str = "") -> Policy:
    """What the two options ask for."""
    lists = [parse_codes(text) or () for text in (restart_on, give_up_on)]
    return Policy(*lists)


@pytest.mark.parametrize(
    "restart_on, give_up_on, code, why",
    [
        ("", "", 3, ""),
        ("1,3-5", "", 3, ""),
        ("1,3-5", "", 2, "exit code 2 is not in --restart-on"),
        ("1,3-5", "", 137, "SIGKILL is not in --restart-on"),
        ("signal", "", 137, ""),
        ("signal", "", 168, ""),
        ("signal", "", 1, "exit code 1 is not in --restart-on"),
        ("SIGKILL", "", 139, "SIGSEGV is not in --restart-on"),
        ("any", "", 255, ""),
        ("any", "3", 3, "exit code 3 is in --give-up-on"),
        ("3", "3", 3, "exit code 3 is in --give-up-on"),
        ("", "3", 4, ""),
        ("", "sigterm", 143, "SIGTERM is in --give-up-on"),
        ("", "signal", 168, "signal 40 is in --give-up-on"),
        ("", "200", 200, "exit code 200 is in --give-up-on"),
        ("1", "2", 0, ""),
    ],
)
def test_a_policy_says_which_failures_are_tried_again(
    restart_on: str, give_up_on: str, code: int, why: str
) -> None:
    step = after_failure(
        kept(Tried(90.0, CAUSE, code=code)), SAME_HOSTS, 1, policy=policy(restart_on, give_up_on)
    )
    assert (step.kind, step.why) == ("excluded" if why else "restart", why)


def test_a_policy_grants_no_restart() -> None:
    assert after_failure(kept(Tried(9.0, CAUSE, code=3)), SAME_HOSTS, 0, policy=policy("3")).kind == "spent"
    assert after_failure(kept(Tried(9.0, CAUSE, code=3)), SAME_HOSTS, 0, policy=policy("4")).kind == "spent"


def silent(code: int, rank: int = 0, *, is_silent: bool = True) -> Tried:
    """A failure before any output of the script, after seconds of imports."""
    return Tried(7.0 + rank, f"rank {rank} {code}", code=code, is_silent=is_silent)


@pytest.mark.parametrize(
    "attempts, count",
    [
        ([silent(1)] * (MOST_SILENT - 1), 0),
        ([silent(1)] * MOST_SILENT, 3),
        ([silent(1), silent(1, 5), silent(1)], 3),
        ([silent(1), silent(2), silent(1)], 0),
        ([silent(1), silent(1), silent(1, is_silent=False)], 0),
        ([silent(1), silent(1, is_silent=False), silent(1), silent(1)], 0),
        ([silent(1), silent(1), REGROUPED, silent(1)], 0),
        ([silent(2), *[silent(1)] * MOST_SILENT], 3),
    ],
)
def test_with_a_policy_the_same_reason_before_any_output_is_tried_three_times(
    attempts: list[Tried], count: int
) -> None:
    step = after_failure(kept(*attempts), OTHER_HOSTS, 9, policy=policy("any"))
    why = f"exit code 1 {count} times in a row, before any output of the script" if count else ""
    assert (step.kind, step.why) == ("excluded" if count else "restart", why)
    assert after_failure(kept(*attempts), OTHER_HOSTS, 9).kind == "restart"  # as ever without a policy
