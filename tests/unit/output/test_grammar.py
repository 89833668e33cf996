"""The grammar of the options about output."""

from __future__ import annotations

import contextlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import OptionError
from dsl.output.grammar import fill_template, parse_local_ranks, parse_streams, parse_words, rank_log_path


def test_the_name_of_a_log_file() -> None:
    """DeepSpeed's name, which scripts look for."""
    assert rank_log_path("out/logs", "20260102030405", 12) == "out/logs/20260102030405_rank12.log"


def test_a_template_without_a_variable_stays_as_it_is() -> None:
    assert fill_template("plain", "default", 1, 2, "h") == "plain"
    assert fill_template("$hostname:$${rank}:${rank} ", "default", 1, 2, "h") == "h:${rank}:1 "


@pytest.mark.parametrize(
    "text, message",
    [
        ("4", "expected 0, 1, 2 or 3"),
        ("x", "expected 0, 1, 2 or 3"),
        ("0:7", "not '0:7'"),
        ("0:1,", "not ''"),
        ("0:1,0:2", "local rank 0 is there twice"),
        ("-1:1", "not '-1:1'"),
        ("\u0661:1", "expected"),
        (f"{'9' * 5000}:1", "expected"),
    ],
)
def test_a_bad_stream_map_is_one_line(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_streams(text, "--tee")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--tee")


@given(st.dictionaries(st.integers(0, 5000), st.integers(0, 3), min_size=1))
def test_a_stream_map_says_what_was_written(streams: dict[int, int]) -> None:
    parsed = parse_streams(",".join(f"{rank}:{value}" for rank, value in streams.items()), "-r")
    assert {rank: parsed(rank) for rank in streams} == streams
    assert parsed(max(streams) + 1) == 0


@given(st.text(alphabet=string.printable, max_size=12))
def test_any_text_is_a_map_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(OptionError):
        assert parse_streams(text, "-r")(0) in {0, 1, 2, 3}


def test_a_list_of_local_ranks() -> None:
    assert parse_local_ranks("0, 12,3,0") == {0, 12, 3}


@pytest.mark.parametrize("text, fault", [("0,a", "a"), (",", ""), ("0,,1", ""), ("-1", "-1"), ("0:1", "0:1")])
def test_a_bad_list_of_local_ranks_is_one_line(text: str, fault: str) -> None:
    """torchrun refuses an empty item, too: it would hide everything."""
    with pytest.raises(OptionError, match=f"--local-ranks-filter '{text}': .*not '{fault}'"):
        parse_local_ranks(text)


def test_two_commas_are_one_in_a_word() -> None:
    assert parse_words("x,,y,z,") == ("x,y", "z")
    assert parse_words("") == ()
