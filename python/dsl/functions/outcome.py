"""Makes the typed error of a failed attempt: which workers failed, which was first, and the evidence."""

from __future__ import annotations

from dsl.functions.errors import ChildFailedError
from dsl.report.failures import collect, root_cause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.outcome import AttemptOutcome


def failure_of(name: str, attempt: AttemptOutcome) -> ChildFailedError:
    """The error of an attempt with a first failure. ``name``: what was started."""
    # If a plug-in gives the workers no error files, the failures have not been collected yet.
    failures = attempt.failures or tuple(collect(attempt.plan, attempt.exits))
    root = root_cause(failures)
    cause = attempt.ended.first_failure
    evidence: list[str] = []
    if cause is not None and attempt.plan.workers[cause.worker].rank == root.rank:
        evidence = _evidence(attempt, has_record=root.recorded is not None)
    return ChildFailedError.of(name, failures, evidence)


def _evidence(attempt: AttemptOutcome, *, has_record: bool) -> list[str]:
    """What is known about the first failure besides its exit and its error file, as lines."""
    from dsl.report.evidence import kernel_log, last_bytes, without_lost_record
    from dsl.report.verdict import memory_evidence

    cause = attempt.ended.first_failure
    assert cause is not None
    found = []
    timer = attempt.cause_timer
    if timer is not None:
        from dsl.report.verdict import timer_evidence

        found.append(timer_evidence(timer))
    elif cause.signal == 9:
        found.append(memory_evidence(cause, kernel_log(attempt.begin_s), attempt.ended.oom_kills))
    path = attempt.plan.workers[cause.worker].log_path
    tail = attempt.ended.tail or (last_bytes(path) if path is not None else b"")
    tail = without_lost_record(tail, attempt.plan.workers[cause.worker].error_file)
    if tail and not has_record:
        from dsl.report.excerpt import excerpt

        said = excerpt(tail)
        if said.exception:
            found.append(said.exception + (f" ({said.where})" if said.where else ""))
    return [line for line in found if line]
