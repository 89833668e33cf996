"""Launches of the commands without processes: everything but the engine is real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from dsl.agent import session
from dsl.agent.planner import Planner
from dsl.agent.session import Session
from dsl.model.job import NodePlan


class _EndedError(Exception):
    """The job has ended with this code."""


def without_engine(monkeypatch: pytest.MonkeyPatch, run: Callable[[Planner, NodePlan], int]) -> None:
    """From now on ``run`` takes the place of each command's job: it gets planner and plan, and returns the code."""

    class Agent:
        def __init__(self, planner: Planner, plan: NodePlan, *_crew: object, **_facts: object) -> None:
            self._job = planner, plan

        def run(self, _supervisor: object) -> int:
            return run(*self._job)

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
