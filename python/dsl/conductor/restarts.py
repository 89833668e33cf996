"""When a job starts again after a failure, when it waits or is given up, and the lines about that. Pure."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.model.outcome import SIGNAL_CODES, own_code
from dsl.model.request import NO_POLICY
from dsl.words import LAST_SIGNAL, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from dsl.model.outcome import AttemptOutcome
    from dsl.model.request import Policy


class Tried(Record):
    """Attempts in a row that ended alike, in short."""

    duration_s: float
    """Seconds from the first start to the end, for the longest of these attempts."""
    cause: str = ""
    """How they failed, in words that are equal for equal failures; empty: no worker failed."""
    count: int = 1
    """Number of these attempts."""
    code: int = 0
    """Exit code of the first failure, 128 + n for signal n; 0: no worker failed."""
    is_silent: bool = False
    """The script had no output before, see `Report.is_silent`."""


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

MOST_SILENT = 3
"""With a policy of the user: so many failures in a row for the same reason, before any output, are enough."""

CRASH_LOOP_S = 60.0
"""A worker that fails sooner after its start has hardly made progress."""

MOST_KEPT = 32
"""Entries that are kept of the attempts so far: more than any rule looks at."""


class Next(Record):
    """What follows an attempt that failed."""

    kind: Literal["restart", "spent", "futile", "excluded"]
    """``restart``: another attempt; ``spent``: no restart is left; ``futile``: a restart is no use;
    ``excluded``: the policy of the user forbids it."""
    wait_s: float = 0.0
    """Seconds to wait before the restart."""
    why: str = ""
    """Excluded: the reason, as a clause."""


def after_failure(
    tried: Sequence[Tried],
    patience: Patience,
    restarts_left: int,
    *,
    gives_up: bool = False,
    policy: Policy = NO_POLICY,
) -> Next:
    """Decide whether another attempt follows. ``tried`` has the attempts so far, the latest at the end.

    ``gives_up``: the user set no number of restarts. Otherwise the job may use them all. ``policy``: which
    failures the user wants to be tried again.
    """
    if restarts_left <= 0:
        return Next("spent")
    if why := _objection(tried, policy):
        return Next("excluded", why=why)
    if gives_up and _count(_in_a_row(tried, patience.within_s, alike=True)) >= MOST_FRUITLESS:
        return Next("futile")
    extra = _count(_in_a_row(tried, patience.within_s)) - patience.at_once
    if extra <= 0:
        return Next("restart")
    return Next("restart", min(patience.first_s * 2.0 ** min(extra - 1, 64), patience.longest_s))


def _objection(tried: Sequence[Tried], policy: Policy) -> str:
    """Why the policy forbids another attempt, as a clause; empty: it does not."""
    last = tried[-1] if tried else None
    if policy == NO_POLICY or last is None or not last.code:
        return ""
    code = last.code
    is_signal = 0 < code - SIGNAL_CODES <= LAST_SIGNAL
    what = signal_name(code - SIGNAL_CODES) if is_signal else f"exit code {code}"
    if code in policy.give_up_on:
        return f"{what} is in --give-up-on"
    if policy.restart_on and code not in policy.restart_on:
        return f"{what} is not in --restart-on"
    count = 0
    for one in reversed(tried):
        if not one.is_silent or one.code != code:
            break
        count += one.count
    return f"{what} {count} times in a row, before any output of the script" if count >= MOST_SILENT else ""


def with_attempt(tried: Sequence[Tried], attempt: AttemptOutcome) -> tuple[Tried, ...]:
    """What is kept of the attempts so far, with one more attempt, and how it failed here."""
    cause, report = attempt.cause, attempt.report
    if cause is None:
        return add(tried, Tried(attempt.duration_s))
    code = own_code(cause.status, is_stopped=cause.caused_by_stop)
    is_silent = report is not None and report.is_silent
    label = attempt.plan.workers[cause.worker].label
    return add(tried, Tried(attempt.duration_s, f"{label} {code}", code=code, is_silent=is_silent))


def add(tried: Sequence[Tried], one: Tried) -> tuple[Tried, ...]:
    """Add an attempt. If it ended like the last one, both share an entry: a crash loop takes no memory."""
    last = tried[-1] if tried else None
    if last is None or _class_of(last) != _class_of(one):
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


def _class_of(one: Tried) -> tuple[object, ...]:
    """Every rule treats attempts of one class alike."""
    bounds = (SAME_HOSTS.within_s, OTHER_HOSTS.within_s, CRASH_LOOP_S)
    return one.cause, one.code, one.is_silent, sum(one.duration_s >= bound for bound in bounds)
