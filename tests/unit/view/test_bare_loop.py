"""Loops that do nothing, by their source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.view.stacks import is_bare_loop


@pytest.mark.parametrize(
    "source, line, expected",
    [
        ("while True:\n    pass\n", 1, True),
        ("while True:\n    pass\n", 2, True),
        ("def f(stop):\n    while not stop:\n        continue\n", 3, True),
        ("while True:\n    if a == b:\n        break\n", 2, True),
        ("while True:\n    step()\n", 2, False),
        ("while True:\n    count += 1\n", 2, False),
        ("while model.is_busy:\n    pass\n", 1, False),  # a property may compute
        ("while (batch := take()):\n    pass\n", 1, False),
        ("for batch in data:\n    pass\n", 2, False),
        ("while True:\n    for one in data:\n        pass\n", 3, False),
        ("while True:\n    while True:\n        pass\n    step()\n", 3, True),
        ("while True:\n    pass\nstep()\n", 3, False),
        ("sum(data)\n", 1, False),
        ("while True:\n  pass\n x\n", 1, False),
        ("", 1, False),
    ],
)
def test_only_a_loop_that_does_nothing_counts(source: str, line: int, *, expected: bool) -> None:
    assert is_bare_loop(source, line) is expected


@given(st.text(), st.integers(0, 10))
def test_any_text_has_an_answer(source: str, line: int) -> None:
    assert is_bare_loop(source, line) in (True, False)
