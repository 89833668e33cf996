"""A launch, step by step, here and in the processes of a command. Nothing is forked: the test is the agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.events import a_plan

from dsl import EngineError, SpecError
from dsl._record import replace
from dsl.agent import session
from dsl.agent.session import Session, Side
from dsl.errors import PortError
from dsl.model.job import NodePlan, Notice

MADE = Notice("info", "logs are here", is_made=True)
KNOWN = Notice("warning", "it is slow")


class Source:
    """Notes the steps of a launch."""

    def __init__(self, plan: NodePlan | None = None) -> None:
        self.steps: list[object] = []
        self._plan = plan or a_plan(2)

    def plan(self, _attempt: int) -> NodePlan:
        self.steps.append("plan")
        return self._plan

    def prepare(self, plan: NodePlan) -> NodePlan:
        held = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.steps.append("prepare, signals held" if held else "prepare")
        return plan

    def finish(self, *, succeeded: bool) -> None:
        self.steps.append("keep" if not succeeded else "remove")

    def tidy(self) -> None:
        """Nothing is left by others."""


class Ran:
    """An agent that ends with a code, or by an exception."""

    def __init__(self, plan: NodePlan, end: int | BaseException) -> None:
        self.plan, self._end = plan, end

    def run(self, _supervisor: object) -> Any:
        if isinstance(self._end, BaseException):
            raise self._end
        return Mock(code=self._end)


class Guarding:
    """A guard that changes nothing of this process."""

    def __init__(self, *_signals: object, **_grace: object) -> None:
        pass

    def enter_agent(self, _workers: int) -> None:
        """Nothing to do."""

    def discard(self) -> None:
        """Nothing was made."""


class Forbidding(Guarding):
    """A guard whose agent cannot be one."""

    def enter_agent(self, _workers: int) -> None:
        raise EngineError("prctl: Operation not permitted")


class ProcessEnded(BaseException):
    """In place of the end of this process, with its exit code."""


def failing(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises it; an error that is a class gets the arguments."""

    def fail(*args: object, **_kwargs: object) -> Any:
        raise error(*args) if isinstance(error, type) else error

    return fail


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Guard", Guarding)
    monkeypatch.setattr(session, "Supervisor", lambda **_guard: Mock())
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "_exit", failing(ProcessEnded))


def a_launch(source: Source, **parts: Any) -> Session:
    """A launch without listeners."""
    side = Side()
    side.source = source
    return Session(side, **parts)


def run_agent(
    end: int | BaseException, monkeypatch: pytest.MonkeyPatch, plan: NodePlan | None = None
) -> tuple[int, str]:
    """The exit code of a process whose agent ends so, and what it did with the files."""
    monkeypatch.setattr(session, "Agent", lambda _source, plan, *_args, **_kwargs: Ran(plan, end))
    source = Source(plan)
    with pytest.raises(ProcessEnded) as ended:
        a_launch(source).run_guarded()
    first = next(step for step in source.steps if step in ("keep", "remove"))
    return ended.value.args[0], str(first)


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "error, code, said",
    [
        (EngineError("no pidfds"), 1, "dsl: error: no pidfds\n"),
        (SpecError("worker 0 has no words"), 2, "dsl: error: worker 0 has no words\n"),
    ],
)
def test_a_guard_that_cannot_be_is_one_line(
    error: EngineError,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(session, "Guard", failing(error))
    source = Source()
    assert a_launch(source).run_guarded() == code
    assert capfd.readouterr().err == said
    assert source.steps == ["plan", "prepare, signals held", "keep"]


@pytest.mark.guarantee("G8")
def test_a_process_that_cannot_be_forked_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback of ours. Afterwards signals are as before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(os, "fork", failing(BlockingIOError(11, "Resource temporarily unavailable")))
    assert a_launch(Source()).run_guarded() == 1
    assert capfd.readouterr().err == (
        "dsl: error: cannot start the process that watches the workers: Resource temporarily unavailable, "
        "raise the limit of processes (ulimit -u, pids.max of the control group)\n"
    )
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize(
    "end, code, said",
    [
        (0, 0, ""),
        (7, 7, ""),
        (EngineError("no pidfds"), 1, "dsl: error: no pidfds\n"),
        (PortError("no free port"), 2, "dsl: error: no free port\n"),
        (ValueError("x"), 70, "dsl: internal error: ValueError: x, please report it\n"),
        (KeyboardInterrupt(), 70, ""),
    ],
)
def test_every_end_of_an_agent_has_its_code_and_finishes_the_job(
    end: int | BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_agent(end, monkeypatch) == (code, "keep" if code else "remove")
    assert capfd.readouterr().err == said


def test_an_agent_that_cannot_begin_finishes_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Guard", Forbidding)
    assert run_agent(0, monkeypatch) == (1, "keep")


@pytest.mark.guarantee("G8")
def test_a_pid_file_that_is_there_already_ends_the_job_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "7.deepspeed"
    path.touch()
    plan = replace(a_plan(2), pid_file=str(path))
    assert run_agent(AssertionError("it ran"), monkeypatch, plan) == (1, "keep")
    assert "remove it if it is a leftover" in capfd.readouterr().err


def test_what_is_known_is_told_before_anything_is_made_and_where_the_files_are_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "Agent", lambda _source, plan, *_args, **_kwargs: Ran(plan, 3))
    source = Source()
    steps = source.steps

    def preview(_plan: NodePlan) -> bool:
        steps.append("preview")
        return False

    class Noting(Side):
        def notices(self, plan: NodePlan) -> Sequence[Notice]:
            assert plan is not None
            return MADE, KNOWN

        def tell(self, plan: NodePlan, notices: Sequence[Notice]) -> None:
            assert plan is not None
            steps.extend(notices)

        def listeners(self, plan: NodePlan) -> list[Any]:
            steps.append("listeners")
            return super().listeners(plan)

    side = Noting()
    side.source = source
    launch = Session(side, preview=preview)
    assert launch.run_here(lambda outcome: outcome.code) == 3
    assert steps == ["plan", KNOWN, "preview", "prepare", MADE, "listeners", "remove"]


def test_a_preview_that_is_all_makes_and_starts_nothing() -> None:
    source = Source()
    launch = a_launch(source, preview=lambda _: True)
    assert launch.run_guarded() == 0
    assert launch.run_here(failing(AssertionError)) is None
    assert source.steps == ["plan", "plan"]


@pytest.mark.parametrize("step", ["prepare", "listeners", "run", "conclude"])
def test_an_error_at_any_step_of_a_launch_keeps_no_file_that_is_empty(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = PortError("no free port")
    monkeypatch.setattr(
        session, "Agent", lambda _source, plan, *_args, **_kwargs: Ran(plan, error if step == "run" else 0)
    )
    source = Source()
    if step == "prepare":
        monkeypatch.setattr(source, "prepare", failing(error))
    side = Side()
    side.source = source
    if step == "listeners":
        monkeypatch.setattr(side, "listeners", failing(error))
    conclude = failing(error) if step == "conclude" else lambda outcome: outcome.code
    with pytest.raises(PortError):
        Session(side).run_here(conclude)
    assert source.steps[-1] == "keep"


@pytest.mark.parametrize("end, signum", [(KeyboardInterrupt(), 2), (MemoryError(), 15)])
def test_an_exception_during_the_wait_stops_the_workers(
    end: BaseException, signum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Mock()
    supervisor.wait.return_value = []
    monkeypatch.setattr(session, "Agent", lambda _source, plan, *_args, **_kwargs: Ran(plan, end))
    monkeypatch.setattr(session, "Supervisor", lambda: supervisor)
    with pytest.raises(type(end)):
        a_launch(Source()).run_here(lambda outcome: outcome)
    assert supervisor.stop.call_args.kwargs["signum"] == signum
    supervisor.close.assert_called_once_with()


def test_nodes_that_meet_under_the_guard_take_all_steps_of_the_launch_after_the_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "Agent", lambda _source, plan, *_args, **_kwargs: Ran(plan, 3))
    source = Source()
    steps = source.steps

    def fork() -> int:
        steps.append("fork")
        return 0

    def join() -> None:
        steps.append("join")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(ProcessEnded) as ended:
        a_launch(source).run_joined(a_plan(2), join)
    assert ended.value.args == (3,)
    assert steps[:5] == ["fork", "join", "plan", "prepare, signals held", "keep"]


def test_a_signal_that_ends_the_meeting_ends_the_job_with_its_code() -> None:
    source = Source()
    with pytest.raises(ProcessEnded) as ended:
        a_launch(source).run_joined(a_plan(2), lambda: 143)
    assert ended.value.args == (143,)
    assert set(source.steps) == {"keep"}
