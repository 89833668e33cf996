"""A job travels byte for byte."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.outcome import assert_one_line, error_of

from dsl._record import Record, fields, scope
from dsl.control.messages import TO_AGENT, TO_HEAD
from dsl.errors import JobFormatError
from dsl.model.codec import LONGEST_LINE, Lines, fields_from_plain, from_json, from_plain, to_json, to_plain
from dsl.model.job import Host, Job, MeetingPoint, Notice, Pairs
from dsl.model.request import (
    LEVELS,
    Count,
    DebugRequest,
    Level,
    OutputRequest,
    PlacementRequest,
    Port,
    Program,
    Seconds,
    SignalRequest,
    StartRequest,
)
from dsl.plan.worker import FLAVOURS

pytestmark = pytest.mark.guarantee("G5")

# What an argument or a variable can hold: any bytes but NUL, as Python gives them to us.
WORDS = st.binary(max_size=20).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
TEXTS = st.one_of(WORDS, st.text(max_size=8))
NUMBERS = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e9, allow_nan=False)
SIGNALS = st.lists(st.integers(1, 64), max_size=3).map(tuple)

PROGRAMS = st.builds(
    Program,
    kind=st.sampled_from(["script", "module", "program", "call"]),
    script=WORDS,
    args=st.lists(WORDS, max_size=6).map(tuple),
    local_rank_option=st.sampled_from(["", "--local_rank", "--local-rank"]),
    name=TEXTS,
)
POINTS = st.builds(
    MeetingPoint,
    kind=st.sampled_from(["alone", "static"]),
    address=TEXTS,
    port=st.none() | st.integers(0, 65535),
)
HOSTS = st.lists(st.builds(Host, TEXTS, st.lists(st.integers(0, 64), max_size=4).map(tuple)), max_size=3).map(
    tuple
)
OUTPUTS = st.builds(
    OutputRequest,
    log_dir=st.none() | WORDS,
    redirects=TEXTS,
    template=TEXTS,
    collapse=st.booleans(),
    partial_after_s=st.none() | st.floats(0, 1e9),
    max_bytes=st.none() | NUMBERS,
)
JOBS = st.builds(
    Job,
    flavour=st.sampled_from(list(FLAVOURS.values())),
    program=PROGRAMS,
    meeting=POINTS,
    run_id=TEXTS,
    role=TEXTS,
    hosts=HOSTS,
    node_count=st.integers(0, 10**9 - 1),
    workers=TEXTS,
    accelerator=TEXTS,
    visible_devices=st.none() | WORDS,
    env=st.lists(st.tuples(WORDS, WORDS), max_size=6).map(tuple),
    max_restarts=NUMBERS,
    signals=st.builds(
        SignalRequest,
        stop=st.none() | SIGNALS,
        forward=SIGNALS,
        preempt=st.none() | st.integers(1, 64),
        preempt_grace_s=st.none() | SECONDS,
        grace_s=SECONDS,
        scope=st.sampled_from([None, "rank", "group"]),
    ),
    output=OUTPUTS,
    placement=st.builds(PlacementRequest, bind=TEXTS, memory=st.none() | TEXTS, strict=st.booleans()),
    start=st.builds(
        StartRequest,
        method=st.sampled_from(["spawn", "fork", "forkserver", "auto"]),
        preload=st.lists(TEXTS, max_size=3).map(tuple),
        source=WORDS,
    ),
    debug=st.builds(
        DebugRequest, ranks=TEXTS, port=st.integers(0, 65535), address=TEXTS, waits=st.booleans()
    ),
    log_level=st.sampled_from(list(LEVELS)),
    save_pid=st.booleans(),
)


def read_job(data: bytes) -> Job:
    job: Job = from_plain(from_json(data), {"Job": Job})
    return job


@pytest.mark.guarantee("G5")
@settings(max_examples=2 * settings().max_examples)  # 10 000 in `make fuzz`
@given(JOBS)
def test_a_job_comes_back_as_it_was_written(job: Job) -> None:
    data = to_json(to_plain(job))
    assert data.isascii()
    again = read_job(data)
    assert again == job
    assert [os.fsencode(word) for word in again.program.args] == [
        os.fsencode(word) for word in job.program.args
    ]


def test_what_a_job_may_hold_can_be_read_by_the_annotation_of_each_field() -> None:
    """A field of a new kind has to be one that the codec can read."""
    found: set[type] = set()

    def walk(kind: type) -> None:
        found.add(kind)
        error_of(JobFormatError, lambda: fields_from_plain("no fields", kind))  # the readers are made first
        for annotation in fields(kind).values():
            for name in re.findall(r"\w+", annotation):
                inner = scope(kind).get(name)
                if isinstance(inner, type) and hasattr(inner, "__match_args__") and inner not in found:
                    walk(inner)

    for kind in (Job, *TO_HEAD.values(), *TO_AGENT.values()):
        walk(kind)
    assert {Job, Host, Notice, SignalRequest} < found


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b'{"a":' * 700 + b"1" + b"}" * 700, "'a' is none of Job"),
        (b"[]" * 100_000, "it is not JSON"),
        (b'{"Job":NaN}', "it is not JSON"),
        (b'{"Job":' + b"9" * 5000 + b"}", "it is not JSON"),
        (b"[]", "a list is none of Job"),
        (b"{}", "'' is none of Job"),
        (b'{"os.system":{}}', "'os.system' is none of Job"),
        (b'{"Host":{"name":"a","slots":[]}}', "'Host' is none of Job"),
        (b'{"Job":{}}', "Job needs the field 'flavour'"),
        (b'{"Job":{"hosts":[{"Host":{"name":"a"}}]}}', "Host needs the field 'slots'"),
        (
            b'{"Job":{"hosts":[{"Host":{"name":"a","slots":[],"x":1}}]}}',
            "Host has no field 'x'",
        ),
        (b'{"Job":{"hosts":[{"Host":3}]}}', "3 is no Host"),
        (b'{"Job":{"hosts":[3]}}', "hosts of Job is 3"),
        (b'{"Job":3}', "3 is no Job"),
    ],
)
def test_bytes_that_are_no_job_are_refused_in_one_line(data: bytes, said: str) -> None:
    message = error_of(JobFormatError, read_job, data)
    assert said in message
    assert_one_line(message)


@given(st.binary(max_size=64))
def test_whatever_bytes_come_they_are_read_or_refused(data: bytes) -> None:
    message = error_of(JobFormatError, read_job, data)
    assert "\n" not in message


class Sample(Record):
    """A field of each kind that records have."""

    text: str = ""
    flag: bool = False
    whole: int = 0
    number: float = 0.0
    port: Port | None = None
    seconds: Seconds = 0.0
    word: Level = "info"
    counts: tuple[Count, ...] = ()
    pairs: Pairs = ()
    notice: Notice | None = None
    notices: tuple[Notice, ...] = ()


@pytest.mark.parametrize(
    "field, value, shown",
    [
        ("text", 1, "1"),
        ("text", None, "None"),
        ("flag", 1, "1"),
        ("flag", "true", "'true'"),
        ("whole", True, "True"),
        ("whole", 1.0, "1.0"),
        ("whole", 2**63, str(2**63)),
        ("whole", -(10**30), str(-(10**30))),
        ("number", False, "False"),
        ("number", 1e300, "1e+300"),
        ("number", "1", "'1'"),
        ("port", -1, "-1"),
        ("port", 65_536, "65536"),
        ("port", False, "False"),
        ("seconds", -0.5, "-0.5"),
        ("seconds", 1e10, "10000000000.0"),
        ("word", "loud", "'loud'"),
        ("word", ["info"], "a list"),
        ("counts", "12", "'12'"),
        ("counts", [1, -1], "-1"),
        ("counts", [[1]], "a list"),
        ("counts", 3, "3"),
        ("pairs", [["a"]], "a list"),
        ("pairs", [["a", 1]], "1"),
        ("pairs", {"a": "b"}, "an object"),
        ("text", "x" * 10**6, ""),
        ("notice", 3, "3"),
        ("notices", [None], "None"),
    ],
)
def test_a_value_that_does_not_fit_its_annotation_is_named(field: str, value: object, shown: str) -> None:
    plain = from_json(to_json({"Sample": {field: value}}))
    error = error_of(JobFormatError, from_plain, plain, {"Sample": Sample})
    assert error == (f"{field} of Sample is {shown}" if shown else "")


def test_a_record_of_each_kind_of_field_comes_back_as_it_was_written() -> None:
    notice = Notice("warning", "odd")
    sample = Sample("a", True, -1, 2.5, 80, 3, "error", (0, 5), (("a", "b"),), notice, (notice,))
    for one in (sample, Sample()):
        assert from_plain(from_json(to_json(to_plain(one))), {"Sample": Sample}) == one


@pytest.mark.parametrize("bad", ["1" * 33, "NaN", "-Infinity", "1e999"])
def test_a_number_without_a_bound_is_none(bad: str) -> None:
    data = b'{"Sample":{"number":' + bad.encode() + b"}}"
    error = error_of(JobFormatError, lambda: from_plain(from_json(data), {"Sample": Sample}))
    assert error in ("it is not JSON", "number of Sample is inf")


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b"7", b'"Notice"', b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_refused(line: bytes) -> None:
    assert error_of(JobFormatError, Lines(Lines).feed, line + b"\n")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_an_end_takes_no_more_memory_than_is_allowed(end: bytes) -> None:
    lines = Lines()
    assert lines.feed(b"x" * LONGEST_LINE) == []
    assert error_of(JobFormatError, lines.feed, b"x" + end) == f"it is longer than {LONGEST_LINE} bytes"
