"""Makes the typed error of a failed attempt: which workers failed, which was first, and the evidence."""

from __future__ import annotations

from dsl.evidence.error_files import collect, root_cause
from dsl.functions.errors import ChildFailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.outcome import AttemptOutcome


def failure_of(name: str, attempt: AttemptOutcome) -> ChildFailedError:
    """The error of an attempt with a first failure. ``name``: what was started."""
    # If a plug-in gives the workers no error files, the failures have not been collected yet.
    failures = attempt.failures or tuple(collect(attempt.plan, attempt.exits))
    root = root_cause(failures)
    evidence: list[str] = []
    if attempt.report is not None and attempt.report.rank == root.rank:
        found = attempt.report.evidence
        evidence = [found.known] if root.recorded is not None else [found.known, found.said]
    return ChildFailedError.of(name, failures, [line for line in evidence if line])
