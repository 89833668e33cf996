"""Words that users write: lists of numbers, and signals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import OptionError
from dsl.words import (
    BEYOND,
    JOB_CONTROL,
    LAST_SIGNAL,
    SIGNALS,
    UNTAKEABLE,
    counted,
    find_runs,
    format_ranges,
    parse_number,
    parse_range,
    parse_signals,
    signal_word,
    with_port,
)


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


TAKEABLE = [number for number in range(1, LAST_SIGNAL + 1) if number not in (*UNTAKEABLE, *JOB_CONTROL)]


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("", ()),
        (" , ", ()),
        ("SIGTERM", (15,)),
        ("TERM", (15,)),
        ("term", (15,)),
        (" sigUsr1 ,2", (10, 2)),
        ("15,TERM,SIGTERM", (15,)),
        ("34,64", (34, 64)),
        ("USR2,USR1", (12, 10)),
    ],
)
def test_names_and_numbers_mean_signals_each_once(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_signals(text, "--x") == numbers


@pytest.mark.parametrize("number", TAKEABLE)
def test_what_is_shown_is_what_is_read(number: int) -> None:
    assert parse_signals(signal_word(number), "--x") == (number,)
    assert parse_signals(str(number), "--x") == (number,)


@pytest.mark.parametrize(
    "text", ["SIGFOO", "0", "65", "999", "1000", "-1", "TERM;INT", "SIG", "٣", "SIGSIGTERM"]
)
def test_what_is_no_signal_is_named(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_signals(f"TERM, {text}", "--x")
    expected = f"--x {f'TERM, {text}'!r}: {text!r} is no signal, expected names such as SIGUSR1"
    assert str(caught.value) == expected


@pytest.mark.parametrize("number", UNTAKEABLE)
def test_what_cannot_be_taken_is_refused_whatever_it_is_for(number: int) -> None:
    for job_control in ("", "stays"):
        with pytest.raises(OptionError, match=f"^--x '{number}': {signal_word(number)} cannot be taken$"):
            parse_signals(str(number), "--x", job_control=job_control)


@pytest.mark.parametrize("number", JOB_CONTROL)
def test_job_control_is_refused_with_the_reason_of_who_asks(number: int) -> None:
    name = SIGNALS[number]
    with pytest.raises(OptionError, match=f"^--x '{name}': {name} is always forwarded$"):
        parse_signals(name, "--x")
    with pytest.raises(OptionError, match=f"^y '{name}': {name} cannot be taken$"):
        parse_signals(name, "y", job_control="cannot be taken")
    assert parse_signals(name, "--x", job_control="") == (number,)
