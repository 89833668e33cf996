"""Timelines of records: the phases of a job, the trace, and the picture."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import TimelineError
from dsl.view.timeline import JOB, NODE, make_figure, picture_of, read_job, spans_of, trace_of

MS = 1_000_000


def a_line(
    event: str, at_ms: float, *, host: str = "n1", attempt: int | None = 0, **fields: Any
) -> dict[str, Any]:
    node = None if attempt is None else 0
    common = {"schema": 1, "job": "j", "time_ns": int(at_ms * MS), "event": event, "host": host}
    return {**common, "node_rank": node, "attempt": attempt, **fields}


LAUNCHED = a_line("Launched", 100, attempt=None, began_ns=40 * MS, nodes=1)
WELL = [
    LAUNCHED,
    a_line("AttemptStarted", 110),
    a_line("Started", 112, rank=0),
    a_line("Started", 115, rank=1),
    a_line("FirstOutput", 150, rank=0),
    a_line("Exited", 300, rank=0, code=0),
    a_line("Exited", 310, rank=1, code=0),
    a_line("Ended", 311),
    a_line("JobEnded", 320, code=0),
]
FAILED = [
    *WELL[:5],
    a_line("Exited", 200, rank=1, code=3),
    a_line("Stopping", 201),
    a_line("Exited", 240, rank=0, signal=15),
    a_line("Ended", 241),
    a_line("Restarting", 242, why="rank 1 failed"),
    a_line("AttemptStarted", 260, attempt=1),
    a_line("Started", 262, rank=0, attempt=1),
]


def phases(lines: list[dict[str, Any]]) -> list[tuple[str, int, str, int, int]]:
    """Host, rank, name, begin and end in milliseconds."""
    spans = spans_of(read_job([json.dumps(one) for one in lines]))
    return [
        (one.host, one.rank, one.name, one.begin_ns // MS, one.end_ns // MS)
        for one in spans
        if not one.is_mark
    ]


def test_the_phases_of_a_job_that_ends_well() -> None:
    assert phases(WELL) == [
        ("", JOB, "start of the command", 40, 100),
        ("", JOB, "preparation", 100, 110),
        ("", JOB, "run", 110, 311),
        ("", JOB, "end", 311, 320),
        ("n1", 0, "spawn", 110, 112),
        ("n1", 0, "until the first output", 112, 150),
        ("n1", 0, "run", 150, 300),
        ("n1", 1, "spawn", 110, 115),
        ("n1", 1, "run", 115, 310),
        ("n1", NODE, "attempt 0", 110, 311),
    ]


def test_workers_that_start_before_the_attempt_is_told_have_a_spawn() -> None:
    found = phases([LAUNCHED, *WELL[2:4], a_line("AttemptStarted", 130), *WELL[4:]])
    assert ("n1", 1, "spawn", 112, 115) in found
    assert all(name != "spawn" or rank == 1 for _, rank, name, _, _ in found)


def test_a_stop_a_restart_and_a_record_without_an_end() -> None:
    found = phases(FAILED)
    assert ("n1", 0, "run", 150, 201) in found
    assert ("n1", 0, "stop", 201, 240) in found
    assert ("n1", 1, "run", 115, 200) in found
    assert ("", JOB, "restart", 241, 260) in found
    assert ("", JOB, "run", 260, 262) in found
    (mark,) = [one for one in spans_of(FAILED_LINES) if one.name == "Restarting"]
    assert (mark.is_mark, dict(mark.details)) == (True, {"why": "rank 1 failed"})


FAILED_LINES = read_job([json.dumps(one) for one in FAILED])


def test_several_nodes_meet_and_their_clocks_are_compared() -> None:
    there = [
        a_line("AttemptStarted", 1110, host="n2", clock_offset_ns=1000 * MS),
        a_line("Started", 1113, host="n2", rank=2, clock_offset_ns=1000 * MS),
        a_line("Exited", 1200, host="n2", rank=2, clock_offset_ns=1000 * MS),
    ]
    found = phases([{**LAUNCHED, "nodes": 2}, *WELL[1:], *there])
    assert ("", JOB, "meeting", 100, 110) in found
    assert ("n2", 2, "run", 113, 200) in found


def test_the_last_job_of_a_file_is_drawn_and_bad_lines_are_skipped() -> None:
    other = [{**one, "job": "other"} for one in WELL]
    bad = ["", "x", "[]", '{"schema":1}', "[" * 9999, '{"schema":1,"job":"j","time_ns":1,"event":"Sta']
    lines = [*map(json.dumps, other), *bad, *map(json.dumps, WELL[:4]), json.dumps(other[5]), *bad]
    assert [one["event"] for one in read_job(lines)] == ["Launched", "AttemptStarted", "Started", "Started"]
    with pytest.raises(TimelineError, match="no job was launched in this record: give the file of --events"):
        read_job(bad)


def test_a_record_of_a_newer_schema_is_not_taken_for_none_or_for_an_older_job() -> None:
    newer = [json.dumps({**one, "schema": 2, "job": "newer"}) for one in WELL]
    older = [json.dumps(one) for one in WELL]
    for lines in (newer, newer[2:4], [*older, *newer]):
        with pytest.raises(TimelineError, match="a newer dsl has made this record: update dsl here"):
            read_job(lines)
    assert len(read_job([*newer, *older])) == len(older)
    assert len(read_job([*older, newer[3]])) == len(older)


def check_trace(trace: dict[str, Any]) -> None:
    """What the trace event format asks for."""
    named = set()
    for one in json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]:
        assert isinstance(one["name"], str)
        assert (type(one["pid"]), type(one["tid"])) == (int, int)
        assert one["pid"] >= 0
        assert one["tid"] >= 0
        assert one["ts"] >= 0
        assert isinstance(one["args"], dict)
        if one["ph"] == "M":
            assert one["name"] in ("process_name", "thread_name")
            named.add((one["name"], one["pid"], one["tid"]))
            continue
        assert ("thread_name", one["pid"], one["tid"]) in named
        assert ("process_name", one["pid"], 0) in named
        if one["ph"] == "X":
            assert one["dur"] > 0
        else:
            assert (one["ph"], one["s"]) == ("i", "p")


@pytest.mark.parametrize("lines", [WELL, FAILED, [LAUNCHED, a_line("JobEnded", 101, attempt=None)]])
def test_a_trace_is_what_perfetto_reads(lines: list[dict[str, Any]]) -> None:
    check_trace(trace_of(spans_of(read_job(map(json.dumps, lines)))))


times = st.integers(-(2**61), 2**61)
numbers = st.none() | st.integers(-2, 3) | st.booleans() | st.integers(-(2**70), 2**70)
any_lines = st.fixed_dictionaries(
    {
        "schema": st.sampled_from([1, 1, 1, 2]),
        "job": st.sampled_from(["j", "other"]),
        "time_ns": times,
        "event": st.sampled_from([*sorted({one["event"] for one in FAILED}), "JobEnded", "Meeting"]),
        "host": st.sampled_from(["n1", "", "\x1b[31m$x$"]),
        "node_rank": st.none() | st.integers(0, 2),
        "attempt": st.none() | st.integers(0, 2),
    },
    optional={
        **dict.fromkeys(("rank", "nodes"), numbers),
        **dict.fromkeys(("clock_offset_ns", "began_ns"), numbers | times),
        **dict.fromkeys(("why", "code", "signum"), st.text() | numbers | st.lists(st.text())),
    },
)


@given(st.lists(any_lines, max_size=30))
def test_any_record_makes_a_trace_or_one_line(lines: list[dict[str, Any]]) -> None:
    try:
        found = read_job(map(json.dumps, lines))
        spans = spans_of(found)
        trace = trace_of(spans)
    except TimelineError:
        return
    check_trace(trace)


@pytest.mark.needs_package("matplotlib")
def test_the_picture_has_a_row_for_the_job_and_each_rank() -> None:
    from matplotlib.image import imread

    spans = spans_of(FAILED_LINES)
    (axes,) = make_figure(spans).axes
    assert [one.get_text() for one in axes.get_yticklabels()] == ["job", "rank 0 (n1)", "rank 1 (n1)"]
    pixels = imread(BytesIO(picture_of(spans)), format="png")
    assert pixels.shape[:2] == (244, 1100)
    assert len({tuple(pixel) for row in pixels[::4] for pixel in row[::4]}) > 5


@pytest.mark.needs_package("matplotlib")
def test_a_job_without_an_attempt_has_a_picture() -> None:
    launched = {key: value for key, value in LAUNCHED.items() if key != "began_ns"}
    lines = [launched, a_line("SignalReceived", 105)]
    assert picture_of(spans_of(read_job(map(json.dumps, lines)))).startswith(b"\x89PNG")


@pytest.mark.needs_package("matplotlib")
def test_a_thousand_ranks_fit_into_one_picture() -> None:
    lines = [LAUNCHED, a_line("AttemptStarted", 110)]
    for rank in range(1024):
        lines += [a_line("Started", 111, rank=rank), a_line("Exited", 200 + rank, rank=rank)]
    (axes,) = (figure := make_figure(spans_of(read_job(map(json.dumps, lines))))).axes
    assert figure.get_size_inches()[1] == 40.0
    assert len(axes.get_yticklabels()) <= 80
