"""With a fork server, guard, agent or server is killed at a random moment while workers are forked."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.fork_server import Command, leaver, server_pids

pytestmark = [pytest.mark.engine, pytest.mark.linux_5_4, pytest.mark.guarantee("G1")]

RUNS = 5
"""Random moments in one run of the tests; multiplied by ``--repeats``."""


@pytest.mark.parametrize("how, target", [("guarded", "guard"), ("guarded", "agent"), ("embedded", "agent")])
def test_a_kill_at_a_random_moment_leaves_nobody(
    how: str, target: str, testchild: Path, tmp_path: Path, repeats: int
) -> None:
    for run in range(RUNS * repeats):
        # Inside somebody's program nobody is left to look for daemons.
        first = leaver(tmp_path / str(run)) if how == "guarded" else ["pause"]
        with Command(testchild, first, *[["pause"]] * 23, how=how) as command:
            time.sleep(random.Random(run).random() * 0.15)
            os.kill(getattr(command, target), signal.SIGKILL)
            until(command.is_gone)


def test_a_server_that_is_killed_at_a_random_moment_leaves_nobody(
    testchild: Path, tmp_path: Path, repeats: int
) -> None:
    """Workers that it has not forked yet are executed."""
    for run in range(RUNS * repeats):
        with Command(testchild, leaver(tmp_path / str(run)), *[["pause"]] * 23) as command:
            time.sleep(random.Random(run).random() * 0.15)
            for pid in server_pids(command.agent):
                os.kill(pid, signal.SIGKILL)
            command.process.terminate()
            assert command.process.wait(20) == 0
            assert command.is_gone()
