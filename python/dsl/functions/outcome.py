"""From a failed attempt to the typed error: who failed, who first, and what else is known of that one."""

from __future__ import annotations

from dsl.functions.errors import ChildFailedError
from dsl.report.failures import root_cause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.attempts import Attempt


def failure_of(name: str, attempt: Attempt, kills_before: int) -> ChildFailedError:
    """The error of an attempt with a first failure. ``name``: what was started.

    ``kills_before``: `dsl.report.evidence.oom_kills` before the workers started.
    """
    plan = attempt.plan
    failures = attempt.failures()
    root = root_cause(failures)
    cause = attempt.ended.first_failure
    evidence: list[str] = []
    if cause is not None and plan.workers[cause.worker].rank == root.rank:
        evidence = _evidence(attempt, kills_before, has_record=root.recorded is not None)
    return ChildFailedError.of(name, failures, evidence)


def _evidence(attempt: Attempt, kills_before: int, *, has_record: bool) -> list[str]:
    """What is known of the first failure besides its exit and its error file, in lines."""
    from dsl.report.evidence import kernel_log, last_bytes, oom_kills
    from dsl.report.verdict import memory_evidence

    cause = attempt.ended.first_failure
    assert cause is not None
    found = []
    if cause.signal == 9:
        kills = oom_kills() - kills_before
        found.append(memory_evidence(cause, kernel_log(attempt.begin_s), kills))
    path = attempt.plan.workers[cause.worker].log_path
    tail = attempt.ended.tail or (last_bytes(path) if path is not None else b"")
    if tail and not has_record:
        from dsl.report.excerpt import excerpt

        said = excerpt(tail)
        if said.exception:
            found.append(said.exception + (f" ({said.where})" if said.where else ""))
    return [line for line in found if line]
