"""Shows a tuning to the user: a bar or lines while it runs, a table and a plot when it has ended."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from io import TextIOBase

from dsl.errors import DslError
from dsl.machine.this_process import can_move_cursor
from dsl.model.job import Notice
from dsl.printable import printable
from dsl.report.speak import write
from dsl.tune.plot import can_draw, draw
from dsl.tune.safe_folder import SUMMARIES
from dsl.tune.section import read_metric
from dsl.tune.tuning_summary import duration, summary_json, summary_table, summary_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from dsl.tune.experiment import Experiment, Resources, Result, Summary
    from dsl.tune.safe_folder import Folder
    from dsl.tune.section import Section

SHOWN_RUNNING = 2
"""Experiments that the bar names; it only counts the others."""


class Progress:
    """Shows how a tuning goes: a bar on a terminal, else a line for each experiment. It never raises."""

    def __init__(
        self,
        tell: Callable[[Notice], None],
        section: Section,
        results: Folder,
        size: Resources,
        expected: int | None = None,
        *,
        is_quiet: bool = False,
    ) -> None:
        """``tell`` takes a line for the user; ``is_quiet``: there is no bar.

        ``expected``: how many configs will be tried; None: unknown.
        """
        self._tell = tell
        self._section = section
        self._results = results
        self._size = size
        self._started_s = time.monotonic()
        self._running: list[str] = []
        self._reused: set[str] = set()
        self._expected = expected
        self._count = self._repeats = self._fresh = 0
        self._left = _Left()
        self._best: tuple[str, float] | None = None
        self._draws = can_draw()
        if not self._draws:
            self._warn("matplotlib is not installed, so there will be no plot: pip install matplotlib")
        self._bar = None if is_quiet else _make_bar(expected, self._left)
        self.go_on()

    def began(self, experiment: Experiment) -> None:
        """An experiment was started."""
        self._running.append(experiment.name)
        self._show()

    def ended(self, experiment: Experiment, result: Result, *, is_reused: bool) -> None:
        """An experiment has a result; ``is_reused``: the result is from an earlier tuning."""
        if experiment.name in self._running:
            self._running.remove(experiment.name)
        is_run = experiment.kind == "run"
        self._count += is_run and not experiment.repeat
        self._repeats += is_run and experiment.repeat > 0
        line = self._line(experiment, result)
        if is_reused:
            self._reused.add(experiment.name)
            line += ", known from before"
            line += "" if result.outcome == "ok" else ": remove its folder to run it again"
        elif self._expected is not None and not experiment.repeat:
            self._fresh += 1
            now_s = time.monotonic()
            left = self._expected - self._count
            self._left.ends_s = now_s + (now_s - self._started_s) * left / self._fresh
        if self._bar is None:
            self._tell(Notice("info", line))
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._show()

    def finish(self, summary: Summary) -> None:
        """Show what the search has found and write its files. Warn if a file cannot be written."""
        self.pause()
        elapsed_s = time.monotonic() - self._started_s
        for note in (*summary.notes, summary.ended):
            self._tell(Notice("info", note))
        table, data, plot = SUMMARIES
        makers: dict[str, Callable[[], str | bytes]] = {
            table: lambda: summary_text(summary, elapsed_s),
            data: lambda: summary_json(summary, self._section, self._size, elapsed_s, self._reused),
            **({plot: lambda: draw(summary)} if self._draws else {}),
        }
        written = []
        for name, make in makers.items():
            try:
                self._results.write(name, make())
                written.append(name)
            except DslError as error:
                self._warn(str(error))
            except Exception as error:  # noqa: BLE001  libraries raise anything; it must not end the tuning
                self._warn(f"{self._results.path}/{name} was not made: {type(error).__name__}: {error}")
        with suppress(OSError, ValueError):  # stdout has no reader, or was closed before the start
            print(summary_table(summary), flush=True)  # noqa: T201  the table is the output of the command
        if written:
            self._tell(Notice("info", f"{', '.join(written)} in {self._results.path}"))

    def pause(self) -> None:
        """Take the bar away and give the cursor back, until `go_on` or for good."""
        if self._bar is not None:
            self._bar.stop()

    def go_on(self) -> None:
        """Show the bar again."""
        if self._bar is not None:
            self._bar.start()

    def _line(self, experiment: Experiment, result: Result) -> str:
        name, section = experiment.name, self._section
        if result.outcome != "ok":
            return printable(f"{name}: {result.outcome}{f', {result.reason}' if result.reason else ''}")
        value = read_metric(section, result.metrics)
        if experiment.kind == "profile" or value is None:
            return f"{name}: done"
        best = None if self._best is None else self._best[1]
        is_best = best is None or (value < best if section.mode == "min" else value > best)
        if is_best:
            self._best = (name, value)
        return f"{name}: {section.metric} {value:g}{', the best so far' if is_best else ''}"

    def _show(self) -> None:
        if self._bar is None:
            return
        more = len(self._running) - SHOWN_RUNNING
        runs = ", ".join(self._running[:SHOWN_RUNNING]) or "nothing"
        runs += f" and {more} more" if more > 0 else ""
        best = f"{self._best[0]} {self._section.metric} {self._best[1]:g}" if self._best else "none yet"
        if self._expected is None:
            done = f"{self._count + self._repeats} done"
        else:
            done = f"{self._count} of {self._expected} done"
            done += f", {self._repeats} again" if self._repeats else ""
        text = f"best: {best}; runs: {runs}"
        self._bar.update(self._bar.task_ids[0], completed=self._count, done=done, text=text)

    def _warn(self, text: str) -> None:
        self._tell(Notice("warning", text))


def _make_bar(expected: int | None, left: _Left) -> Any:
    """A bar for the last line; None if rich is missing, or stderr is no terminal that can redraw a line."""
    if not (os.isatty(2) and can_move_cursor()):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    from rich import progress

    console = Console(file=_Stderr(), force_terminal=True)  # type: ignore[arg-type]  # it needs no more

    # The names come from the user: nothing in them is markup.
    bar = progress.Progress(
        progress.TextColumn("tuning", markup=False),
        progress.BarColumn(bar_width=20),
        progress.TextColumn("{task.fields[done]}", markup=False),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[left]}{task.fields[text]}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task("", total=expected, done="0 done", left=left, text="best: none yet; runs: nothing")
    return bar


class _Left:
    """The remaining time of a tuning, as text; it shrinks while an experiment runs."""

    ends_s = 0.0
    """Estimated `time.monotonic` at the end."""

    def __str__(self) -> str:
        left_s = self.ends_s - time.monotonic()
        return f"{duration(round(left_s)).partition('.')[0]} left; " if left_s > 0 else ""


class _Stderr(TextIOBase):
    """A file through which a library writes like us: a stopped terminal does not hold up the tuning."""

    def write(self, text: str) -> int:
        """Write a text, unless stderr is stuck."""
        write(text)
        return len(text)
