"""A group that has nothing to do costs nothing: neither the command nor a program with the engine in it wakes up."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.group import Group
from tests.support.jobs import running

pytestmark = [pytest.mark.engine, pytest.mark.linux_5_4]

LOOK_S = 0.2


def _is_still(pid: int, thread_name: str | None = None) -> bool:
    """True if the threads did not run between two looks: what polls, or never sleeps, is never still."""
    before = processes.processor_ns(pid, thread_name)
    time.sleep(LOOK_S)
    return processes.processor_ns(pid, thread_name) == before


def test_guard_and_agent_sleep_while_the_workers_do(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    program = [str(testchild), "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 3, program), tmp_path) as job:
        job.ready(3)
        until(lambda: _is_still(job.guard) and _is_still(job.agent()))


@pytest.mark.needs_pidfd
def test_the_engine_inside_a_program_sleeps_too(testchild: Path) -> None:
    with Group([[str(testchild), "pause"]] * 3) as group:
        group.all_started()
        assert processes.processor_ns(os.getpid(), "dsl-engine") > 0  # there is such a thread
        until(lambda: _is_still(os.getpid(), "dsl-engine"))
