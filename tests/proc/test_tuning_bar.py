"""The bar of a tuning, on a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.terminal import terminal

SHOW_CURSOR = "\x1b[?25h"

TUNING = """
import sys
from dsl.tune.show import Progress
from dsl.tune.experiment import Experiment, Resources, Result, Summary
from dsl.errors import AutotuningError
from dsl.machine.folders import Folder
from dsl.tune.config import Section

def say(text):
    print("SAID", text, file=sys.stderr, flush=True)

expected = int(sys.argv[2]) if sys.argv[2].isdecimal() else None
progress = Progress(lambda notice: say(notice.line), Section(), Folder(sys.argv[1], AutotuningError), Resources(1, 1, 1, None), expected, is_quiet="quiet" in sys.argv)
first, second = (Experiment(f"z0_gas1_tmbspg{n}", {}, "run", "z0") for n in (1, 2))
progress.began(first)
input()
progress.ended(first, Result("ok", {"throughput": 8.25}, "", 0, 1.0), is_reused=False)
progress.began(second)
input()
progress.ended(second, Result("crash", {}, "[red]boom[/]", 1, 1.0), is_reused=False)
progress.pause()
progress.pause()
say("the end")
"""


@pytest.mark.needs_package("rich")
def test_a_bar_shows_the_best_so_far_and_what_runs_and_goes_without_a_trace(tmp_path: Path) -> None:
    line = [sys.executable, "-c", TUNING, str(tmp_path), "?"]
    with terminal(line, {"TERM": "xterm", "COLUMNS": "120"}) as screen:
        screen.showed("0 done")
        screen.showed("best: none yet; runs: z0_gas1_tmbspg1")
        screen.press(b"\n")
        screen.showed("z0_gas1_tmbspg1: throughput 8.25, the best so far")
        screen.showed("best: z0_gas1_tmbspg1 throughput 8.25; runs: z0_gas1_tmbspg2")
        screen.press(b"\n")
        screen.showed("z0_gas1_tmbspg2: crash, [red]boom[/]")
        screen.showed(SHOW_CURSOR)
        screen.showed("SAID the end")
        screen.reported("ended 0")


@pytest.mark.needs_package("rich")
def test_a_bar_that_knows_how_many_there_are_shows_the_time_left(tmp_path: Path) -> None:
    line = [sys.executable, "-c", TUNING, str(tmp_path), "3"]
    with terminal(line, {"TERM": "xterm", "COLUMNS": "120"}) as screen:
        screen.showed("0 of 3 done")
        assert b"left" not in screen.shown()
        screen.press(b"\n")
        screen.showed("1 of 3 done")
        screen.showed("0:00:0")  # what two more take
        screen.showed(" left")
        screen.press(b"\n")
        screen.showed("2 of 3 done")
        screen.reported("ended 0")


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": "xterm", "JPY_PARENT_PID": "7"}])
def test_a_terminal_that_cannot_redraw_a_line_gets_plain_ones(
    environ: dict[str, str], tmp_path: Path
) -> None:
    line = [sys.executable, "-c", TUNING, str(tmp_path), "?"]
    with terminal(line, environ) as screen:
        screen.press(b"\n")
        screen.showed("SAID z0_gas1_tmbspg1: throughput 8.25, the best so far")
        screen.press(b"\n")
        screen.showed("SAID the end")
        screen.reported("ended 0")
        assert b"\x1b" not in screen.shown()


def test_a_quiet_tuning_has_no_bar(tmp_path: Path) -> None:
    line = [sys.executable, "-c", TUNING, str(tmp_path), "?", "quiet"]
    with terminal(line, {"TERM": "xterm", "COLUMNS": "120"}) as screen:
        screen.press(b"\n")
        screen.showed("SAID z0_gas1_tmbspg1: throughput 8.25, the best so far")
        screen.press(b"\n")
        screen.showed("SAID the end")
        screen.reported("ended 0")
