"""Whether a job that restarts again and again makes progress: pure rules for the code that restarts it.

Restarts are cheap if failures are rare. If each attempt fails soon after its start, the next one waits longer
each time. After ten attempts that fail in the same way, we know that the next one will, too.
"""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.model.outcome import Tried, own_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from dsl.model.outcome import AttemptOutcome


class Patience(Record):
    """How long a job waits before it restarts workers that fail soon after their start."""

    within_s: float
    """An attempt that fails before this time has made no progress."""
    at_once: int
    """After this many such attempts in a row, the next one still starts without a pause."""
    first_s: float
    """The first pause; each further one is twice as long."""
    longest_s: float
    """The longest pause."""


SAME_HOSTS = Patience(within_s=1.0, at_once=5, first_s=0.1, longest_s=5.0)
"""The same workers start again on the same hosts."""

OTHER_HOSTS = Patience(within_s=10.0, at_once=2, first_s=1.0, longest_s=30.0)
"""Hosts come and go, and have to find each other again."""

MOST_FRUITLESS = 10
"""After this many attempts in a row that fail alike, within `Patience.within_s`, another one is futile."""

CRASH_LOOP_S = 60.0
"""A worker that fails sooner after its start has hardly made progress."""

MOST_KEPT = 32
"""Entries that are kept of the attempts so far: more than any rule looks at."""


class Next(Record):
    """What follows an attempt that failed."""

    kind: Literal["restart", "spent", "futile"]
    """``restart``: another attempt; ``spent``: no restart is left; ``futile``: a restart is no use."""
    wait_s: float = 0.0
    """Seconds to wait before the restart."""


def after_failure(
    tried: Sequence[Tried], patience: Patience, restarts_left: int, *, gives_up: bool = False
) -> Next:
    """Decide whether another attempt follows. ``tried`` has the attempts so far, the latest at the end.

    ``gives_up``: the user set no number of restarts. Otherwise the job may use them all.
    """
    if restarts_left <= 0:
        return Next("spent")
    if gives_up and _count(_in_a_row(tried, patience.within_s, alike=True)) >= MOST_FRUITLESS:
        return Next("futile")
    extra = _count(_in_a_row(tried, patience.within_s)) - patience.at_once
    if extra <= 0:
        return Next("restart")
    return Next("restart", min(patience.first_s * 2.0 ** min(extra - 1, 64), patience.longest_s))


def with_attempt(tried: Sequence[Tried], attempt: AttemptOutcome) -> tuple[Tried, ...]:
    """What is kept of the attempts so far, with one more attempt."""
    return add(tried, Tried(attempt.duration_s, _cause_of(attempt)))


def add(tried: Sequence[Tried], one: Tried) -> tuple[Tried, ...]:
    """Add an attempt. If it ended like the last one, both share an entry: a crash loop takes no memory."""
    last = tried[-1] if tried else None
    if last is None or last.cause != one.cause or _pace(last.duration_s) != _pace(one.duration_s):
        return (*tried, one)[-MOST_KEPT:]
    longest_s = max(last.duration_s, one.duration_s)
    return (*tried[:-1], replace(last, duration_s=longest_s, count=last.count + one.count))


def crash_loop(tried: Sequence[Tried]) -> str:
    """One clause if the last attempts failed alike, soon after their start: another is unlikely to help.

    Empty if there is no such pattern.
    """
    alike = _in_a_row(tried, CRASH_LOOP_S, alike=True)
    count = _count(alike)
    if count < 2:
        return ""
    longest_s = max(one.duration_s for one in alike)
    return (
        f"crash loop: {count} attempts in a row failed the same way within {longest_s:.2g} s of their start"
    )


def restart_line(who: str, number: int, most: int, tried: Sequence[Tried], wait_s: float = 0.0) -> str:
    """Tells the user that ``who`` starts again: restart ``number`` of ``most``, after ``wait_s`` seconds."""
    pause, loop = f", in {wait_s:g} s" if wait_s else "", crash_loop(tried)
    return f"starting {who} again, restart {number} of {most}{pause}{f' ({loop})' if loop else ''}"


def failures_line(count: int, tried: Sequence[Tried]) -> str:
    """Tells the user that all attempts have failed; empty if there was only one."""
    return crash_loop(tried) or (f"{count} attempts have failed" if count > 1 else "")


def _in_a_row(tried: Sequence[Tried], within_s: float, *, alike: bool = False) -> list[Tried]:
    """The attempts in a row, up to the last, that failed before that time; ``alike``: as the last one did."""
    found = []
    for one in reversed(tried):
        if not one.cause or one.duration_s >= within_s or (alike and one.cause != tried[-1].cause):
            break
        found.append(one)
    return found


def _count(tried: Sequence[Tried]) -> int:
    return sum(one.count for one in tried)


def _pace(duration_s: float) -> int:
    """A class of durations: every rule treats attempts of one class alike."""
    return sum(duration_s >= bound for bound in (SAME_HOSTS.within_s, OTHER_HOSTS.within_s, CRASH_LOOP_S))


def _cause_of(attempt: AttemptOutcome) -> str:
    """How an attempt failed, here or elsewhere."""
    cause = attempt.cause
    if cause is not None:
        status = own_code(cause.status, is_stopped=cause.caused_by_stop)
        return f"{attempt.plan.workers[cause.worker].label} {status}"
    if not attempt.news:
        return ""
    from dsl.model.nodes import PeerFailure

    told = [one for one in attempt.news if isinstance(one, PeerFailure)]
    return f"rank {told[0].rank} {told[0].code}" if told else ""
