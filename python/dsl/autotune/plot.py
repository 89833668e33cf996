"""The picture of a tuning: the metric over the micro batch, a line for each ZeRO stage."""

from __future__ import annotations

from dsl._record import record
from dsl.errors import DslError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from dsl.autotune.experiment import Experiment, Summary, Trial

MICRO_BATCH = "train_micro_batch_size_per_gpu"
INCHES = (8.0, 5.0)
DOTS_PER_INCH = 120
FAILED_HEIGHT = 0.03
"""Where those of the first line that failed are marked, as a share of the height: they have no value."""


@record
class Line:
    """What one line of the picture shows."""

    name: str
    """What the legend calls it."""
    points: tuple[tuple[float, float], ...]
    """Every run that has a value: place and value, in the order of the places."""
    tops: tuple[tuple[float, float], ...]
    """The best value at each place, which the line joins."""
    failed: tuple[float, ...]
    """Places of the runs that have none."""


@record
class Picture:
    """What is to be drawn, with no decision left."""

    across: str
    """Label of the horizontal axis."""
    up: str
    """Label of the vertical axis."""
    lines: tuple[Line, ...]
    """In the order in which they were tried."""
    best: tuple[float, float] | None
    """Place and value of the best config."""


def make_picture(summary: Summary) -> Picture:
    """Decide what is drawn: over the micro batch if each run has one and they differ, else over the order."""
    runs = [one for one in summary.trials if one.experiment.kind == "run"]
    sizes = [_micro_batch(one.experiment) for one in runs]
    has_sizes = None not in sizes and len({*sizes}) > 1 and _tunes_stages(summary)
    places = [float(size) for size in sizes if size is not None] if has_sizes else []
    places = places or [float(number) for number in range(1, len(runs) + 1)]
    names = list(dict.fromkeys(_name(one, by_stage=has_sizes) for one in runs))
    lines = []
    for name in names:
        members = [
            (place, one)
            for place, one in zip(places, runs, strict=True)
            if _name(one, by_stage=has_sizes) == name
        ]
        lines.append(_line(name, members, min if summary.is_minimised else max))
    best = None
    if summary.best is not None and summary.value is not None:
        found = [
            place for place, one in zip(places, runs, strict=True) if one.experiment.name == summary.best.name
        ]
        best = (found[0], summary.value) if found else None
    across = "micro batch of a worker" if has_sizes else "experiment"
    better = "less is better" if summary.is_minimised else "more is better"
    return Picture(across, f"{summary.metric} ({better})", tuple(lines), best)


def draw(picture: Picture) -> bytes:
    """The picture as PNG.

    Raises:
        DslError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise DslError("no plot: matplotlib is not installed (pip install matplotlib)") from None
    from io import BytesIO

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, line in enumerate(picture.lines):
        _draw_line(axes, line, f"C{index % 10}", FAILED_HEIGHT * (1 + index))
    if picture.best is not None:
        axes.plot(*picture.best, marker="*", markersize=16, color="black", linestyle="", label="best")
    axes.set_xlabel(picture.across)
    axes.set_ylabel(picture.up)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", frameon=False)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_line(axes: Any, line: Line, color: str, height: float) -> None:
    if line.points:
        axes.plot(*zip(*line.points, strict=True), "o", markersize=4, alpha=0.5, color=color)
        axes.plot(*zip(*line.tops, strict=True), "-", color=color, label=line.name)
    if line.failed:
        low = [height] * len(line.failed)
        label = f"{line.name}, failed"
        axes.plot(
            line.failed,
            low,
            "x",
            color=color,
            label=label,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )


def _line(name: str, members: Sequence[tuple[float, Trial]], better: Callable[..., float]) -> Line:
    points = sorted((place, one.value) for place, one in members if one.value is not None)
    tops = [
        (place, better(value for at, value in points if at == place))
        for place in dict.fromkeys(place for place, _ in points)
    ]
    failed = sorted({place for place, one in members if one.value is None})
    return Line(name, tuple(points), tuple(tops), tuple(failed))


def _micro_batch(experiment: Experiment) -> int | None:
    size = experiment.config.get(MICRO_BATCH)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _tunes_stages(summary: Summary) -> bool:
    return any(_stage(one.experiment) is not None for one in summary.trials)


def _stage(experiment: Experiment) -> object:
    zero = experiment.config.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, dict) else None


def _name(trial: Trial, *, by_stage: bool) -> str:
    stage = _stage(trial.experiment)
    return f"ZeRO stage {stage}" if by_stage and stage is not None else trial.experiment.space
