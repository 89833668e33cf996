"""What a job can do without costs a line if it cannot be done, never the job."""

from __future__ import annotations

import errno
import os

import pytest

from dsl.report import speak
from dsl.report.speak import optional


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speak, "_warned", set())


def failing(error: Exception) -> None:
    raise error


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "error, why",
    [
        (RuntimeError("can't start new thread"), "no process or thread can be started here, raise the limit"),
        (os_error(errno.EAGAIN), "no process or thread can be started here, raise the limit"),
        (os_error(errno.EMFILE), "too many files are open, raise the limit of open files (ulimit -n)"),
        (os_error(errno.ENFILE), "too many files are open on this machine"),
        (MemoryError(), "no memory is left"),
        (os_error(errno.ENOMEM), "no memory is left"),
        (os_error(errno.ENOSPC), "no space is left on the disk"),
        (os_error(errno.EDQUOT), "no space is left of your quota"),
        (ModuleNotFoundError("No module named 'x'"), "a file of dsl or of its Python is gone or has changed"),
    ],
    ids=repr,
)
def test_what_is_short_is_one_line_once(
    error: Exception, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    reasons: list[str] = []
    for _ in range(3):
        assert optional("dsl", "there is no view", lambda: failing(error), reasons.append) is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"dsl: warning: there is no view: {why}")
    assert len(reasons) == 3
    assert reasons[0].startswith(why)


def test_the_code_of_another_version_counts_as_a_module_that_is_gone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = compile("raise RuntimeError('of another version')", "module.py", "exec")
    optional("dsl", "there is no view", lambda: exec(code))
    assert "a file of dsl or of its Python is gone or has changed" in capfd.readouterr().err


def test_any_other_error_is_ours(capfd: pytest.CaptureFixture[str]) -> None:
    optional("dsl", "there is no view", lambda: failing(KeyError("x")))
    assert capfd.readouterr().err == "dsl: internal error: KeyError: 'x', please report it\n"


def test_what_can_be_done_is_done() -> None:
    assert optional("dsl", "there is no view", lambda: 3) == 3
