"""The plot of a tuning: the metric against what varies in the config."""

from __future__ import annotations

from dsl._record import record
from dsl.autotune.config import MICRO_BATCH
from dsl.autotune.digest import differences
from dsl.lists import shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
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


@record
class Line:
    """What one line of the picture shows."""

    name: str
    """Its name in the legend."""
    points: tuple[tuple[float, float], ...]
    """Every run that has a value: place and value, in the order of the places."""
    tops: tuple[tuple[float, float], ...]
    """The best value at each place, which the line joins; empty: the places have no order."""
    failed: tuple[float, ...]
    """Places of the runs without a value."""


@record
class Picture:
    """What to draw, with all decisions made."""

    title: str
    """Text above the plot."""
    across: str
    """Label of the horizontal axis: the keys of the config that vary."""
    up: str
    """Label of the vertical axis."""
    lines: tuple[Line, ...]
    """In the order in which they were tried."""
    best: tuple[float, float] | None
    """Place and value of the best config."""
    names: tuple[str, ...] = ()
    """Names of the experiments at the places 1, 2 and so on; empty: the axis shows numbers."""


def make_picture(summary: Summary) -> Picture:
    """Decide what to draw.

    The horizontal axis is the micro batch if ZeRO stages were tuned, or the only number that varies.
    Otherwise the experiments stand side by side.
    """
    runs = summary.runs
    configs = differences([one.experiment.config for one in runs])
    keys = list(dict.fromkeys(key for config in configs for key in config))
    by_stage = any(_stage(one) is not None for one in summary.trials)
    across = MICRO_BATCH if by_stage and MICRO_BATCH in keys else keys[0] if len(keys) == 1 else ""
    places = _numbers(configs, across)
    names: tuple[str, ...] = ()
    is_ordered = bool(places)
    if not is_ordered:
        places = [float(number) for number in range(1, len(runs) + 1)]
        across = ", ".join(keys) or "experiment"
        names = tuple([shorten(one.experiment.name, LONGEST_NAME) for one in runs])
        if len(names) > MOST_NAMES:
            names, across = (), f"{across} (in the order of the experiments)"
    groups: dict[str, list[tuple[float, Trial]]] = {}
    for place, one in zip(places, runs, strict=True):
        name = f"ZeRO stage {_stage(one)}" if across == MICRO_BATCH and by_stage else one.experiment.space
        groups.setdefault(name, []).append((place, one))
    better = min if summary.is_minimised else max
    lines = [_line(name, group, better, is_ordered=is_ordered) for name, group in groups.items()]
    title, best = f"{summary.metric} of {len(runs)} experiments", None
    if summary.best is not None and summary.value is not None:
        name = summary.best.name
        title += f", the best: {shorten(name, LONGEST_NAME)} with {summary.value:g}"
        at = [place for place, one in zip(places, runs, strict=True) if one.experiment.name == name]
        best = (at[0], summary.value) if at else None
    hint = "less is better" if summary.is_minimised else "more is better"
    return Picture(title, across, f"{summary.metric} ({hint})", tuple(lines), best, names)


def can_draw() -> bool:
    """Whether matplotlib, which draws, is installed."""
    from importlib.util import find_spec

    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # something else has its name
        return False


def draw(picture: Picture) -> bytes:
    """The picture as PNG."""
    from io import BytesIO

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, line in enumerate(picture.lines):
        _draw_line(axes, line, f"C{index % 10}", FAILED_HEIGHT * (1 + index))
    if picture.best is not None:
        axes.plot(*picture.best, marker="*", markersize=16, color="black", linestyle="", label="best")
    # The names come from the user: nothing in them is a formula.
    figure.suptitle(picture.title, fontsize="large", parse_math=False)
    axes.set_xlabel(shorten(picture.across, 3 * LONGEST_NAME), parse_math=False)
    axes.set_ylabel(shorten(picture.up, 2 * LONGEST_NAME), parse_math=False)
    if picture.names:
        axes.set_xticks(
            range(1, len(picture.names) + 1), picture.names, rotation=45, ha="right", parse_math=False
        )
    elif all(place.is_integer() for line in picture.lines for place, _ in line.points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        for text in figure.legend(loc="outside right upper", frameon=False).get_texts():
            text.set_parse_math(False)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_line(axes: Any, line: Line, color: str, height: float) -> None:
    if line.points:
        label = None if line.tops else line.name
        axes.plot(*zip(*line.points, strict=True), "o", markersize=4, alpha=0.5, color=color, label=label)
    if line.tops:
        axes.plot(*zip(*line.tops, strict=True), "-", color=color, label=line.name)
    if line.failed:
        low = [height] * len(line.failed)
        label = f"{line.name}, failed"
        transform = axes.get_xaxis_transform()
        axes.plot(line.failed, low, "x", color=color, label=label, transform=transform, clip_on=False)


def _line(
    name: str, members: Sequence[tuple[float, Trial]], better: Callable[..., float], *, is_ordered: bool
) -> Line:
    points = sorted((place, one.value) for place, one in members if one.value is not None)
    tops = [
        (place, better(value for at, value in points if at == place))
        for place in dict.fromkeys(place for place, _ in points)
        if is_ordered
    ]
    failed = sorted({place for place, one in members if one.value is None})
    return Line(name, tuple(points), tuple(tops), tuple(failed))


def _numbers(configs: Sequence[Mapping[str, object]], key: str) -> list[float]:
    """The value of a key in each config; empty unless all values are numbers."""
    values = [config.get(key) for config in configs]
    numbers = [float(one) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    return numbers if len(numbers) == len(configs) else []


def _stage(trial: Trial) -> object:
    zero = trial.experiment.config.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, dict) else None
