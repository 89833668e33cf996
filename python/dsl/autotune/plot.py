"""The plot of a tuning: the metric against what varies in the config."""

from __future__ import annotations

from dsl.autotune.ds_config import MICRO_BATCH
from dsl.autotune.tuning_summary import differences
from dsl.lists import shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from dsl.autotune.experiment import Summary, Trial

INCHES = (8.0, 5.0)
DOTS_PER_INCH = 120
FAILED_HEIGHT = 0.03
"""Height of the marks for failed runs of the first line, as a share of the plot: they have no value."""

MOST_NAMES = 24
"""Up to this many experiments, their names stand below the axis."""

LONGEST_NAME = 32
"""Characters of a name in the picture."""


def can_draw() -> bool:
    """Whether matplotlib, which draws, is installed."""
    from importlib.util import find_spec

    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # something else has its name
        return False


def draw(summary: Summary) -> bytes:
    """The plot as PNG."""
    from io import BytesIO

    file = BytesIO()
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
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    across, places = _axis(summary)
    is_ordered = bool(places)
    title = f"{summary.metric} of {len(runs)} experiments"
    if not is_ordered:
        places = [float(number) for number in range(1, len(runs) + 1)]
    if not is_ordered and len(runs) <= MOST_NAMES:
        names = [shorten(one.experiment.name, LONGEST_NAME) for one in runs]
        axes.set_xticks(places, names, rotation=45, ha="right", parse_math=False)
    elif all(place.is_integer() for place in places):
        across += "" if is_ordered else " (in the order of the experiments)"
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    groups: dict[str, list[tuple[float, float | None]]] = {}
    for place, one in zip(places, runs, strict=True):
        stage = _stage(one) if across == MICRO_BATCH else None
        name = one.experiment.space if stage is None else f"ZeRO stage {stage}"
        groups.setdefault(name, []).append((place, one.value))
    better = (min if summary.is_minimised else max) if is_ordered else None
    for index, (name, members) in enumerate(groups.items()):
        _draw_line(axes, name, members, index, better)
    if summary.best is not None and summary.value is not None:
        name = summary.best.name
        title += f", the best: {shorten(name, LONGEST_NAME)} with {summary.value:g}"
        for place in [place for place, one in zip(places, runs, strict=True) if one.experiment.name == name]:
            axes.plot(place, summary.value, "*", markersize=16, color="black", label="best")
    # The names come from the user: nothing in them is a formula.
    hint = "less is better" if summary.is_minimised else "more is better"
    figure.suptitle(title, fontsize="large", parse_math=False)
    axes.set_xlabel(shorten(across, 3 * LONGEST_NAME), parse_math=False)
    axes.set_ylabel(shorten(f"{summary.metric} ({hint})", 2 * LONGEST_NAME), parse_math=False)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        for text in figure.legend(loc="outside right upper", frameon=False).get_texts():
            text.set_parse_math(False)
    return figure


def _axis(summary: Summary) -> tuple[str, list[float]]:
    """Label of the horizontal axis, and the place of each run on it; no places: they have no order."""
    configs = differences([one.experiment.config for one in summary.runs])
    keys = list(dict.fromkeys(key for config in configs for key in config))
    by_stage = any(_stage(one) is not None for one in summary.trials)
    across = MICRO_BATCH if by_stage and MICRO_BATCH in keys else keys[0] if len(keys) == 1 else ""
    places = _numbers(configs, across)
    return (across, places) if places else (", ".join(keys) or "experiment", [])


def _draw_line(
    axes: Any, name: str, members: Sequence[tuple[float, float | None]], index: int, better: Any
) -> None:
    """Draw every run that has a value, a line through the ``better`` ones, and crosses for failed runs."""
    color = f"C{index % 10}"
    points = sorted((place, value) for place, value in members if value is not None)
    if points:
        label = None if better else name
        axes.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.5, color=color, label=label)
    if points and better:
        tops = {place: better(value for at, value in points if at == place) for place, _ in points}
        axes.plot(list(tops), list(tops.values()), "-", color=color, label=name)
    failed = sorted({place for place, value in members if value is None})
    if failed:
        low = [FAILED_HEIGHT * (1 + index)] * len(failed)
        transform = axes.get_xaxis_transform()
        axes.plot(failed, low, "x", color=color, label=f"{name}, failed", transform=transform, clip_on=False)


def _numbers(configs: Sequence[Mapping[str, object]], key: str) -> list[float]:
    """The value of a key in each config; empty unless all values are numbers."""
    values = [config.get(key) for config in configs]
    numbers = [float(one) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    return numbers if len(numbers) == len(configs) else []


def _stage(trial: Trial) -> object:
    zero = trial.experiment.config.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, dict) else None
