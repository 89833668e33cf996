"""Attempts that fail alike."""

from __future__ import annotations

from typing import Any

from tests.support.events import a_plan, an_attempt, an_exit, end

from dsl.report.loops import crash_loop


def test_equal_failures_soon_after_the_start_are_a_crash_loop() -> None:
    def attempts(*codes: int, seconds: float = 1.5) -> list[Any]:
        exits = [an_exit(0, code=code) for code in codes]
        return [an_attempt(a_plan(1), [one], end(one), duration_s=seconds) for one in exits]

    assert crash_loop([]) == ""
    assert crash_loop(attempts(3)) == ""
    assert crash_loop(attempts(3, 4)) == ""
    assert crash_loop(attempts(3, 3, seconds=61)) == ""
    text = "crash loop: 2 attempts in a row failed the same way within 1.5 s of their start"
    assert crash_loop(attempts(4, 3, 3)) == text
