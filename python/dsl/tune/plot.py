"""The plot of a tuning: the metric against what varies in the config."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from typing import Any

from dsl.lists import counted, shorten
from dsl.tune.ds_config import MICRO_BATCH
from dsl.tune.experiment import Summary, Trial
from dsl.tune.section import is_number
from dsl.tune.tuning_summary import differences

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
    zero = trial.experiment.config.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, dict) else None
