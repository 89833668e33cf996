"""Whether the attempts of a job fail in a loop."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.model.outcome import AttemptOutcome

CRASH_LOOP_S = 60.0
"""A worker that fails sooner after its start has hardly made progress."""


def crash_loop(attempts: Sequence[AttemptOutcome]) -> str:
    """One clause if the last attempts failed alike, soon after their start: another is unlikely to help.

    ``attempts`` are those of the job so far, in order. Empty if there is no such pattern.
    """
    if not attempts:
        return ""
    last = _failure(attempts[-1])
    if last is None:
        return ""
    alike = 0
    for attempt in reversed(attempts):
        if _failure(attempt) != last or attempt.duration_s > CRASH_LOOP_S:
            break
        alike += 1
    if alike < 2:
        return ""
    longest_s = max(attempt.duration_s for attempt in attempts[-alike:])
    return (
        f"crash loop: {alike} attempts in a row failed the same way within {longest_s:.2g} s of their start"
    )


def _failure(attempt: AttemptOutcome) -> tuple[str, int] | None:
    cause = attempt.cause
    return None if cause is None else (str(attempt.plan.workers[cause.worker].label), cause.status)
