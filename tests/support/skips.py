"""Which tests are skipped because something is missing, and which skips fail a run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil

import pytest

# A test may be skipped only for what no set-up step can install, or what its user would not have on the machine.
ALLOWED = (
    "needs root",
    "needs apt-get",
    "needs namespaces",
    "needs the program ",
    "needs a Python with",
    "needs Chromium",
    "needs a NUMA machine",
    "needs several CPUs",
    "needs a writable cgroup ",
    "needs a kernel with ",
)


def skip_without_its_needs(item: pytest.Item) -> None:
    """Skip a test whose program or package is missing, and say which."""
    for kind, is_there in (("program", shutil.which), ("package", _is_installed)):
        for mark in item.iter_markers(f"needs_{kind}"):
            if not is_there(mark.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"needs the {kind} {mark.args[0]}"))


def _is_installed(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return False


class SkipWatch:
    """Fails the run for a test that could have run and was skipped."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = text.removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED):
            self.unexpected.append(f"{report.nodeid} - skipped: {reason}")

    pytest_runtest_logreport = _note
    pytest_collectreport = _note

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unexpected:
            terminalreporter.section("skipped, but could have run", red=True)
            for line in self.unexpected:
                terminalreporter.write_line(f"FAILED {line}")
