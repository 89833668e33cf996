"""Lists of numbers as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.lists import BEYOND, counted, find_runs, format_ranges, parse_number, parse_range, with_port


def test_a_number_agrees_with_its_noun_and_verb() -> None:
    assert [counted(number, "node", "has", "have") for number in (0, 1, 2)] == [
        "0 nodes have",
        "1 node has",
        "2 nodes have",
    ]
    assert [counted(number, "byte") for number in (1, 7)] == ["1 byte", "7 bytes"]


@pytest.mark.parametrize(
    "text, number",
    [("0", 0), ("007", 7), ("123456789", 123456789), ("1234567890", None), ("", None), ("-1", None)]
    + [(text, None) for text in ("+1", "1.0", " 1", "1_0", "\u0663", "\u00b2")],
)
def test_a_number_is_ascii_digits(text: str, number: int | None) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text, ends",
    [
        ("3", (3, 3)),
        ("3-5", (3, 5)),
        (" 3 - 5 ", (3, 5)),
        ("5-3", (5, 3)),
        ("0-" + "9" * 5000, (0, BEYOND)),
        ("", None),
        ("-", None),
        ("3-", None),
        ("-3", None),
        ("1-2-3", None),
        ("a", None),
        ("\u0663", None),
    ],
)
def test_a_range(text: str, ends: tuple[int, int] | None) -> None:
    assert parse_range(text) == ends


@pytest.mark.parametrize(
    "numbers, text",
    [([], ""), ([4], "4"), ([0, 2, 3, 4], "0,2-4"), ([3, 2, 1], "3,2,1"), ([5, 6, 0], "5-6,0")],
)
def test_numbers_as_text(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text


@given(st.lists(st.integers(0, 40), max_size=30))
def test_text_says_all_numbers_in_their_order(numbers: list[int]) -> None:
    ends = [parse_range(part) for part in format_ranges(numbers).split(",") if part]
    assert [n for pair in ends if pair for n in range(pair[0], pair[1] + 1)] == numbers
    assert len(ends) == len(list(find_runs(numbers)))


def test_an_ipv6_address_with_a_port_has_brackets() -> None:
    assert [with_port(one, 7) for one in ("n1", "10.0.0.1", "fe80::1")] == [
        "n1:7",
        "10.0.0.1:7",
        "[fe80::1]:7",
    ]
