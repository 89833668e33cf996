"""How far the clocks of two machines are apart, as far as that can be known. Pure.

A heartbeat is sent at ``a``, heard at ``b``, answered at ``c`` and back at ``d``: ``a`` and ``d`` by our
clock, ``b`` and ``c`` by theirs. So their clock is ahead of ours by ``(b - a + c - d) / 2``. That is wrong
by half of the time on the way at most, ``(d - a - (c - b)) / 2``, however unequal the two ways are (RFC
5905, section 8). Clocks run apart, so what was measured a while ago is less exact.
"""

from __future__ import annotations

from dsl._record import record

DRIFT_PER_MILLION = 1000
"""Two clocks that are steered run apart by no more: each is slewed by 500 at most (adjtimex)."""

STEP_NS = 1_000_000
"""The clock of the day is taken to have been set if it moves so differently from one that never steps."""

KEPT = 8
"""Samples to choose from."""


@record
class Clock:
    """What is known of the clock of another machine."""

    offset_ns: int
    """By how much it is ahead of ours."""
    error_ns: int
    """The offset is wrong by no more than this."""


@record
class Sample:
    """One heartbeat that has come back."""

    at_ns: int
    """When, by a clock of ours that never steps."""
    offset_ns: int
    """By how much their clock is ahead of ours."""
    error_ns: int
    """The offset was wrong by no more than this."""


OURS = Clock(0, 0)


def measure(a_ns: int, b_ns: int, c_ns: int, d_ns: int, sent_ns: int, back_ns: int) -> Sample | None:
    """Make a sample of four times of day, and of when it was sent and back by a clock that never steps.

    None: a clock was set meanwhile.
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

    Those that cannot be true together with the new one are of a time before a clock was set.
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
    """The best that is known now; None: nothing is."""
    if not samples:
        return None
    best = min(samples, key=lambda one: _error_ns(one, now_ns))
    return Clock(best.offset_ns, _error_ns(best, now_ns))


def is_earlier(one_ns: int, one: Clock | None, other_ns: int, other: Clock | None) -> bool | None:
    """Whether the first of two things happened before the second; None: that cannot be known.

    Each is told by the time of day of its machine. A machine has one clock: for two things on one machine
    give `OURS` twice.
    """
    if one is None or other is None:
        return None
    apart_ns = (other_ns - other.offset_ns) - (one_ns - one.offset_ns)
    unsure_ns = one.error_ns + other.error_ns
    if abs(apart_ns) <= unsure_ns:
        return None
    return apart_ns > 0
