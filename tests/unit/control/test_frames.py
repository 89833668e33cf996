"""Frames: what is written is read again, however the bytes are cut, and nothing else passes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.control import frames
from dsl.control.frames import Damaged, Decoder, frame

FRAMES = st.lists(st.tuples(st.sampled_from(sorted(frames.KINDS)), st.binary(max_size=200)), max_size=8)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *[place % (len(data) + 1) for place in places]})
    return [data[one:other] for one, other in pairwise(edges)]


@given(FRAMES, st.lists(st.integers(0, 1 << 20), max_size=10))
def test_frames_come_out_as_they_went_in(wanted: list[tuple[int, bytes]], places: list[int]) -> None:
    decoder = Decoder()
    data = b"".join(frame(kind, payload) for kind, payload in wanted)
    found = [one for piece in cut(data, places) for one in decoder.feed(piece)]
    assert found == wanted
    assert decoder.held == 0


@given(st.binary(max_size=500))
def test_garbage_is_refused_or_waited_for_but_never_held_beyond_the_limit(data: bytes) -> None:
    decoder = Decoder(longest=100)
    try:
        for kind, payload in decoder.feed(data):
            assert kind in frames.KINDS
            assert len(payload) <= 100
    except Damaged:
        return
    assert decoder.held < 105


def test_a_frame_that_is_too_long_is_refused_by_its_head_alone() -> None:
    decoder = Decoder(longest=10)
    assert list(decoder.feed(frame(1, b"x" * 10))) == [(1, b"x" * 10)]
    with pytest.raises(Damaged, match="a message of 11 bytes, more than the 10 allowed"):
        list(decoder.feed(frame(1, b"x" * 11)[:5]))
    decoder.longest = 11
    assert list(Decoder(11).feed(frame(1, b"x" * 11))) == [(1, b"x" * 11)]


def test_another_kind_is_refused() -> None:
    with pytest.raises(Damaged, match="kind 99"):
        list(Decoder().feed(frame(99)))


@given(st.tuples(st.sampled_from((1, 2)), st.binary(max_size=100), st.booleans()))
def test_output_keeps_its_stream_and_its_bytes(wanted: tuple[int, bytes, bool]) -> None:
    fd, data, unfinished = wanted
    ((kind, payload),) = Decoder().feed(frames.output(fd, data, unfinished=unfinished))
    assert kind == frames.OUTPUT
    assert frames.read_output(payload) == wanted


@given(st.tuples(*[st.integers(0, (1 << 64) - 1)] * 4))
def test_times_come_back(times: tuple[int, int, int, int]) -> None:
    sent, real, heard, now = times
    ((_, asked),) = Decoder().feed(frames.ping(sent, real))
    ((_, answered),) = Decoder().feed(frames.pong(asked, heard, now))
    assert frames.read_pong(answered) == times


@pytest.mark.parametrize("payload", [b"", b"\0rest", b"\3rest"])
def test_output_of_no_stream_is_refused(payload: bytes) -> None:
    with pytest.raises(Damaged):
        frames.read_output(payload)


@pytest.mark.parametrize("payload", [b"", b"x" * 7, b"x" * 9])
def test_damaged_numbers_are_refused(payload: bytes) -> None:
    with pytest.raises(Damaged):
        frames.read_credit(payload)
    with pytest.raises(Damaged):
        frames.read_pong(payload)
    with pytest.raises(Damaged):
        frames.pong(payload, 0, 0)
