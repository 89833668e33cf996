"""Hostfiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.outcome import assert_one_line, error_of

from dsl.errors import HostfileError
from dsl.lists import MOST_WORKERS
from dsl.resources.hosts import parse_hostfile

hosts = st.from_regex(r"[A-Za-z0-9_.@-][A-Za-z0-9_.@#=-]{0,12}", fullmatch=True)
pools = st.dictionaries(hosts, st.integers(0, 64), min_size=1, max_size=8)
padding = st.text(" \t", max_size=3)
noise = st.lists(st.sampled_from(["", "   ", "# a comment", "#h slots=1"]), max_size=2)


@given(pools, st.data())
def test_every_pool_survives_being_written_and_read(pool: dict[str, int], data: st.DataObject) -> None:
    lines = []
    for host, slots in pool.items():
        lines += data.draw(noise)
        gap = data.draw(st.text(" \t", min_size=1, max_size=3))
        rest = data.draw(st.sampled_from(["", " max_slots=8", " # note", "x"]))
        lines.append(f"{data.draw(padding)}{host}{gap}slots={slots}{rest}\n")
    assert list(parse_hostfile(lines).items()) == list(pool.items())


@pytest.mark.guarantee("G8")
@given(st.lists(st.one_of(st.text(), st.from_regex(r"\S+\s+slots=\d+"))))
def test_any_text_gives_a_pool_or_one_line_that_names_the_place(lines: list[str]) -> None:
    error = error_of(HostfileError, parse_hostfile, lines, "/etc/hosts.txt")
    if error is not None:
        assert error.startswith("/etc/hosts.txt")
        assert_one_line(error)
    else:
        pool = parse_hostfile(lines)
        assert pool
        assert all(0 <= slots <= MOST_WORKERS for slots in pool.values())


@pytest.mark.parametrize(
    "lines, message",
    [
        (
            ["a slots=1", "", "a slots=2"],
            "H line 3: hostfile contains multiple entries for 'a', the first in line 1",
        ),
        (
            ["# x", "missingslots"],
            "H line 2: hostfile contains a bad entry: 'missingslots', expected 'HOST slots=N'",
        ),
        (["# x"], "H: hostfile is empty or not formatted correctly"),
        ([f"a slots={MOST_WORKERS + 1}"], f"H line 1: slots={MOST_WORKERS + 1} is more than the limit"),
        ([f"a slots={'9' * 6000}"], "H line 1: slots=9999"),
    ],
)
def test_an_error_says_where_and_what_is_expected(lines: list[str], message: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(lines, "H")
    assert str(caught.value).startswith(message)
