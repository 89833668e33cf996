"""What people see of a tuning: its progress while it runs, tables and a plot when it has ended."""

from __future__ import annotations

import os
import time

from dsl.autotune.digest import summary_json
from dsl.autotune.plot import draw, make_picture
from dsl.autotune.section import read_metric
from dsl.autotune.table import summary_table, summary_text
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

TABLE = "summary.txt"
DIGEST = "summary.json"
PLOT = "summary.png"

SHOWN_RUNNING = 2
"""Experiments that the bar names; the others it counts."""


class Board:
    """Shows how a tuning goes: a bar on a terminal, else a line for each experiment."""

    def __init__(
        self,
        say: Callable[[str], None],
        section: Section,
        results: Folder,
        size: Resources,
        *,
        is_quiet: bool = False,
    ) -> None:
        """``say`` takes a line for the user; ``is_quiet``: there is no bar."""
        self._say = say
        self._section = section
        self._results = results
        self._size = size
        self._started_s = time.monotonic()
        self._running: dict[str, str] = {}
        self._reused: set[str] = set()
        self._count = 0
        self._best: tuple[str, float] | None = None
        self._bar = None if is_quiet else _Bar.open()

    def began(self, experiment: Experiment, place: str) -> None:
        """An experiment was started on these slots."""
        self._running[experiment.name] = place
        self._show()

    def ended(self, experiment: Experiment, result: Result, *, is_reused: bool) -> None:
        """It is known how an experiment went; ``is_reused``: from an earlier tuning."""
        self._running.pop(experiment.name, None)
        self._count += experiment.kind == "run"
        if is_reused:
            self._reused.add(experiment.name)
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
        """The search has ended, and this is what it has found. What cannot be written is said."""
        self.close()
        elapsed_s = time.monotonic() - self._started_s
        for note in summary.notes:
            self._say(note)
        self._say(summary.ended)
        section, size, reused = self._section, self._size, self._reused
        makers: dict[str, Callable[[], str | bytes]] = {
            TABLE: lambda: summary_text(summary, elapsed_s),
            DIGEST: lambda: summary_json(summary, section, size, elapsed_s, reused),
            PLOT: lambda: draw(make_picture(summary)),
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
        self._bar.show(f"{self._count} done", best, running or "nothing")

    def _write(self, name: str, make: Callable[[], str | bytes]) -> bool:
        """Whether the file is there, whole."""
        try:
            self._results.write(name, make())
        except DslError as error:
            self._say(f"warning: {error}")
        except Exception as error:  # noqa: BLE001  a picture is not worth the tuning; libraries raise what they like
            self._say(f"warning: {self._results.path}/{name} was not made: {type(error).__name__}: {error}")
        else:
            return True
        return False


class _Bar:
    """A bar on the terminal's last line. Nobody knows beforehand how many experiments it will take."""

    @staticmethod
    def open() -> _Bar | None:
        """None where stderr is no terminal that can redraw a line, or rich is not installed."""
        if not os.isatty(2):
            return None
        try:
            from rich.console import Console
        except ImportError:
            return None
        console = Console(file=_Stderr(), force_terminal=True)  # type: ignore[arg-type]  # it needs no more
        return None if console.is_dumb_terminal else _Bar(console)

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        # Names are the user's: nothing in them is markup.
        columns = [
            *(TextColumn("tuning", markup=False), BarColumn(bar_width=20)),
            TextColumn("{task.fields[done]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("best: {task.fields[best]}; runs: {task.fields[runs]}", markup=False),
        ]
        self._progress = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._progress.add_task("", total=None, done="0 done", best="none yet", runs="nothing")
        self._progress.start()

    def show(self, done: str, best: str, runs: str) -> None:
        """What stands beside the bar."""
        self._progress.update(self._task, done=done, best=best, runs=runs)

    def tell(self, line: str) -> None:
        """A line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def open_again(self) -> None:
        """After `close`."""
        self._progress.start()

    def close(self) -> None:
        """Take the bar away and give the cursor back."""
        self._progress.stop()


class _Stderr:
    """What a library writes as our own lines go: a stopped terminal holds nobody up."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Write it, unless nobody takes it."""
        write(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        """It is one, or there is no bar."""
        return True


def _print(text: str) -> None:
    import sys

    if sys.stdout is None:  # it was closed before the start
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        return  # nobody reads it
