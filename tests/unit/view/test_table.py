"""The table of a running job: what a row says, which rows there are, and that lines fit into a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl._record import replace
from dsl.model.codec import from_line, to_line
from dsl.model.observation import NodeStatus, RankStatus
from dsl.view.table import (
    COLUMNS,
    Layout,
    Row,
    by_host,
    cells,
    duration,
    fold,
    in_order,
    make_rows,
    select,
    size,
    totals,
)

MIB = 1 << 20


def rank(number: int, **fields: Any) -> RankStatus:
    usual = {"state": "S", "cpu_ms": 1000, "rss_bytes": 100 * MIB, "threads": 8, "said": f"line of {number}"}
    return RankStatus(number, number % 4, 100 + number, **{**usual, **fields})


def node(number: int, *ranks: RankStatus, age_ms: int = 2000, attempt: int = 0) -> NodeStatus:
    return NodeStatus(1, number, f"n{number}", attempt, ranks, 0, age_ms)


def rows(*ranks: RankStatus) -> list[Row]:
    return make_rows([], [node(0, *ranks)])


def test_a_row_has_the_cpu_share_between_two_looks_by_the_clock_of_the_node() -> None:
    before = [node(0, rank(0, cpu_ms=1000), rank(1, cpu_ms=0), age_ms=2000)]
    now = [node(0, rank(0, cpu_ms=2500), rank(1, cpu_ms=10), age_ms=3000)]
    assert [one.cpu for one in make_rows(before, now)] == [1.5, 0.01]


@pytest.mark.parametrize(
    "before",
    [
        [],
        [node(0, rank(0), age_ms=3000)],
        [node(1, rank(0))],
        [node(0, rank(0), attempt=1)],
        [node(0, replace(rank(0), pid=7))],
    ],
    ids=["first look", "no time between", "other node", "other attempt", "other process"],
)
def test_without_an_earlier_look_at_the_same_process_the_cpu_share_is_unknown(
    before: list[NodeStatus],
) -> None:
    (row,) = make_rows(before, [node(0, rank(0), age_ms=3000)])
    assert row.cpu is None
    assert cells(row)[4] == "-"


def test_a_worker_without_a_process_has_no_figures() -> None:
    (row,) = rows(replace(rank(3), pid=0, state="", cpu_ms=0, rss_bytes=0, threads=0))
    assert cells(row) == ("3", "n0", "no process", *"-------", "line of 3")


def test_cells_of_a_rank_with_a_gpu() -> None:
    (row,) = rows(rank(3, gpu_percent=97, gpu_bytes=71 << 30, state="R"))
    assert cells(row) == ("3", "n0", "running", "0:02", "-", "100M", "8", "97", "71.0G", "-", "line of 3")


def test_how_much_a_rank_waits_has_a_column_once_it_was_sampled() -> None:
    sampled, other = rows(rank(0, wait_percent=58), rank(1))
    assert (cells(sampled)[9], cells(other)[9]) == ("58", "-")
    assert "WAIT%" in Layout([cells(sampled), cells(other)], None).title()
    assert "WAIT%" not in Layout([cells(other)], None).title()


# Fewer rows.


def test_ranks_that_do_the_same_are_folded_into_one_row() -> None:
    crowd = [rank(number, said="") for number in range(64)]
    crowd[7] = rank(7, state="D")
    crowd[9] = rank(9, rss_bytes=900 * MIB)
    crowd[63] = rank(63, said="the first to speak")
    folded = fold(make_rows([], [node(0, *crowd[:32]), node(1, *crowd[32:])]))
    assert [(cells(one)[0], one.place, one.state) for one in folded] == [
        ("0-6,8,10-63", "2 hosts", "sleeping"),
        ("7", "n0", "device wait"),
        ("9", "n0", "sleeping"),
    ]
    assert folded[0].said == "the first to speak"
    assert folded[0].rss_bytes == 100 * MIB


def test_a_node_is_one_row() -> None:
    found = by_host(make_rows([], [node(0, rank(0), rank(1, state="R")), node(1, rank(2), rank(3))]))
    assert [(cells(one)[0], one.place, one.state) for one in found] == [
        ("0-1", "n0", "mixed"),
        ("2-3", "n1", "sleeping"),
    ]


STATUSES = st.builds(
    rank,
    st.integers(0, 999),
    state=st.sampled_from("RSDTZ"),
    cpu_ms=st.integers(0, 10_000),
    rss_bytes=st.integers(0, 1 << 42),
    threads=st.integers(0, 5000),
    gpu_percent=st.integers(-1, 100),
    gpu_bytes=st.integers(0, 1 << 38),
    wait_percent=st.integers(-1, 100),
    said=st.text(max_size=40),
)
JOBS = st.lists(STATUSES, max_size=30, unique_by=lambda one: one.rank).map(
    lambda ranks: [node(0, *ranks[::2]), node(1, *ranks[1::2])]
)


@given(JOBS)
def test_no_rank_is_lost_or_doubled_by_folding(job: list[NodeStatus]) -> None:
    single = make_rows([], job)
    every = sorted(number for row in single for number in row.ranks)
    for folded in (fold(single), by_host(single)):
        assert sorted(number for row in folded for number in row.ranks) == every
        assert all(list(row.ranks) == sorted(row.ranks) for row in folded)
    assert all(len(row.states) == 1 for row in fold(single))


# Order and choice.


@pytest.mark.parametrize(
    "name, is_reversed, expected",
    [
        ("RANK", False, [0, 1, 2]),
        ("RANK", True, [2, 1, 0]),
        ("MEM", False, [2, 0, 1]),
        ("MEM", True, [1, 0, 2]),
        ("GPU%", False, [1, 0, 2]),
        ("GPU%", True, [0, 1, 2]),
        ("STATE", False, [1, 0, 2]),
        ("LAST LINE", False, [2, 0, 1]),
    ],
)
def test_rows_are_sorted_by_a_column(name: str, is_reversed: Any, expected: list[int]) -> None:
    job = rows(
        rank(0, rss_bytes=50, gpu_percent=5, said="b"),
        rank(1, rss_bytes=10, gpu_percent=90, state="R", said=""),
        rank(2, rss_bytes=90, said="a"),
    )
    assert [row.ranks[0] for row in in_order(job, name, is_reversed=is_reversed)] == expected


@pytest.mark.parametrize(
    "text, expected",
    [("", [0, 1]), ("rank 1", [1]), ("RUN", [1]), ("n0", [0, 1]), ("Loss NAN", [0]), ("no such", [])],
)
def test_a_text_selects_rows(text: str, expected: list[int]) -> None:
    job = rows(rank(0, said="step 1 loss nan"), rank(1, state="R"))
    assert [row.ranks[0] for row in select(job, text)] == expected


@given(JOBS, st.sampled_from([one.name for one in COLUMNS]), st.booleans())
def test_sorting_keeps_every_row(job: list[NodeStatus], name: str, is_reversed: Any) -> None:
    single = make_rows([], job)
    found = in_order(single, name, is_reversed=is_reversed)
    assert sorted(found, key=id) == sorted(single, key=id)


# Lines.


def test_a_narrow_terminal_has_fewer_columns() -> None:
    texts = [cells(one) for one in rows(rank(0, gpu_percent=3, gpu_bytes=MIB, wait_percent=9), rank(1))]
    names = {width: [one.name for one in Layout(texts, width).columns] for width in (120, 60, 40, 20, 5)}
    assert names[120] == [one.name for one in COLUMNS]
    assert names[60] == ["RANK", "HOST", "STATE", "TIME", "CPU%", "MEM", "GPU%", "GPUMEM", "WAIT%"]
    assert names[40] == ["RANK", "STATE", "CPU%", "MEM", "GPU%", "WAIT%"]
    assert names[20] == ["RANK", "STATE", "CPU%"]
    assert names[5] == ["RANK"]


def test_columns_in_which_nobody_has_anything_are_not_shown() -> None:
    layout = Layout([cells(one) for one in rows(rank(0, said=""))], 120)
    assert [one.name for one in layout.columns] == ["RANK", "HOST", "STATE", "TIME", "CPU%", "MEM", "THR"]


@given(JOBS, st.integers(1, 200))
def test_no_line_is_wider_than_the_terminal_and_none_carries_control_characters(
    job: list[NodeStatus], width: int
) -> None:
    # As a view gets them: over the socket.
    read = [from_line(to_line(one), {"NodeStatus": NodeStatus}) for one in job]
    texts = [cells(one) for one in make_rows([], read)]
    layout = Layout(texts, width)
    for line in (layout.title("MEM"), *map(layout.line, texts)):
        assert len(line) <= width
        assert line.isprintable()


def test_escape_sequences_of_a_worker_do_not_get_into_a_row() -> None:
    hostile = node(0, rank(0, said="\x1b[2J\x1b]0;title\x07step\x9b1m 1\x00\u202e"))
    (row,) = make_rows([], [from_line(to_line(hostile), {"NodeStatus": NodeStatus})])
    assert row.said == "step 1"


def test_wide_characters_count_twice() -> None:
    texts = [cells(one) for one in rows(rank(0, said="訓練中" * 20), rank(1))]
    line = Layout(texts, 60).line(texts[0])
    assert len(line) + line.count("訓") + line.count("練") + line.count("中") <= 60


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0B"),
        (999, "999B"),
        (1024, "1K"),
        (3 << 20, "3M"),
        (1000 << 20, "1.0G"),
        (70 << 30, "70.0G"),
        (5 << 50, "5120T"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00"), (75.9, "1:15"), (3600, "1:00:00"), (90000, "1d 01:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_totals_count_states_and_add_figures() -> None:
    before = [node(0, rank(0, cpu_ms=0), rank(1, cpu_ms=0), age_ms=1000)]
    now = [
        node(
            0, rank(0, cpu_ms=900, gpu_percent=50), rank(1, state="R", gpu_percent=100), rank(2), age_ms=2000
        )
    ]
    found = totals(make_rows(before, now))
    assert found == "2 sleeping, 1 running, 1.9 CPUs, 300M memory, GPUs 75 % busy"
