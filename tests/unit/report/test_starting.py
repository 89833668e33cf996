"""What is said of how workers come to be."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.events import a_plan

from dsl import ForkServerLost, ForkServerReady, ForkServerSlow
from dsl.functions.launcher import Logger
from dsl.report.narrator import Narrator

LOST: Any = Mock(spec=ForkServerLost, server=1, text="refused: a thread runs", workers=[])
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
    Narrator(a_plan(2, log_level=level)).hear(event)
    assert capfd.readouterr().err.splitlines() == said


def test_programs_find_it_in_their_log(caplog: pytest.LogCaptureFixture) -> None:
    narrator = Narrator(a_plan(2), Logger())
    for event in (SLOW, LOST):
        narrator.hear(event)
    said = [(one.levelname, one.message) for one in caplog.records]
    assert said == [("WARNING", SLOW_LINE), ("WARNING", LOST_LINE)]
