"""Launches of the commands without processes: everything but the engine is real."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from dsl.agent import session
from dsl.agent.planner import Planner
from dsl.agent.session import Session
from dsl.cli import deepspeed
from dsl.model.job import NodePlan


class _EndedError(Exception):
    """The job has ended with this code."""


def without_engine(monkeypatch: pytest.MonkeyPatch, run: Callable[[Planner, NodePlan], int]) -> None:
    """From now on ``run`` takes the place of each command's job: it gets planner and plan, and returns the code."""

    class Agent:
        def __init__(self, planner: Planner, plan: NodePlan, *_crew: object, **_facts: object) -> None:
            self._planner, self.plan = planner, plan

        def run(self, _supervisor: object) -> int:
            return run(self._planner, self.plan)

    def end(code: Any) -> int:
        raise _EndedError(code)

    def run_here(launch: Session) -> int:
        try:
            return launch.run_here(end) or 0
        except _EndedError as ended:
            return int(ended.args[0])

    monkeypatch.setattr(session, "Agent", Agent)
    monkeypatch.setattr(session, "Supervisor", lambda: Mock(**{"wait.return_value": []}))
    monkeypatch.setattr(Session, "run_guarded", run_here)


Started = list[tuple[NodePlan, Planner]]


def started_jobs(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What is handed to the engine from now on, which ends each job with 7."""
    jobs: Started = []

    def run_job(planner: Planner, plan: NodePlan) -> int:
        assert all(os.path.isdir(folder) for folder in plan.run_dirs)
        jobs.append((plan, planner))
        for worker in plan.workers:  # what the engine opens
            for route in (worker.stdout, worker.stderr):
                if route is not None and route.path is not None:
                    Path(route.path).touch()
        return 7

    without_engine(monkeypatch, run_job)
    return jobs


def assert_refused(
    command: ModuleType, line: str, code: int, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command refuses the line with one message, and leaves no file below the folder."""
    before = sorted(folder.rglob("*"))
    assert command.main(line.split()) == code
    (text,) = capfd.readouterr().err.splitlines()
    assert text.startswith(f"{'dsl' if command is deepspeed else 'dslrun'}: error: ")
    assert message in text
    assert not text.endswith(".")
    assert sorted(folder.rglob("*")) == before
