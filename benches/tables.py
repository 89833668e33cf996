"""The tables of docs/benchmarks.md (five rows) and docs/benchmarks-all.md; `make pictures` writes them.

What they show is kept in docs/pictures/rows.json: a row that was measured again replaces the older one of
the same kind of machine.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from benches.charts import machine_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

DOCS = Path(__file__).resolve().parent.parent / "docs"
KEPT = DOCS / "pictures" / "rows.json"
BEGIN, END = "<!-- {}: made by scripts/pictures.py -->", "<!-- end of what is made -->"
SECTIONS = {
    "hosts": "Several hosts",
    "forkserver": "Fork servers and tuning",
    "autotuning": "Fork servers and tuning",
}
"""Of benches, by what their names begin with; the others are about one host."""

ONE_HOST = "One host"
UNKNOWN = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


class Measured(TypedDict):
    """A row of the benches, and where it was measured."""

    section: str
    machine: str
    name: str
    value: float
    unit: str
    bar: float | None
    """None: not one of the benches, so there is no bar."""
    at_most: bool
    detail: str
    seconds: dict[str, float]
    """The time of each program, if a chart shows it."""


def measured(bench: str, row: Mapping[str, Any], machine: Mapping[str, object]) -> Measured:
    """A row of `bench-results/bench.json`."""
    bars = row["bars"]
    return {
        "section": SECTIONS.get(bench.partition("-")[0], ONE_HOST),
        "machine": machine_name(machine),
        "name": row["name"],
        "value": row["value"],
        "unit": row["unit"],
        "bar": row["bar"],
        "at_most": row["at_most"],
        "detail": row["detail"],
        "seconds": dict(bars[2]) if bars else {},
    }


def merged(kept: list[Measured], new: Iterable[Measured]) -> list[Measured]:
    """All rows, in their order; a new one takes the place of the same row of a machine with as many CPUs."""
    rows = list(kept)
    for row in new:
        key = _key(row)
        place = next((index for index, one in enumerate(rows) if _key(one) == key), None)
        if place is None:
            rows.append(row)
        else:
            rows[place] = row
    return rows


def _key(row: Measured) -> tuple[str, str, str]:
    return row["section"], _cpus(row["machine"]), row["name"]


def _cpus(machine: str) -> str:
    found = re.search(r"(\d+) CPUs", machine)
    return found[0] if found else machine


def load() -> list[Measured]:
    """What the pages show."""
    rows: list[Measured] = json.loads(KEPT.read_text(encoding="utf-8"))
    return rows


def save(rows: list[Measured]) -> None:
    """Keep what the pages shall show."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    KEPT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def passed(row: Measured) -> bool:
    """The value keeps to its bar, or has none."""
    if row["bar"] is None:
        return True
    return row["value"] <= row["bar"] if row["at_most"] else row["value"] >= row["bar"]


def all_rows(rows: list[Measured]) -> str:
    """A table for each part and each machine."""
    parts: dict[tuple[str, str], list[Measured]] = {}
    order = list(dict.fromkeys(row["section"] for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row["section"])):
        parts.setdefault((row["section"], row["machine"]), []).append(row)
    text, last = [], ""
    for (section, machine), part in parts.items():
        text += [] if section == last else [f"## {section}", ""]
        text += [
            f"{machine}:",
            "",
            "| measure | result | bar |",
            "| --- | --- | --- |",
        ]
        text += [f"| {row['name']} | {_amount(row['value'], row['unit'])} | {_judged(row)} |" for row in part]
        text.append("")
        last = section
    return "\n".join(text)


def _judged(row: Measured) -> str:
    """The bar; without one, or if it is missed, the figures behind the value, without their ranges."""
    figures = re.sub(r" \([\d.]+-[\d.]+\)", "", row["detail"])
    if row["bar"] is None:
        return f"none: {figures}"
    bar = f"{'≤' if row['at_most'] else '≥'} {_amount(row['bar'], row['unit'])}"
    return bar if passed(row) else f"{bar}, **missed**: {figures}"


def _amount(value: float, unit: str) -> str:
    number = f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{number}{TIMES}" if unit == "x" else f"{number} {unit}".rstrip()


def five_rows(rows: list[Measured]) -> str:
    """What a user notices, with two columns for each kind of machine."""
    shown = [row for row in rows if any(name.fullmatch(row["name"]) for _, name, _ in FIVE)]
    machines: dict[str, list[str]] = {}
    for row in shown:
        names = machines.setdefault(_cpus(row["machine"]), [])
        names += [row["machine"]] * (row["machine"] not in names)
    head = [f"dslrun, {machine} | torchrun |" for machine in machines]
    text = [" ".join(["| what |", *head]), "| --- |" + " --- | --- |" * len(machines)]
    for label, name, answer in FIVE:
        cells = [label]
        for machine in machines:
            found = [row for row in shown if _cpus(row["machine"]) == machine and name.fullmatch(row["name"])]
            cells += answer(found[0]) if found else (UNKNOWN, UNKNOWN)
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*text, "", f"Machines: {'; '.join(name for names in machines.values() for name in names)}."]
    )


def _times(row: Measured) -> tuple[str, str]:
    seconds = row["seconds"]
    ours = next((seconds[name] for name in ("dslrun warm, 2nd start", "dslrun") if name in seconds), None)
    return (UNKNOWN if ours is None else _time(ours)), _time(seconds["torchrun"])


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"


def _rates(row: Measured) -> tuple[str, str]:
    ours, _, theirs = row["detail"].partition(" against ")
    return ours, theirs


FIVE: list[tuple[str, re.Pattern[str], Callable[[Measured], tuple[str, str]]]] = [
    (
        "one worker, from the start to the end of the command",
        re.compile("1 x true, torchrun / dslrun"),
        _times,
    ),
    (
        "512 workers, from the start to the end of the command",
        re.compile("512 x true, torchrun / dslrun"),
        _times,
    ),
    (
        "one of 64 workers fails: until all have ended",
        re.compile("one of 64 fails to end, torchrun / dslrun"),
        _times,
    ),
    ("64 workers write at full speed, to files and the console", re.compile("64 writers, tee, .*"), _rates),
    (
        "a small training with DDP, second start with `--start-method warm`",
        re.compile("second launch of .*DDP.*"),
        _times,
    ),
]
"""What is shown, the row that has it, and the two cells."""


def written(page: str, name: str, made: str) -> str:
    """A page with what is made in its place."""
    begin = BEGIN.format(name)
    before, mark, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not mark or not end:
        message = f"the page has no lines {begin} and {END}"
        raise ValueError(message)
    return f"{before}{begin}\n\n{made.strip()}\n\n{end}{after}"


PAGES: dict[str, tuple[str, Callable[[list[Measured]], str]]] = {
    "benchmarks.md": ("five rows", five_rows),
    "benchmarks-all.md": ("all rows", all_rows),
}


def write_pages() -> None:
    """Write the tables into the pages."""
    for page, (name, make) in PAGES.items():
        path = DOCS / page
        path.write_text(written(path.read_text(encoding="utf-8"), name, make(load())), encoding="utf-8")


def stale() -> list[str]:
    """Pages whose tables are not those of docs/pictures/rows.json."""
    texts = {page: (DOCS / page).read_text(encoding="utf-8") for page in PAGES}
    return [
        page
        for page, (name, make) in PAGES.items()
        if written(texts[page], name, make(load())) != texts[page]
    ]
