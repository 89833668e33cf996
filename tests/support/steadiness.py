"""Tells a test that fails now and then from one that fails."""

from __future__ import annotations

import pytest

LEFT_BEHIND = "the test left processes behind"
"""How a failure begins that is not tried again: what was left once is a defect."""


def watch_steadiness(config: pytest.Config, allowed: int) -> None:
    """Run each failed test once more, and name those that pass then; more than `allowed` of them fail the run."""
    config.option.reruns = 1
    config.option.rerun_except = [LEFT_BEHIND]
    config.pluginmanager.register(_SteadinessWatch(allowed))


class _SteadinessWatch:
    """Names the tests that failed and then passed, and fails the run when there are too many."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.unsteady: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if outcome == "rerun":
            self.unsteady[report.nodeid] = report.longreprtext
        elif report.failed:
            self.unsteady.pop(report.nodeid, None)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self.unsteady) > self.allowed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.unsteady:
            return
        terminalreporter.section(
            f"unsteady: failed, and passed when run again (at most {self.allowed} may)",
            red=len(self.unsteady) > self.allowed,
            yellow=True,
        )
        for name, text in self.unsteady.items():
            terminalreporter.write_line(text)
            terminalreporter.write_line(f"UNSTEADY {name}", yellow=True)
