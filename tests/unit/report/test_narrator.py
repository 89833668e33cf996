"""What the narrator says where it cannot say all."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.events import A_JOB, a_leftovers, a_plan, an_attempt, an_exit, end

from dsl import ForkServerLost, ForkServerReady, ForkServerSlow
from dsl._record import replace
from dsl.evidence import reports as evidence
from dsl.functions.launcher import to_logger
from dsl.model.outcome import Outcome
from dsl.report.narrator import Narrator


def test_what_workers_left_running_is_named_while_it_has_time_and_when_it_is_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The classes of the engine cannot be made, so an event is a stand-in of its class."""
    teller = Narrator(a_plan(2))
    left = [(7, "sh -c upload", 1), (8, "?", None), (9, "b", 0), (10, "c", 0), (11, "d", 0)]
    teller.hear(a_leftovers(left[:1], grace_s=28.0))
    teller.hear(a_leftovers(left, grace_s=0.0))
    assert capfd.readouterr().err.splitlines() == [
        (
            "dsl: all workers have ended, waiting at most 28 s for what they left running (Ctrl-C ends it): "
            "process 7 of rank 1 (sh -c upload)"
        ),
        (
            "dsl: warning: ended what the workers had left running: process 7 of rank 1 (sh -c upload), "
            "process 8 (?), process 9 of rank 0 (b), process 10 of rank 0 (c) and 1 more"
        ),
    ]


@pytest.mark.guarantee("G3")
def test_who_has_failed_is_said_even_if_what_is_known_of_it_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:

    def fail(*_args: object) -> str:
        raise KeyError("x")

    monkeypatch.setattr(evidence, "evidence_of", fail)
    plan, cause = a_plan(2), an_exit(1, code=3)
    attempt = an_attempt(plan, [cause, an_exit(0, signal=15, by_us=True)], end(cause))
    Narrator(plan).hear(Outcome(3, attempt))
    first, second, *_ = capfd.readouterr().err.splitlines()
    assert first == "dsl: internal error: KeyError: 'x', please report it"
    assert second.startswith("dsl: rank 1 (local rank 1, pid 1001, host node7) failed first")
    assert "exit code 3" in second


LOST: Any = Mock(spec=ForkServerLost, server=1, pid=77, text="refused: a thread runs", workers=[])
KILLED: Any = Mock(spec=ForkServerLost, server=1, text="was ended by signal 9", workers=[0, 1])
READY: Any = Mock(spec=ForkServerReady, server=1)
SLOW: Any = Mock(spec=ForkServerSlow, server=1, pid=77, import_s=30.01)
SLOW_LINE = (
    "fork server 1 (process 77) is still importing after 30 s, and the workers wait for it: "
    "py-spy dump --pid 77 shows where it is"
)
LOST_LINE = "fork server 1 refused: a thread runs: workers are executed instead"


@pytest.mark.parametrize(
    "event, level, said",
    [
        (LOST, "info", [f"dsl: warning: {LOST_LINE}"]),
        (LOST, "error", []),
        # The verdict tells of it.
        (KILLED, "info", []),
        (SLOW, "info", [f"dsl: warning: {SLOW_LINE}"]),
        (SLOW, "error", []),
        (READY, "info", []),
        (READY, "debug", ["dsl: fork server 1 is ready"]),
    ],
)
def test_each_event_is_one_line(
    event: object, level: str, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Narrator(a_plan(2, job=replace(A_JOB, log_level=level))).hear(event)
    assert capfd.readouterr().err.splitlines() == said


def test_programs_find_it_in_their_log(caplog: pytest.LogCaptureFixture) -> None:
    narrator = Narrator(a_plan(2), to_logger)
    for event in (SLOW, LOST):
        narrator.hear(event)
    said = [(one.levelname, one.message) for one in caplog.records]
    assert said == [("WARNING", SLOW_LINE), ("WARNING", LOST_LINE)]


def test_what_a_warm_server_says_in_place_of_its_branches_is_said_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A pid of 0: it has ended before the engine could ask for its pid."""
    narrator = Narrator(a_plan(4))
    for number, pid in enumerate((77, 0, 0)):
        text = "refused: a thread runs"
        narrator.hear(Mock(spec=ForkServerLost, server=number, pid=pid, text=text, workers=[]))
        narrator.hear(Mock(spec=ForkServerSlow, server=number, pid=77, import_s=30 + number / 100))
    lines = capfd.readouterr().err.splitlines()
    assert [line.count(text) for line in lines] == [1, 0]
    assert "fork server 0 (process 77) is still importing" in lines[1]
