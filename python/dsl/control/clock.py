"""How far the clocks of two machines are apart, as far as we can know. Pure.

A heartbeat is sent at ``a``, heard at ``b``, answered at ``c`` and back at ``d``: ``a`` and ``d`` by our
clock, ``b`` and ``c`` by the other machine's clock. So the other clock is ahead of ours by
``(b - a + c - d) / 2``. The error is at most half of the travel time, ``(d - a - (c - b)) / 2``, however
unequal the two trips are (RFC 5905, section 8). Clocks drift apart, so an older measurement is less exact.
"""

from __future__ import annotations

from dsl._record import Record

DRIFT_PER_MILLION = 1000
"""Two steered clocks drift apart by at most this: each clock is slewed by at most 500 (adjtimex)."""

STEP_NS = 1_000_000
"""If the time of day moves by more than this against a clock that never steps, then it was set."""

KEPT = 8
"""Samples to choose from."""


class Clock(Record):
    """What is known about the clock of another machine."""

    offset_ns: int
    """How far it is ahead of our clock."""
    error_ns: int
    """The offset is wrong by no more than this."""


class Sample(Record):
    """The measurement of one heartbeat."""

    at_ns: int
    """When its answer came back, by our clock that never steps."""
    offset_ns: int
    """How far the other clock was ahead of ours."""
    error_ns: int
    """The offset was wrong by no more than this."""


OURS = Clock(0, 0)


def measure(a_ns: int, b_ns: int, c_ns: int, d_ns: int, sent_ns: int, back_ns: int) -> Sample | None:
    """Make a sample from four times of day, as at the top of this module. None: a clock was set meanwhile.

    ``sent_ns`` and ``back_ns`` are the times of sending and return by our clock that never steps.
    """
    trip_ns = back_ns - sent_ns
    if abs((d_ns - a_ns) - trip_ns) > STEP_NS or not 0 <= c_ns - b_ns <= trip_ns + STEP_NS:
        return None
    way_ns = max(trip_ns - (c_ns - b_ns), 0)
    return Sample(back_ns, ((b_ns - a_ns) + (c_ns - d_ns)) // 2, way_ns // 2 + 1)


def _error_ns(sample: Sample, now_ns: int) -> int:
    return sample.error_ns + max(now_ns - sample.at_ns, 0) * DRIFT_PER_MILLION // 1_000_000


def add(samples: tuple[Sample, ...], new: Sample) -> tuple[Sample, ...]:
    """The samples that are worth keeping, the new one last.

    A sample that contradicts the new one was made before a clock was set, and goes.
    """
    fitting = [
        old
        for old in samples
        if abs(old.offset_ns - new.offset_ns) <= _error_ns(old, new.at_ns) + new.error_ns
    ]
    if len(fitting) >= KEPT:
        fitting.remove(max(fitting, key=lambda old: _error_ns(old, new.at_ns)))
    return (*fitting, new)


def estimate(samples: tuple[Sample, ...], now_ns: int) -> Clock | None:
    """The best estimate for now; None without samples."""
    if not samples:
        return None
    best = min(samples, key=lambda one: _error_ns(one, now_ns))
    return Clock(best.offset_ns, _error_ns(best, now_ns))


def is_earlier(one_ns: int, one: Clock | None, other_ns: int, other: Clock | None) -> bool | None:
    """Whether the first of two things happened before the second; None: we cannot know.

    Each time is the time of day on its machine. For two things on one machine, which has one clock, pass
    `OURS` twice.
    """
    if one is None or other is None:
        return None
    apart_ns = (other_ns - other.offset_ns) - (one_ns - one.offset_ns)
    unsure_ns = one.error_ns + other.error_ns
    if abs(apart_ns) <= unsure_ns:
        return None
    return apart_ns > 0
