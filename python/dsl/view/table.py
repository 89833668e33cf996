"""The table of a running job: rows from two looks at its ranks, in order, folded and as text. Pure.

A row stands for one rank, or for several that do the same. Text in a row was made printable when it was read.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dsl._record import Record, replace
from dsl.model.observation import JobView, NodeStatus, RankStatus
from dsl.words import counted, format_ranges

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "device wait",
    "I": "idle",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "": "no process",
}
"""The kernel's letters in words."""

SIMILAR = 0.25
"""Figures are similar that differ by this share of the larger one, or by the slack of their column."""
SLACKS = {
    "cpu": 0.1,
    "rss_bytes": 64 << 20,
    "threads": 4,
    "gpu_percent": 10,
    "gpu_bytes": 256 << 20,
    "wait_percent": 10,
}
CANDIDATES = 16
"""A rank is compared with so many groups of its state at most."""


class Row(Record):
    """What one rank does, or several that do the same: then figures are means."""

    ranks: tuple[int, ...]
    """Global ranks, ascending; -1: a worker without a rank."""
    hosts: tuple[str, ...]
    """Names of their hosts."""
    states: tuple[str, ...]
    """The kernel's letters, sorted; empty text: there is no process."""
    time_s: float
    """Seconds since the attempt began there, the most of all."""
    cpu: float | None
    """CPUs that it used since the last look; None: this is the first look."""
    rss_bytes: float
    threads: float
    gpu_percent: float | None
    """None: unknown."""
    gpu_bytes: float
    wait_percent: float | None
    """Part of the time that it waited for other ranks when it was last sampled; None: it was not."""
    said: str
    """Last line of output; of several ranks, that of the first which has said something."""
    node_rank: int = 0
    """Node of its first rank."""
    local_rank: int = 0
    """Index of its first rank within that node."""
    pid: int = 0
    """Pid of its first rank."""
    log: str = ""
    """Log file of its first rank on its host, if that was asked for."""

    @property
    def state(self) -> str:
        """State in a word."""
        return "mixed" if len(self.states) > 1 else STATES.get(self.states[0], self.states[0])

    @property
    def place(self) -> str:
        """Name of the host, or the number of hosts."""
        return self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts"


def make_rows(before: Sequence[NodeStatus], now: Sequence[NodeStatus]) -> list[Row]:
    """A row for each rank. ``before``: an earlier look, since which CPU time counts; empty: there is none."""
    known = {
        (node.node_rank, node.attempt, rank.local_rank, rank.pid): (node.age_ms, rank.cpu_ms)
        for node in before
        for rank in node.ranks
    }
    return [
        _row(node, rank, known.get((node.node_rank, node.attempt, rank.local_rank, rank.pid)))
        for node in now
        for rank in node.ranks
    ]


def _row(node: NodeStatus, rank: RankStatus, before: tuple[int, int] | None) -> Row:
    cpu = None
    if rank.pid and before is not None and node.age_ms > before[0]:
        cpu = max(rank.cpu_ms - before[1], 0) / (node.age_ms - before[0])
    gpu_percent = rank.gpu_percent if rank.gpu_percent >= 0 else None
    wait_percent = rank.wait_percent if rank.wait_percent >= 0 else None
    figures = (
        node.age_ms / 1000,
        cpu,
        rank.rss_bytes,
        rank.threads,
        gpu_percent,
        rank.gpu_bytes,
        wait_percent,
    )
    place = (node.node_rank, rank.local_rank, rank.pid, rank.log)
    return Row((rank.rank,), (node.host,), (rank.state,), *figures, rank.said, *place)


def fold(rows: Iterable[Row]) -> list[Row]:
    """One row for ranks of the same state with similar figures."""
    groups: dict[str, list[list[Row]]] = {}
    for row in rows:
        of_state = groups.setdefault(row.states[0], [])
        for group in of_state[:CANDIDATES]:
            if _are_similar(group[0], row):
                group.append(row)
                break
        else:
            of_state.append([row])
    folded = [_merge(group) for of_state in groups.values() for group in of_state]
    return sorted(folded, key=_order)


def _order(row: Row) -> tuple[object, ...]:
    return row.ranks, row.node_rank, row.local_rank


def by_host(rows: Iterable[Row]) -> list[Row]:
    """One row for all ranks of a node."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.node_rank, []).append(row)
    return [_merge(group) for group in groups.values()]


def _are_similar(one: Row, other: Row) -> bool:
    for name, slack in SLACKS.items():
        a, b = getattr(one, name), getattr(other, name)
        if a is None or b is None:
            if a is not b:
                return False
        elif abs(a - b) > max(slack, SIMILAR * max(a, b)):
            return False
    return True


def _merge(rows: Sequence[Row]) -> Row:
    first = rows[0]
    if len(rows) == 1:
        return first

    def mean(name: str) -> float | None:
        values = [value for value in (getattr(row, name) for row in rows) if value is not None]
        return sum(values) / len(values) if values else None

    return replace(
        first,
        ranks=tuple(sorted([rank for row in rows for rank in row.ranks])),
        hosts=tuple(dict.fromkeys([host for row in rows for host in row.hosts])),
        states=tuple(sorted({state for row in rows for state in row.states})),
        time_s=max(row.time_s for row in rows),
        said=next((row.said for row in rows if row.said), ""),
        **{name: mean(name) for name in SLACKS},
    )


def select(rows: Iterable[Row], text: str) -> list[Row]:
    """The rows whose rank, host, state or last line contains a text, in small or capital letters."""
    text = text.strip().lower()
    return [row for row in rows if not text or any(text in one.lower() for one in _words(row))]


def _words(row: Row) -> tuple[str, ...]:
    return (f"rank {format_ranges(row.ranks)}", *row.hosts, row.state, row.said)


def size(count: float) -> str:
    """Bytes as ``512K``, ``1.5G``."""
    units = "BKMGT"
    at = 0
    while count >= 1000 and at < len(units) - 1:
        count, at = count / 1024, at + 1
    return f"{count:.1f}{units[at]}" if units[at] in "GT" and count < 100 else f"{count:.0f}{units[at]}"


def duration(seconds: float) -> str:
    """A time as ``1d 02:03:04``, ``2:03:04`` or ``3:04``."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{whole % 60:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Column(Record):
    """A column of the table."""

    name: str
    """Its title, in capitals."""
    key: str
    """The key by which the user sorts by it."""
    weight: int
    """Columns with a larger number go first from a narrow terminal."""
    value: Callable[[Row], Any]
    """What rows are sorted by; None: unknown."""
    show: Callable[[Any], str] | None = None
    """The text of a number, which stands at the right and is sorted descending; None: it is no number."""


COLUMNS = (
    Column("RANK", "r", 0, _order),
    Column("HOST", "n", 6, lambda row: row.hosts),
    Column("STATE", "s", 1, lambda row: row.state),
    Column("TIME", "t", 7, lambda row: row.time_s, duration),
    Column("CPU%", "c", 2, lambda row: row.cpu, lambda share: f"{share * 100:.0f}"),
    Column("MEM", "m", 3, lambda row: row.rss_bytes, size),
    Column("THR", "d", 8, lambda row: row.threads, lambda count: f"{count:.0f}"),
    Column("GPU%", "g", 4, lambda row: row.gpu_percent, lambda percent: f"{percent:.0f}"),
    Column("GPUMEM", "v", 5, lambda row: row.gpu_bytes or None, size),
    Column("WAIT%", "w", 4, lambda row: row.wait_percent, lambda percent: f"{percent:.0f}"),
    Column("LAST LINE", "o", 9, lambda row: row.said or None),
)
"""In the order on the screen."""

GAP = 2
LEAST_LINE = 12
"""Narrowest useful column for the last line."""
LONGEST_RANKS = 18
LONGEST_HOST = 20
NOTHING = "-"


def in_order(rows: Iterable[Row], name: str, *, is_reversed: bool = False) -> list[Row]:
    """Rows sorted by a column, and then by rank. What is unknown comes last."""
    column = next(column for column in COLUMNS if column.name == name)
    rows = sorted(rows, key=_order)
    known = [row for row in rows if column.value(row) is not None]
    descends = (column.show is None) == is_reversed
    return [
        *sorted(known, key=column.value, reverse=descends),
        *[row for row in rows if column.value(row) is None],
    ]


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, one for each of `COLUMNS`. There are no figures without a process."""
    figures = [(column.show, column.value(row)) for column in COLUMNS if column.show is not None]
    is_there = row.states != ("",)
    texts = [NOTHING if value is None or not is_there else show(value) for show, value in figures]
    return (_ranks(row), cut(row.place, LONGEST_HOST), row.state, *texts, row.said)


def _ranks(row: Row) -> str:
    if row.ranks == (-1,):
        return f"local {row.local_rank}"
    text = format_ranges(row.ranks)
    return text if len(text) <= LONGEST_RANKS else f"{len(row.ranks)} ranks"


class Layout:
    """The columns of a table and their widths, so that its lines fit into a terminal."""

    def __init__(self, texts: Sequence[Sequence[str]], width: int | None) -> None:
        """``texts``: `cells` of the rows; ``width``: columns of the terminal, None: no limit."""
        longest = [
            max([len(one.name), *[_width(row[at]) for row in texts]]) for at, one in enumerate(COLUMNS)
        ]
        longest[-1] = LEAST_LINE
        is_empty = [all(row[at] in ("", NOTHING) for row in texts) for at in range(len(COLUMNS))]
        shown = [at for at, one in enumerate(COLUMNS) if at < 3 or not is_empty[at] or one.name == "CPU%"]
        if width is not None:
            while len(shown) > 1 and sum(longest[at] + GAP for at in shown) - GAP > width:
                shown.remove(max(shown, key=lambda at: COLUMNS[at].weight))
        self.width = width
        self.columns = tuple([COLUMNS[at] for at in shown])
        """The columns that are shown."""
        self._shown, self._widths = shown, longest

    def title(self, sorted_by: str = "", *, is_reversed: bool = False) -> str:
        """The line of titles, with a mark at the column by which the rows are sorted."""
        mark = "^" if is_reversed else ""
        return self.line([one.name.lower() + mark if one.name == sorted_by else one.name for one in COLUMNS])

    def line(self, texts: Sequence[str]) -> str:
        """The line of a row."""
        parts = []
        for at in self._shown:
            text, column = texts[at], COLUMNS[at]
            if at == len(COLUMNS) - 1:
                parts.append(text)
                continue
            width = self._widths[at]
            space = " " * (width - _width(cut(text, width)))
            parts.append(space + cut(text, width) if column.show else cut(text, width) + space)
        line = (" " * GAP).join(parts).rstrip()
        return line if self.width is None else cut(line, self.width)


def _width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(map(_char_width, text))


def _char_width(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, width: int) -> str:
    """The beginning of a text that fits into a width. A tab is a space."""
    text = text.replace("\t", " ")
    if text.isascii():
        return text[:width]
    used, kept = 0, []
    for char in text:
        used += _char_width(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept)


def headline(view: JobView, nodes: Sequence[NodeStatus], now_s: float) -> str:
    """A job in a line. ``now_s``: seconds since the epoch."""
    age = duration(max(now_s - view.started_ns / 1e9, 0.0))
    restarts = max([view.restarts, *[node.restarts for node in nodes]])
    words = [f"job {view.pid}", age, f"{counted(view.workers, 'rank')} on {counted(view.nodes, 'node')}"]
    words += [] if view.is_whole else ["this node's part"]
    words += [f"restart{'s' * (restarts != 1)} {restarts}"] if restarts else []
    return f"{', '.join(words)}: {view.command} {' '.join(view.words)}"


def totals(rows: Iterable[Row]) -> str:
    """What all ranks use together, in a line."""
    rows = list(rows)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    words = [f"{count} {state}" for state, count in sorted(counts.items(), key=lambda pair: -pair[1])]
    cpus = [row.cpu for row in rows if row.cpu is not None]
    words += [f"{sum(cpus):.1f} CPUs"] if cpus else []
    words += [f"{size(sum(row.rss_bytes for row in rows))} memory"]
    busy = [row.gpu_percent for row in rows if row.gpu_percent is not None]
    words += [f"GPUs {sum(busy) / len(busy):.0f} % busy"] if busy else []
    return ", ".join(words)
