"""What a command does where its guard or its agent cannot be, or is left by an error. Nothing is forked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.events import a_plan

from dsl import EngineError, SpecError
from dsl._record import replace
from dsl.cli import process
from dsl.cli.process import Crew, HeldSignals
from dsl.errors import PortError
from dsl.model.outcome import Membership

if TYPE_CHECKING:
    from collections.abc import Callable


class Source:
    """Notes how the job is finished."""

    max_restarts = 0
    timers = None

    def __init__(self) -> None:
        self.finished: list[bool] = []

    def membership(self) -> Membership:
        """One node."""
        return Membership(1)

    def finish(self, *, succeeded: bool) -> None:
        """Note it."""
        self.finished.append(succeeded)


class Ran:
    """An agent that ends with a code, or by an exception."""

    def __init__(self, end: int | BaseException) -> None:
        self._end = end

    def __call__(self, _supervisor: object) -> int:
        """End so."""
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end


class Guarding:
    """A guard that changes nothing of this process."""

    def __init__(self, *_signals: object, **_grace: object) -> None:
        pass

    def enter_agent(self) -> None:
        """Nothing to do."""

    def discard(self) -> None:
        """Nothing was made."""


class Forbidding(Guarding):
    """A guard whose agent cannot be one."""

    def enter_agent(self) -> None:
        """Refuse."""
        raise EngineError("prctl: Operation not permitted")


def run_agent(end: int | BaseException, guard: Guarding | None = None) -> tuple[int, list[bool]]:
    """The exit code of an agent, and how its job was finished."""
    source = Source()
    code = process._run_agent(Ran(end), source, a_plan(2), guard or Guarding(), Crew([]))  # type: ignore[arg-type]
    return code, source.finished


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "Guard", Guarding)
    monkeypatch.setattr(process, "Supervisor", lambda **_guard: None)


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises it."""

    def fail(*_args: object, **_kwargs: object) -> Any:
        raise error

    return fail


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
    monkeypatch.setattr(process, "Guard", failing(error))
    with HeldSignals() as held:
        assert process.run_guarded(Source(), a_plan(2), Crew([]), held, stdin_is_terminal=False) == code  # type: ignore[arg-type]
    assert capfd.readouterr().err == said


@pytest.mark.guarantee("G8")
def test_a_process_that_cannot_be_forked_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback of ours."""
    monkeypatch.setattr(os, "fork", failing(BlockingIOError(11, "Resource temporarily unavailable")))
    with HeldSignals() as held:
        assert process.run_guarded(Source(), a_plan(2), Crew([]), held, stdin_is_terminal=False) == 1  # type: ignore[arg-type]
    assert capfd.readouterr().err == (
        "dsl: error: cannot start the process that watches the workers: Resource temporarily unavailable, "
        "raise the limit of processes (ulimit -u, pids.max of the control group)\n"
    )


@pytest.mark.parametrize(
    "end, code, said",
    [
        (0, 0, ""),
        (7, 7, ""),
        (EngineError("no pidfds"), 1, "dsl: error: no pidfds\n"),
        (PortError("no free port"), 2, "dsl: error: no free port\n"),
        (ValueError("x"), 70, "dsl: internal error: ValueError: x, please report it\n"),
    ],
)
def test_every_end_of_an_agent_has_its_code_and_finishes_the_job(
    end: int | BaseException, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_agent(end) == (code, [code == 0])
    assert capfd.readouterr().err == said


def test_an_agent_that_cannot_begin_finishes_the_job() -> None:
    assert run_agent(0, Forbidding()) == (1, [False])


def test_an_interrupt_of_an_agent_finishes_the_job() -> None:
    source = Source()
    with pytest.raises(KeyboardInterrupt):
        process._run_agent(Ran(KeyboardInterrupt()), source, a_plan(2), Guarding(), Crew([]))  # type: ignore[arg-type]
    assert source.finished == [False]


@pytest.mark.guarantee("G8")
def test_a_pid_file_that_is_there_already_ends_the_job_before_it_begins(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "7.deepspeed"
    path.touch()
    plan, source = replace(a_plan(2), pid_file=str(path)), Source()
    code = process._run_agent(Ran(AssertionError("it ran")), source, plan, Guarding(), Crew([]))  # type: ignore[arg-type]
    assert code == 1
    assert source.finished == [False]
    assert "remove it if it is a leftover" in capfd.readouterr().err
