"""The grammar of the signals that users write."""

from __future__ import annotations

import pytest

from dsl.errors import OptionError
from dsl.signals import JOB_CONTROL, LAST, SIGNALS, UNTAKEABLE, parse_signals, signal_word

TAKEABLE = [number for number in range(1, LAST + 1) if number not in (*UNTAKEABLE, *JOB_CONTROL)]


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
