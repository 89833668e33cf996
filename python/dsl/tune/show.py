"""Shows a tuning: a bar or lines while it runs, then a table, ``summary.txt``, ``summary.json`` and a plot.

Columns of the table, their order, the last row and the last line are those of ``deepspeed.autotuning``
(0.19.8), which has the table made by tabulate (its format ``pipe``). Counts are true: a config that is reused
counts once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import BytesIO, TextIOBase
from json import dumps
from typing import Any

from dsl.errors import DslError
from dsl.machine import can_move_cursor
from dsl.machine.files import Folder
from dsl.model.job import Notice
from dsl.report.speak import write
from dsl.tune.config import AUTOTUNING, MICRO_BATCH, STAGE, ZERO, Section, is_number, read_metric, section_of
from dsl.tune.experiment import Experiment, Resources, Result, Summary, Trial
from dsl.tune.folders import SUMMARIES
from dsl.words import counted, printable, shorten

GLOBAL = "global"
"""Name of the last row of the table, which has the best of all spaces."""

HEADERS = ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")
IS_NUMBER = (False, True, True, False)
LEAST_PADDING = 2
"""A column is wider than its header by at least this many characters."""

FORMAT = 1
"""Raised with every change that would mislead a reader of an earlier ``summary.json``."""


def summary_table(summary: Summary) -> str:
    """A row for each tuning space and one for all of them, without a line end behind the last.

    A space in which nothing ran has empty cells.
    """
    best = "" if summary.best is None else summary.best.name
    rows = [(one.name, one.configs, one.value, one.best) for one in summary.spaces]
    rows.append((GLOBAL, sum(one.configs for one in summary.spaces), summary.value, best))
    cells = [(name, str(count), "" if value is None else f"{value:g}", of) for name, count, value, of in rows]
    columns = [_aligned(*column) for column in zip(HEADERS, IS_NUMBER, zip(*cells, strict=True), strict=True)]
    header, *lines = [f"| {' | '.join(line)} |" for line in zip(*columns, strict=True)]
    marks = ["-" * (len(column[0]) + 1) for column in columns]
    rule = [f"{mark}:" if right else f":{mark}" for mark, right in zip(marks, IS_NUMBER, strict=True)]
    return "\n".join([header, f"|{'|'.join(rule)}|", *lines])


def summary_text(summary: Summary, elapsed_s: float) -> str:
    """``summary.txt``: the table, a blank line, and how long it took and how many runs."""
    count = len(summary.runs)
    ended = f"Tuning completed in {duration(elapsed_s)}. Total number of experiments: {count}."
    return f"{summary_table(summary)}\n\n{ended}\n"


def duration(seconds: float) -> str:
    """``H:MM:SS.ffffff``."""
    whole = round(seconds * 1_000_000)
    minutes, rest = divmod(whole, 60_000_000)
    return f"{minutes // 60}:{minutes % 60:02}:{rest // 1_000_000:02}.{rest % 1_000_000:06}"


def summary_json(
    summary: Summary,
    section: Section,
    size: Resources,
    elapsed_s: float,
    reused: Collection[str] = (),
) -> str:
    """``summary.json``: everything that was found; docs/autotuning.md explains each key.

    ``reused``: names of experiments that an earlier tuning has run.
    """
    configs = differences([one.experiment.config for one in summary.runs])
    by_name = {one.experiment.name: config for one, config in zip(summary.runs, configs, strict=True)}
    best = summary.best
    found = {
        "format": FORMAT,
        "metric": summary.metric,
        "mode": "min" if summary.is_minimised else "max",
        "seed": section.seed,
        "ended": summary.ended,
        "elapsed_s": round(elapsed_s, 3),
        "experiments": len(summary.runs),
        "resources": {
            "nodes": size.nodes,
            "slots_per_node": size.slots_per_node,
            "side_by_side": size.lanes,
        },
        "best": best
        and {
            "name": best.name,
            "space": best.space,
            "value": _plain(summary.value),
            "config": by_name.get(best.name, {}),
        },
        "spaces": [_fields(one) for one in summary.spaces],
        "ties": [_fields(one) for one in summary.ties],
        "notes": list(summary.notes),
        "trials": [
            {
                **_fields(one.experiment),
                **_fields(one.result),
                "config": by_name.get(one.experiment.name, {}),
                "value": _plain(one.value),
                "elapsed_s": round(one.result.elapsed_s, 3),
                "is_reused": one.experiment.name in reused,
            }
            for one in summary.trials
        ],
    }
    return dumps(found, indent=2, allow_nan=False) + "\n"


def differences(configs: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The values of each config that differ between configs, by dotted key, without ``autotuning``."""
    flat = [_flat({key: value for key, value in one.items() if key != AUTOTUNING}) for one in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    absent = object()
    differing = [
        key for key in keys if any(one.get(key, absent) != flat[0].get(key, absent) for one in flat[1:])
    ]
    return [{key: one[key] for key in differing if key in one} for one in flat]


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def _fields(one: Any) -> dict[str, object]:
    return {name: _plain(getattr(one, name)) for name in one.__match_args__}


def _plain(value: object) -> object:
    """A value for JSON: null for an empty text, and for the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    is_odd = isinstance(value, float) and not abs(value) < float("inf")
    return None if value == "" or is_odd else value


def _aligned(header: str, is_number: bool, cells: Sequence[str]) -> list[str]:  # noqa: FBT001  a column of `IS_NUMBER`
    """The header and the cells of a column, all of one width; numbers have their points below one another."""
    texts = [cell.replace("|", "\\|") for cell in cells]
    if is_number:
        behind = [_behind_point(text) for text in texts]
        texts = [
            text + " " * (max(behind) - places) if text else ""
            for text, places in zip(texts, behind, strict=True)
        ]
    width = max(len(header) + LEAST_PADDING, *map(len, texts))
    return [text.rjust(width) if is_number else text.ljust(width) for text in (header, *texts)]


def _behind_point(text: str) -> int:
    """Characters behind the point, or else behind the letter of an exponent; -1: there is neither."""
    place = text.rfind(".") if "." in text else text.rfind("e")
    return -1 if place < 0 else len(text) - place - 1


FAILED_HEIGHT = 0.03
"""Height of the marks for failed runs of the first line, as a share of the plot: they have no value."""

MOST_NAMES = 24
"""Up to this many experiments, their names stand below the axis."""

LONGEST_NAME = 32
"""Characters of a name in the picture."""


def can_draw() -> bool:
    """Whether matplotlib, which draws, is installed."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # something else has its name
        return False


def draw(summary: Summary) -> bytes:
    """The plot as PNG."""
    from matplotlib import rc_context

    file = BytesIO()
    # The names come from the user: nothing in them is a formula.
    with rc_context({"text.parse_math": False}):
        make_figure(summary).savefig(file, format="png")
    return file.getvalue()


def make_figure(summary: Summary) -> Any:
    """The plot as a figure of matplotlib.

    The horizontal axis is the micro batch if ZeRO stages were tuned, or the only number that varies.
    Otherwise the experiments stand side by side, and no line joins them.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = summary.runs
    figure = Figure(figsize=(8.0, 5.0), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    across, places = _axis(summary)
    is_ordered = bool(places)
    places = places or [float(number) for number in range(1, len(runs) + 1)]
    if not is_ordered and len(runs) <= MOST_NAMES:
        names = [shorten(one.experiment.name, LONGEST_NAME) for one in runs]
        axes.set_xticks(places, names, rotation=45, ha="right")
    elif all(place.is_integer() for place in places):
        across += "" if is_ordered else " (in the order of the experiments)"
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    groups: dict[str, list[tuple[float, float | None]]] = {}
    for place, one in zip(places, runs, strict=True):
        stage = _stage(one) if across == MICRO_BATCH else None
        name = one.experiment.space if stage is None else f"ZeRO stage {stage}"
        groups.setdefault(name, []).append((place, one.value))
    sign = -1 if summary.is_minimised else 1
    for index, (name, members) in enumerate(groups.items()):
        color = f"C{index % 10}"
        ran = sorted([(at, value * sign) for at, value in members if value is not None])
        points = [(at, value * sign) for at, value in ran]
        if points:
            label = None if is_ordered else name
            axes.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.5, color=color, label=label)
        if points and is_ordered:  # a line through the best run at each place
            axes.plot(*zip(*dict(points).items(), strict=True), "-", color=color, label=name)
        if failed := sorted({at for at, value in members if value is None}):
            low, transform = [FAILED_HEIGHT * (1 + index)] * len(failed), axes.get_xaxis_transform()
            label = f"{name}, failed"
            axes.plot(failed, low, "x", color=color, label=label, transform=transform, clip_on=False)
    title = f"{summary.metric} of {counted(len(runs), 'experiment')}"
    if summary.best is not None and summary.value is not None:
        best = summary.best.name
        title += f", the best: {shorten(best, LONGEST_NAME)} with {summary.value:g}"
        at = [place for place, one in zip(places, runs, strict=True) if one.experiment.name == best]
        axes.plot(at, [summary.value] * len(at), "*", markersize=16, color="black", label="best")
    figure.suptitle(title, fontsize="large")
    axes.set_xlabel(shorten(across, 3 * LONGEST_NAME))
    hint = "less is better" if summary.is_minimised else "more is better"
    axes.set_ylabel(shorten(f"{summary.metric} ({hint})", 2 * LONGEST_NAME))
    axes.grid(visible=True, alpha=0.3)
    if groups:
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def _axis(summary: Summary) -> tuple[str, list[float]]:
    """Label of the horizontal axis, and the place of each run on it; no places: they have no order."""
    configs = differences([one.experiment.config for one in summary.runs])
    keys = list(dict.fromkeys(key for config in configs for key in config))
    by_stage = any(_stage(one) is not None for one in summary.trials)
    across = MICRO_BATCH if by_stage and MICRO_BATCH in keys else keys[0] if len(keys) == 1 else ""
    values = [config.get(across) for config in configs]
    places = [float(one) for one in values if is_number(one)]
    if places and len(places) == len(values):
        return across, places
    return ", ".join(keys) or "experiment", []


def _stage(trial: Trial) -> object:
    return section_of(trial.experiment.config, ZERO).get(STAGE)


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
