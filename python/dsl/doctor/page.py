"""What the doctor says, on one screen, and its exit code. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dsl.doctor.host_checks import HOST_CHECKS
from dsl.doctor.job_checks import JOB_CHECKS
from dsl.lists import counted, name_few
from dsl.model.health import Symptom

MOST_LINES = 22
"""Lines of findings that fit on a screen with the others."""

CODES = {"warning": 1, "error": 2}


def exit_code(findings: Sequence[tuple[tuple[str, ...], Symptom]]) -> int:
    """0 if all is well, 1 with warnings, 2 with errors."""
    return max([CODES[finding.level] for _, finding in findings], default=0)


def page(
    findings: Sequence[tuple[tuple[str, ...], Symptom]], hosts: Sequence[str], workers: int
) -> list[str]:
    """The lines of the page. ``hosts``: those of the job; none: this one alone."""
    where = f"{len(hosts)} hosts" if len(hosts) > 1 else hosts[0] if hosts else "this host"
    job = f"{where}, {counted(workers, 'worker')}" if workers else where
    checks = len(HOST_CHECKS) + (len(JOB_CHECKS) if len(hosts) > 1 else 0)
    counts = [
        counted(number, level)
        for level in ("error", "warning")
        if (number := sum(finding.level == level for _, finding in findings))
    ]
    head = f"doctor: {job}: {', '.join(counts) or f'all is well, {checks} checks found nothing'}"
    shown = [_line(names, finding) for names, finding in findings[:MOST_LINES]]
    rest = findings[MOST_LINES:]
    more = [f"... and {len(rest)} more: mend these first, then look again"] if rest else []
    return [head, *shown, *more]


def _line(names: Sequence[str], finding: Symptom) -> str:
    where = f"{name_few(names)}: " if names else ""
    return f"{finding.level:7}  {where}{finding.text} [{finding.check}]"
