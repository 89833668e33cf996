"""What a launch was spent on, from its record (``--events``): spans of time, as a trace and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, TypeAlias

from dsl._record import Record
from dsl.errors import TimelineError
from dsl.report.recorder import SCHEMA
from dsl.words import printable

Line: TypeAlias = Mapping[str, Any]
Details: TypeAlias = tuple[tuple[str, object], ...]

JOB, NODE = -2, -1
"""In place of a rank: the whole job, or a whole node."""

FARTHEST_NS = 1 << 62
LONGEST_NAME = 200
MARKS = (
    "Launched",
    "Restarting",
    "RestartFailed",
    "SignalReceived",
    "Stopping",
    "Leftovers",
    "Killing",
    "Membership",
    "JobEnded",
)
OF_END = ("code", "signal", "cpu_user_s", "cpu_system_s", "max_rss_bytes")
COLORS = {
    "start of the command": "tab:gray",
    "preparation": "tab:olive",
    "meeting": "tab:olive",
    "spawn": "tab:orange",
    "until the first output": "tab:cyan",
    "run": "tab:blue",
    "stop": "tab:red",
    "restart": "tab:purple",
    "end": "tab:brown",
}
"""The phases in the picture."""

TALLEST_INCHES = 40.0
MOST_LABELS = 80


class Span(Record):
    """A phase of one rank, of a node or of the job."""

    host: str
    """Its host; empty for the job."""
    rank: int
    """Its rank, or `NODE` or `JOB`."""
    name: str
    """What the time was spent on."""
    begin_ns: int
    """When it began, by the clock of the command's host."""
    end_ns: int
    """When it ended; for a mark, as ``begin_ns``."""
    attempt: int = 0
    """Number of the attempt."""
    details: Details = ()
    """Other facts, by name."""
    is_mark: bool = False
    """It is a moment."""


def read_job(lines: Iterable[str | bytes]) -> list[Line]:
    """The lines about the last job of a record, each with its time by one clock. Other lines are skipped.

    Raises:
        TimelineError: no job was launched, or a newer dsl has recorded the last one.
    """
    found: list[Line] = []
    is_newer = False
    for text in lines:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and _is_number(line.get("schema")) and (line.get("schema") or 0) > SCHEMA:
            is_newer = is_newer or not found or line.get("event") == "Launched"
        elif isinstance(line, dict) and _is_line(line):
            if line["event"] == "Launched":
                found, is_newer = [], False
            offset_ns = line.get("clock_offset_ns")
            line["at_ns"] = line["time_ns"] - (offset_ns if _is_time(offset_ns) else 0)
            if line["event"] == "Launched" or (found and line.get("job") == found[0].get("job")):
                found.append(line)
    if is_newer:
        raise TimelineError("a newer dsl has made this record: update dsl here")
    if not found:
        raise TimelineError("no job was launched in this record: give the file of --events")
    return found


def _is_line(line: Line) -> bool:
    return (
        line.get("schema") == SCHEMA
        and isinstance(line.get("event"), str)
        and isinstance(line.get("host"), str)
        and _is_time(line.get("time_ns"))
        and all(_is_number(line.get(key)) for key in ("attempt", "node_rank", "rank"))
    )


def _is_number(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 1 << 31)


def _is_time(value: object) -> bool:
    return type(value) is int and abs(value) < FARTHEST_NS


def spans_of(lines: Sequence[Line]) -> list[Span]:
    """The phases of a job, from its lines in any order after the first."""
    end_ns = max(line["at_ns"] for line in lines)
    spans = [*_job(lines)]
    nodes: dict[tuple[str, int], list[Line]] = {}
    for line in lines[1:]:
        if line["attempt"] is not None:
            nodes.setdefault((line["host"], line["attempt"]), []).append(line)
    for (host, attempt), own in sorted(nodes.items()):
        spans += _node(host, attempt, own, end_ns)
    spans = [span for span in spans if span.end_ns > span.begin_ns]
    for line in lines:
        if line["event"] in MARKS:
            host, rank = ("", JOB) if line["node_rank"] is None else (line["host"], NODE)
            details = [(key, line[key]) for key in ("why", "signum", "reason", "code", "left") if key in line]
            place = (host, rank, line["event"], line["at_ns"], line["at_ns"], line["attempt"] or 0)
            spans.append(Span(*place, tuple(details), is_mark=True))
    return spans


def _job(lines: Sequence[Line]) -> Iterator[Span]:
    launched = lines[0]
    begun, ended = _by_attempt(lines, "AttemptStarted", min), _by_attempt(lines, "Ended", max)
    last_ns = max(line["at_ns"] for line in lines)
    began_ns: Any = launched.get("began_ns")
    if _is_time(began_ns):
        yield Span("", JOB, "start of the command", began_ns, launched["at_ns"])
    several = any(line["event"] in ("Meeting", "Membership") for line in lines)
    several |= type(launched.get("nodes")) is int and launched["nodes"] > 1
    name = "meeting" if several else "preparation"
    before_ns = launched["at_ns"]
    for attempt in sorted(begun):
        yield Span("", JOB, name, before_ns, begun[attempt], attempt)
        name, before_ns = "restart", ended.get(attempt, last_ns)
        yield Span("", JOB, "run", begun[attempt], before_ns, attempt)
    yield Span("", JOB, "end", before_ns, last_ns)


def _by_attempt(lines: Iterable[Line], event: str, choose: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for line in lines:
        if line["event"] == event and line["attempt"] is not None:
            at_ns = line["at_ns"]
            found[line["attempt"]] = choose(found.get(line["attempt"], at_ns), at_ns)
    return found


def _node(host: str, attempt: int, lines: Sequence[Line], last_ns: int) -> Iterator[Span]:
    """The phases of the ranks of a host in one attempt."""
    times: dict[str, Any] = {line["event"]: line["at_ns"] for line in lines if line.get("rank") is None}
    ranks: dict[int, dict[str, Line]] = {}
    for line in lines:
        if line.get("rank") is not None:
            ranks.setdefault(line["rank"], {})[line["event"]] = line
    starts_ns = [own["Started"]["at_ns"] for own in ranks.values() if "Started" in own]
    # The first workers may start before the agent tells that the attempt has begun.
    begin_ns = min([*starts_ns, times.get("AttemptStarted", last_ns)])
    for rank, own in sorted(ranks.items()):
        if "Started" not in own:
            continue
        started_ns: int = own["Started"]["at_ns"]
        ended_ns: int = own["Exited"]["at_ns"] if "Exited" in own else last_ns
        details: Details = (("end", "not recorded"),)
        if "Exited" in own:
            details = tuple([(key, own["Exited"].get(key)) for key in OF_END])
        yield Span(host, rank, "spawn", begin_ns, started_ns, attempt)
        stop_ns = min(max(times.get("Stopping", ended_ns), started_ns), ended_ns)
        first_ns = started_ns
        if "FirstOutput" in own:
            first_ns = min(max(own["FirstOutput"]["at_ns"], started_ns), stop_ns)
            yield Span(host, rank, "until the first output", started_ns, first_ns, attempt)
        yield Span(host, rank, "run", first_ns, stop_ns, attempt, details)
        yield Span(host, rank, "stop", stop_ns, ended_ns, attempt, details)
    if "AttemptStarted" in times:
        name = f"attempt {attempt}"
        yield Span(host, NODE, name, times["AttemptStarted"], times.get("Ended", last_ns), attempt)


def trace_of(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans in the trace event format of Chrome, which ui.perfetto.dev opens. Times are microseconds."""
    zero_ns = min(one.begin_ns for one in spans)
    tracks = _tracks(spans)
    hosts = {host: number for number, host in enumerate(dict.fromkeys(host for host, _ in tracks))}
    events: list[dict[str, Any]] = []
    for host, number in hosts.items():
        name = {"name": f"host {_text(host)}" if host else "job"}
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "ts": 0, "args": name})
    for host, rank in tracks:
        place = {"pid": hosts[host], "tid": max(rank + 1, 0)}
        events.append(
            {"ph": "M", "name": "thread_name", **place, "ts": 0, "args": {"name": _label(host, rank)}}
        )
    for one in spans:
        event = {
            "name": _text(one.name),
            "cat": "dsl",
            "pid": hosts[one.host],
            "tid": max(one.rank + 1, 0),
            "ts": (one.begin_ns - zero_ns) / 1000,
            "args": {"attempt": one.attempt, **{key: _shown(value) for key, value in one.details}},
        }
        kind = (
            {"ph": "i", "s": "p"} if one.is_mark else {"ph": "X", "dur": (one.end_ns - one.begin_ns) / 1000}
        )
        events.append({**event, **kind})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def picture_of(spans: Sequence[Span]) -> bytes:
    """The spans as a picture, PNG. Raises TimelineError: matplotlib is missing."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise TimelineError("there is no picture without matplotlib: pip install matplotlib") from None
    file = BytesIO()
    # The names come from the user: nothing in them is a formula.
    with rc_context({"text.parse_math": False}):
        make_figure(spans).savefig(file, format="png")
    return file.getvalue()


def make_figure(spans: Sequence[Span]) -> Any:
    """The picture as a figure of matplotlib: a row for the job and for each rank."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    zero_ns = min(one.begin_ns for one in spans)
    rows = [track for track in _tracks(spans) if track[1] != NODE]
    places = {track: place for place, track in enumerate(rows)}
    height = min(1.6 + 0.28 * len(rows), TALLEST_INCHES)
    figure = Figure(figsize=(11.0, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    bars: dict[str, list[list[tuple[float, float]]]] = {}
    for one in spans:
        if one.name in COLORS:
            left, right = ((at_ns - zero_ns) / 1e9 for at_ns in (one.begin_ns, one.end_ns))
            low, high = (places[one.host, one.rank] + side for side in (-0.4, 0.4))
            bars.setdefault(one.name, []).append([(left, low), (right, low), (right, high), (left, high)])
    for name, corners in bars.items():
        axes.add_collection(PolyCollection(corners, facecolors=COLORS[name]))
    for one in spans:
        if one.is_mark and one.name == "Restarting":
            axes.axvline((one.begin_ns - zero_ns) / 1e9, color="black", linestyle=":", linewidth=1)
    step = max(-(-len(rows) // MOST_LABELS), 1)
    axes.set_yticks(range(0, len(rows), step), [_label(*track, whole=True) for track in rows[::step]])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(max(one.end_ns for one in spans) - zero_ns, 1) * 1.02 / 1e9)
    axes.set_xlabel("seconds since the start of the command")
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in COLORS.items() if name in bars],
        loc="outside upper center",
        ncols=5,
        frameon=False,
    )
    return figure


def _tracks(spans: Iterable[Span]) -> list[tuple[str, int]]:
    """Host and rank of each row, the job first."""
    first: dict[str, int] = {}
    for one in spans:
        rank = one.rank if one.rank >= 0 else FARTHEST_NS
        first[one.host] = min(first.get(one.host, rank), rank) if one.host else -1
    return sorted({(one.host, one.rank) for one in spans}, key=lambda track: (first[track[0]], track))


def _label(host: str, rank: int, *, whole: bool = False) -> str:
    if rank < 0:
        return "job" if rank == JOB else "node"
    return f"rank {rank} ({_text(host)})" if whole else f"rank {rank}"


def _text(text: str) -> str:
    return printable(text)[:LONGEST_NAME]


def _shown(value: object) -> object:
    if isinstance(value, (int, float, type(None))):
        return value
    return _text(value if isinstance(value, str) else json.dumps(value))
