"""Charts of measured times: `make bench` draws them beside its results, `make pictures` for the documents."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from benches.measure import Bars

TITLES = {
    "launch": "Start and end of 64 workers",
    "training": "A training, from the command to its end",
    "imports": "Until the last worker has imported torch",
    "workers": "Start and end of a job, by its number of workers",
    "failure": "From the failure of a worker to the end of the command",
    "hosts": "From the command to the first line of a worker",
}
COLOURS = {"light": ("#1f2328", "#00796b", "#9aa4ae"), "dark": ("#e6edf3", "#4db6ac", "#59636e")}
"""Of text, of our bars and of other bars."""

TITLE_COLUMNS = 34
"""A longer title has two lines: the picture stays narrow."""


class Group(TypedDict):
    """Bars that stand together, under one heading."""

    machine: str
    """Where they were measured."""
    seconds: dict[str, float]
    """The time of each program."""


Table = dict[str, dict[str, Group]]
"""Groups by their heading, by the name of their chart."""


def table(measured: Iterable[Bars], machine: Mapping[str, object]) -> Table:
    """What was measured on this machine."""
    name = machine_name(machine)
    groups: Table = {}
    for bars in measured:
        groups.setdefault(bars.chart, {})[bars.group] = {"machine": name, "seconds": bars.seconds}
    return groups


def machine_name(machine: Mapping[str, object]) -> str:
    """A machine in a few words, as the pages name it."""
    kernel = str(machine["kernel"]).partition("-")[0]
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return f"{machine['cpus']} CPUs ({machine['cpu']}){gpu}, Linux {kernel}"


def draw(groups: Table, folder: Path) -> None:
    """Write `<chart>-light.svg` and `<chart>-dark.svg` into a folder, for each chart of the table."""
    for name in groups:
        for scheme in COLOURS:
            _draw_chart(TITLES[name], groups[name], scheme, folder / f"{name}-{scheme}.svg")


def _draw_chart(title: str, groups: Mapping[str, Group], scheme: str, file: Path) -> None:
    """Bars from the left, each with its time, the shortest of a group on top; several groups have headings.

    Narrow, so that the text can be read where a phone shows the picture smaller.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    text, ours, others = COLOURS[scheme]
    longest = max(seconds for group in groups.values() for seconds in group["seconds"].values())
    machines = list(dict.fromkeys(group["machine"] for group in groups.values()))
    # Text stays text, and the same numbers give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure = Figure()
        axes = figure.subplots()
        place, beside = 0.0, 0.015 * longest
        for heading, group in groups.items():
            if len(groups) > 1:
                axes.text(0, place, heading, ha="left", va="center", color=text, fontsize=11)
                place += 0.95
            for program, seconds in sorted(group["seconds"].items(), key=lambda one: one[1]):
                is_ours = program.startswith("dsl")
                axes.barh(place, seconds, height=0.75, color=ours if is_ours else others)
                axes.text(-beside, place, program, ha="right", va="center", color=text, fontsize=11)
                axes.text(seconds + beside, place, _time(seconds), ha="left", va="center", color=text,
                          fontsize=11, fontweight="bold" if is_ours else "normal")  # fmt: skip
                place += 1
            place += 0.4
        figure.set_size_inches(3.3, 0.4 + 0.31 * place)
        axes.set_xlim(0, 1.15 * longest)
        axes.set_ylim(place - 0.9, -0.6)
        axes.axis("off")
        # Beside the names of the programs, whose width nobody knows here, there is room enough for it.
        lines = textwrap.fill(title, TITLE_COLUMNS)
        axes.annotate(lines, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points",
                      color=text, fontsize=12, ha="left", fontweight="bold")  # fmt: skip
        axes.annotate("\n".join(machines), (1, 0), xytext=(0, -6), xycoords="axes fraction",
                      textcoords="offset points", color=text, fontsize=9, ha="right", va="top")  # fmt: skip
        figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
