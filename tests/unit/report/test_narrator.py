"""What the narrator says where it cannot say all."""

from __future__ import annotations

import pytest
from tests.support.events import a_leftovers, a_plan, an_attempt, an_exit, end

from dsl.evidence import reports as evidence
from dsl.model.outcome import Outcome, Pausing
from dsl.report.narrator import Narrator


def test_that_restarts_wait_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    teller = Narrator(a_plan(1))
    for _ in range(2):
        teller.hear(Pausing())
    assert capfd.readouterr().err == (
        "dsl: the workers fail within 1 s of their start, again and again: from now on each restart waits, "
        "up to 5 s (said once)\n"
    )


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
