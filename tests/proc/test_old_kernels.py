"""The engine on kernels and seccomp profiles that lack its favourite system calls, for real (not by its own switch)."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.support.command import dsl_line
from tests.support.jobs import running

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DENIED = [
    ("ENOSYS", "clone3"),
    ("ENOSYS", "pidfd_open"),
    ("ENOSYS", "pidfd_send_signal"),
    ("ENOSYS", "pidfd_open,pidfd_send_signal"),
    ("ENOSYS", "close_range"),
    ("EPERM", "pidfd_open"),
    ("EPERM", "close_range"),
    ("EPERM", "rt_sigqueueinfo"),
    ("ENOSYS", "clone3,pidfd_open,pidfd_send_signal,close_range"),
]


def _without(testchild: Path, errno: str, calls: str, line: Sequence[str]) -> list[str]:
    return [str(testchild.with_name("dsl-deny")), errno, calls, *line]


@pytest.mark.parametrize("errno, calls", DENIED)
def test_codes_are_true(errno: str, calls: str, dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """G2"""
    words = ["only", "2", "[", "exit", "7", "]", "pause"]
    line = dsl_line(dsl_command, 4, [str(testchild), *words])
    with running(_without(testchild, errno, calls, line), tmp_path) as job:
        assert job.wait() == 7, job.stderr()
        assert job.left() == []


@pytest.mark.parametrize("errno, calls", DENIED)
def test_nothing_survives(errno: str, calls: str, dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """G1: deaf workers with a daemon each, ended through the command."""
    deaf = ["ignore", "TERM,INT,HUP", "note", str(tmp_path / "ready")]
    words = ["daemon", "[", *deaf, "d%p %p", "pause", "]", *deaf, "%r %p", "pause"]
    line = dsl_line(dsl_command, 2, [str(testchild), *words], 0.3)
    with running(_without(testchild, errno, calls, line), tmp_path) as job:
        job.ready(4)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143, job.stderr()
        assert job.left() == []


@pytest.mark.parametrize("errno", ["ENOSYS", "EPERM"])
def test_a_refused_memory_policy_is_said(
    errno: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Docker's profile refuses set_mempolicy: the binding of cores still works, and nothing dies silently."""
    line = dsl_line(dsl_command, 1, [str(testchild), "exit", "0"], None, "--bind_cores_to_rank")
    with running(_without(testchild, errno, "set_mempolicy", line), tmp_path) as job:
        code = job.wait()
    assert "Traceback" not in job.stderr()
    assert code == 0 or "memory policy" in job.stderr()


def test_clone3_refused_with_eperm_gives_one_line_or_works(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Some profiles answer EPERM, which the C library takes as final when it makes a thread."""
    line = dsl_line(dsl_command, 2, [str(testchild), "exit", "0"])
    with running(_without(testchild, "EPERM", "clone3", line), tmp_path) as job:
        code = job.wait()
        assert job.left() == []
    assert "Traceback" not in job.stderr()
    assert "panic" not in job.stderr()
    assert code == 0 or job.stderr().count("\n") == 1
