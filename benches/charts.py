"""Charts of measured times: `make bench` draws them beside its results, `make pictures` for the documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from benches.measure import Bars

TITLES = {
    "launch": "Start and end of 64 workers",
    "workers": "Start and end of a job, by its number of workers",
    "failure": "From the failure of a worker to the end of the command",
    "imports": "Until the last worker has imported torch (dslrun: with a fork server)",
    "hosts": "From the command to the first line of a worker",
}
COLOURS = {"light": ("#1f2328", "#00796b", "#9aa4ae"), "dark": ("#e6edf3", "#4db6ac", "#59636e")}
"""Of text, of our bars and of other bars."""


def draw(measured: Iterable[Bars], machine: Mapping[str, object], folder: Path) -> None:
    """Write `<chart>-light.svg` and `<chart>-dark.svg` into a folder, for each chart that has bars."""
    charts: dict[str, dict[str, dict[str, float]]] = {}
    for bars in measured:
        charts.setdefault(bars.chart, {})[bars.group] = bars.seconds
    below = f"{machine['cpus']} CPUs ({machine['cpu']}), Linux {machine['kernel']}"
    for name, groups in charts.items():
        for scheme in COLOURS:
            _draw_chart(TITLES[name], groups, below, scheme, folder / f"{name}-{scheme}.svg")


def _draw_chart(
    title: str, groups: Mapping[str, Mapping[str, float]], below: str, scheme: str, file: Path
) -> None:
    """Bars from the left, the shortest of each group on top, each with its time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    text, ours, others = COLOURS[scheme]
    rows = [
        (group, program, seconds)
        for group, times in groups.items()
        for program, seconds in sorted(times.items(), key=lambda one: one[1])
    ]
    # Text stays text, and the same numbers give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.2, 0.9 + 0.3 * len(rows) + 0.2 * len(groups)))
        axes = figure.subplots()
        place, longest = 0.0, max(seconds for _, _, seconds in rows)
        for number, (group, program, seconds) in enumerate(rows):
            if number and rows[number - 1][0] != group:
                place += 0.6
            axes.barh(place, seconds, height=0.75, color=ours if program.startswith("dsl") else others)
            label = program if len(groups) == 1 else f"{group}: {program}"
            axes.text(-0.012 * longest, place, label, ha="right", va="center", color=text, fontsize=10)
            weight = "bold" if program.startswith("dsl") else "normal"
            axes.text(seconds + 0.012 * longest, place, _time(seconds), ha="left", va="center", color=text,
                      fontsize=10, fontweight=weight)  # fmt: skip
            place += 1
        axes.set_xlim(0, 1.12 * longest)
        axes.invert_yaxis()
        axes.axis("off")
        axes.set_title(title, color=text, fontsize=11, loc="left", fontweight="bold")
        figure.text(0.99, 0.01, below, ha="right", va="bottom", color=text, fontsize=7)
        figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
