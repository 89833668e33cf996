"""Shows a tuning to the user: its progress while it runs, tables and a plot when it has ended."""

from __future__ import annotations

import os
import time

from dsl.autotune.digest import summary_json
from dsl.autotune.files import SUMMARIES
from dsl.autotune.plot import can_draw, draw, make_picture
from dsl.autotune.section import read_metric
from dsl.autotune.table import duration, summary_table, summary_text
from dsl.errors import DslError
from dsl.printable import printable
from dsl.report.speak import write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from dsl.autotune.experiment import Experiment, Resources, Result, Summary
    from dsl.autotune.files import Folder
    from dsl.autotune.section import Section

SHOWN_RUNNING = 2
"""Experiments that the bar names; it only counts the others."""


class Board:
    """Shows how a tuning goes: a bar on a terminal, else a line for each experiment."""

    def __init__(
        self,
        say: Callable[[str], None],
        section: Section,
        results: Folder,
        size: Resources,
        expected: int | None = None,
        *,
        is_quiet: bool = False,
    ) -> None:
        """``say`` takes a line for the user; ``is_quiet``: there is no bar.

        ``expected``: how many configs will be tried; None: unknown.
        """
        self._say = say
        self._section = section
        self._results = results
        self._size = size
        self._started_s = time.monotonic()
        self._running: dict[str, str] = {}
        self._reused: set[str] = set()
        self._expected = expected
        self._count = self._repeats = self._fresh = 0
        self._left = _Left()
        self._best: tuple[str, float] | None = None
        self._draws = can_draw()
        if not self._draws:
            say("warning: matplotlib is not installed, so there will be no plot: pip install matplotlib")
        self._bar = None if is_quiet else _Bar.open(expected)

    def began(self, experiment: Experiment, place: str) -> None:
        """An experiment was started on these slots."""
        self._running[experiment.name] = place
        self._show()

    def ended(self, experiment: Experiment, result: Result, *, is_reused: bool) -> None:
        """An experiment has a result; ``is_reused``: the result is from an earlier tuning."""
        self._running.pop(experiment.name, None)
        is_run = experiment.kind == "run"
        self._count += is_run and not experiment.repeat
        self._repeats += is_run and experiment.repeat > 0
        if is_reused:
            self._reused.add(experiment.name)
        elif self._expected is not None and not experiment.repeat:
            self._fresh += 1
            self._left.estimate(self._fresh, self._expected - self._count)
        line = self._line(experiment, result)
        if is_reused:
            line += ", known from before"
            line += "" if result.outcome == "ok" else ": remove its folder to run it again"
        if self._bar is None:
            self._say(line)
        else:
            self._bar.tell(line)
        self._show()

    def finish(self, summary: Summary) -> None:
        """Show what the search has found and write its files. Warn if a file cannot be written."""
        self.close()
        elapsed_s = time.monotonic() - self._started_s
        for note in summary.notes:
            self._say(note)
        self._say(summary.ended)
        section, size, reused = self._section, self._size, self._reused
        table, digest, plot = SUMMARIES
        makers: dict[str, Callable[[], str | bytes]] = {
            table: lambda: summary_text(summary, elapsed_s),
            digest: lambda: summary_json(summary, section, size, elapsed_s, reused),
            **({plot: lambda: draw(make_picture(summary))} if self._draws else {}),
        }
        written = [name for name, make in makers.items() if self._write(name, make)]
        _print(f"{summary_table(summary)}\n")
        if written:
            self._say(f"{', '.join(written)} in {self._results.path}")

    def pause(self) -> None:
        """Take the bar away and give the cursor back, until `go_on`."""
        if self._bar is not None:
            self._bar.close()

    def go_on(self) -> None:
        """Show the bar again."""
        if self._bar is not None:
            self._bar.open_again()

    def close(self) -> None:
        """End the bar, however the tuning has ended."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, experiment: Experiment, result: Result) -> str:
        name, metric = experiment.name, self._section.metric
        if result.outcome != "ok":
            return printable(f"{name}: {result.outcome}{f', {result.reason}' if result.reason else ''}")
        value = read_metric(self._section, result.metrics)
        if experiment.kind == "profile" or value is None:
            return f"{name}: done"
        if self._best is None or self._is_better(value, self._best[1]):
            self._best = (name, value)
            return f"{name}: {metric} {value:g}, the best so far"
        return f"{name}: {metric} {value:g}"

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self._section.mode == "min" else value > other

    def _show(self) -> None:
        if self._bar is None:
            return
        names = list(self._running)
        running = ", ".join(names[:SHOWN_RUNNING])
        if len(names) > SHOWN_RUNNING:
            running += f" and {len(names) - SHOWN_RUNNING} more"
        best = "none yet"
        if self._best is not None:
            best = f"{self._best[0]} {self._section.metric} {self._best[1]:g}"
        if self._expected is None:
            done = f"{self._count + self._repeats} done"
        else:
            done = f"{self._count} of {self._expected} done"
            done += f", {self._repeats} again" if self._repeats else ""
        self._bar.show(self._count, done=done, left=self._left, best=best, runs=running or "nothing")

    def _write(self, name: str, make: Callable[[], str | bytes]) -> bool:
        """Write a file; returns whether that worked."""
        try:
            self._results.write(name, make())
        except DslError as error:
            self._say(f"warning: {error}")
        except Exception as error:  # noqa: BLE001  libraries raise anything; it must not end the tuning
            self._say(f"warning: {self._results.path}/{name} was not made: {type(error).__name__}: {error}")
        else:
            return True
        return False


class _Bar:
    """A bar on the terminal's last line."""

    @staticmethod
    def open(expected: int | None) -> _Bar | None:
        """A new bar; None if stderr is no terminal that can redraw a line, or rich is not installed."""
        if not os.isatty(2):
            return None
        try:
            from rich.console import Console
        except ImportError:
            return None
        console = Console(file=_Stderr(), force_terminal=True)  # type: ignore[arg-type]  # it needs no more
        return None if console.is_dumb_terminal else _Bar(console, expected)

    def __init__(self, console: Any, expected: int | None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        # The names come from the user: nothing in them is markup.
        columns = [
            *(TextColumn("tuning", markup=False), BarColumn(bar_width=20)),
            TextColumn("{task.fields[done]}", markup=False),
            TimeElapsedColumn(),
            TextColumn(
                "{task.fields[left]}best: {task.fields[best]}; runs: {task.fields[runs]}", markup=False
            ),
        ]
        self._progress = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._progress.add_task(
            "", total=expected, done="0 done", left="", best="none yet", runs="nothing"
        )
        self._progress.start()

    def show(self, count: int, **beside: Any) -> None:
        """Update the bar and the texts beside it."""
        self._progress.update(self._task, completed=count, **beside)

    def tell(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def open_again(self) -> None:
        """Show the bar again after `close`."""
        self._progress.start()

    def close(self) -> None:
        """Take the bar away and give the cursor back."""
        self._progress.stop()


class _Left:
    """The remaining time of a tuning, as text; it shrinks while an experiment runs."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._ends_s = 0.0

    def estimate(self, done: int, left: int) -> None:
        """Estimate it from the experiments that this command has run."""
        now_s = time.monotonic()
        self._ends_s = now_s + (now_s - self._began_s) * left / done

    def __str__(self) -> str:
        left_s = self._ends_s - time.monotonic()
        return f"{duration(round(left_s)).partition('.')[0]} left; " if left_s > 0 else ""


class _Stderr:
    """A file through which a library writes like us: a stopped terminal does not hold up the tuning."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Write a text, unless stderr is stuck."""
        write(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: no text is buffered."""

    def isatty(self) -> bool:
        """True: a bar exists only on a terminal."""
        return True


def _print(text: str) -> None:
    import sys

    if sys.stdout is None:  # it was closed before the start
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        return  # stdout has no reader
