"""A job travels byte for byte (G5)."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.outcome import assert_one_line, error_of

from dsl.errors import JobFormatError
from dsl.model.codec import RECORDS, job_from_bytes, job_to_bytes
from dsl.model.job import Host, Job, MeetingPoint, Program
from dsl.model.request import DebugRequest, OutputRequest, PlacementRequest, SignalRequest, StartRequest
from dsl.plan.flavours import FLAVOURS

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
    node_count=NUMBERS,
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
    ),
    output=OUTPUTS,
    placement=st.builds(PlacementRequest, bind=TEXTS, memory=st.none() | TEXTS, strict=st.booleans()),
    start=st.builds(
        StartRequest,
        method=st.sampled_from(["spawn", "fork", "forkserver", "auto"]),
        preload=st.lists(TEXTS, max_size=3).map(tuple),
        source=WORDS,
        prewarm=st.booleans(),
        server_per=st.sampled_from(["node", "numa"]),
        import_throttle=st.none() | NUMBERS,
    ),
    debug=st.builds(DebugRequest, ranks=TEXTS, port=NUMBERS, address=TEXTS, waits=st.booleans()),
    log_level=TEXTS,
    saves_pid=st.booleans(),
)


@settings(max_examples=2 * settings().max_examples)  # 10 000 in `make fuzz`
@given(JOBS)
def test_a_job_comes_back_as_it_was_written(job: Job) -> None:
    """G5."""
    data = job_to_bytes(job)
    assert data.isascii()
    again = job_from_bytes(data)
    assert again == job
    assert [os.fsencode(word) for word in again.program.args] == [
        os.fsencode(word) for word in job.program.args
    ]


def test_every_part_of_a_job_can_be_written() -> None:
    """A record that is added to a job has to be added to the codec, too."""
    job = Job(
        FLAVOURS["torch"], Program("script", "t"), MeetingPoint("alone", "a", 0), hosts=(Host("h", (0,)),)
    )
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, tuple):
            for item in value:
                walk(item)
        elif hasattr(value, "__match_args__") and not isinstance(value, str):
            found.add(type(value).__name__)
            for name in value.__match_args__:
                walk(getattr(value, name))
        else:
            assert value is None or isinstance(value, (str, int, float, bool))

    walk(job)
    assert found == set(RECORDS)


@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "has format None, expected 1: install the same version of dsl on every host"),
        (b'{"format":2,"job":{}}', "has format 2, expected 1"),
        (b'{"format":1}', "there is no job in it"),
        (b'{"format":1,"job":{"os.system":{}}}', "'os.system' is none of its parts"),
        (b'{"format":1,"job":{"Host":{"name":"a","slots":[]}}}', "there is no job in it"),
        (b'{"format":1,"job":{"Host":{"name":"a"}}}', "Host needs the field 'slots'"),
        (b'{"format":1,"job":{"Host":{"name":"a","slots":[],"x":1}}}', "Host has no free field 'x'"),
        (b'{"format":1,"job":{"Host":3}}', "'Host' is none of its parts"),
    ],
)
def test_bytes_that_are_no_job_are_refused_in_one_line(data: bytes, said: str) -> None:
    """G8."""
    message = error_of(JobFormatError, job_from_bytes, data)
    assert message is not None
    assert said in message
    assert_one_line(message)


@given(st.binary(max_size=64))
def test_whatever_bytes_come_they_are_read_or_refused(data: bytes) -> None:
    message = error_of(JobFormatError, job_from_bytes, data)
    assert message is None or "\n" not in message
