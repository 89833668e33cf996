"""Says how the ranks of a job spend their time, and which of them hold the others up. Pure.

Ranks that work together wait for the slowest one, which itself waits least. So the slow ranks are those that
wait clearly less than all others, and what they do meanwhile, more than the others do, is the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from dsl._record import Record
from dsl.model.observation import NodeStacks, RankStacks, StackSample, ThreadStack
from dsl.view.explain import Doing, is_collective, short, thread_doing, user_frame
from dsl.words import numbered, printable

Kind: TypeAlias = Literal["collective", "backward", "sync", "device", "data", "python"]
"""``backward``: it computes gradients or reduces them; ``sync``: it waits for what it has given its GPU."""
Spot: TypeAlias = tuple[str, str]
"""What is done, and the file and line: ``in __getitem__``, ``data.py:40``."""
Shares: TypeAlias = Mapping[Spot, float]

GAP = 0.2
"""A slow rank, or the ranks of slow hosts, wait less than each other rank by this part of the time."""
GAP_OF_SEVERAL = 0.3
"""The same for several ranks that share hosts with others: more often than one, they are so by chance."""
NOISE = 2.0
"""Few samples tell little: with so many, the gap is at least this by their square root."""
LEAST_WAIT = 0.2
"""Nobody is held up who waits less than this part of the time."""
DELAYED = 0.15
"""A lack of CPUs is a reason from this part of the time on, beyond what the others lack."""
MOSTLY = 0.7
"""A line stands for itself if it has so much of its function's time."""
MOST_PROBLEMS = 4
TITLES = ("RANK", "HOST", "COLLECTIVE", "DEVICE", "DATA", "PYTHON", "NO CPU", "MOSTLY")

_TORCH, _DATA = "/torch/", "/torch/utils/data/"
_READS = ("__getitem__", "__next__", "collate_fn")
"""Functions by which programs make data."""


class Spent(Record):
    """How a rank spent its time. All figures are parts of it."""

    rank: int
    host: str
    samples: int
    """How often it was seen."""
    kinds: Mapping[Kind, float]
    """By what it did. ``backward`` and ``sync`` are shared out among the others."""
    working: Shares
    """Where it did not wait for other ranks."""
    waiting: Shares
    """Where it waited for them, or may have: a wait for a GPU may be one for other ranks."""
    loading: Shares
    """Where the workers of its data loader were, of their time."""
    delayed: float
    """It wanted a CPU, and had none."""

    @property
    def waits(self) -> float:
        """How much it waited for other ranks."""
        return sum(self.waiting.values())


class Verdict(Record):
    """Which ranks hold up which other ones."""

    slow: tuple[Spent, ...]
    others: tuple[Spent, ...]


def spent_by(host: str, rank: RankStacks) -> Spent | None:
    """How a rank spent its time; None: it was not sampled."""
    found = rank.sampled
    mine = [one for one in found.samples if not one.is_child] if found else []
    total = sum([one.count for one in mine])
    if found is None or not total:
        return None
    kinds: defaultdict[Kind, float] = defaultdict(float)
    working: defaultdict[Spot, float] = defaultdict(float)
    waiting: defaultdict[Spot, float] = defaultdict(float)
    before: defaultdict[Kind, float] = defaultdict(float)
    for one in mine:
        before[kind_of(one)] += one.count
    # Gradients are reduced in C++. While the main thread sleeps there, it waits for the other ranks.
    slept = max(found.sleeps * total - before["collective"], 0.0)
    in_backward = min(slept / before["backward"], 1.0) if before["backward"] else 0.0
    for one in mine:
        kind, spot, share = kind_of(one), _spot(one), one.count / total
        waits = {"collective": 1.0, "backward": 1.0 if found.has_gpu else in_backward, "sync": 1.0}.get(
            kind, 0.0
        )
        if kind == "sync":
            kind, waits = ("device", 1.0) if found.has_gpu else ("python", 0.0)
        if kind == "backward":
            kinds["collective"] += 0.0 if found.has_gpu else share * waits
            kinds["device"] += share if found.has_gpu else share * (1 - waits)
        else:
            kinds[kind] += share
        waiting[spot] += share * waits
        working[spot] += share * (1 - waits)
    return Spent(rank.rank, host, total, kinds, working, waiting, _loading(found.samples), found.delayed)


def _loading(samples: Iterable[StackSample]) -> Shares:
    loaders = [
        one for one in samples if one.is_child and any(_DATA + "_utils/worker" in f.file for f in one.frames)
    ]
    total = sum([one.count for one in loaders])
    found: defaultdict[Spot, float] = defaultdict(float)
    for one in loaders:
        if user_frame(one.frames):
            found[_spot(one)] += one.count / total
    return found


def kind_of(sample: StackSample) -> Kind:
    """What a main thread does in a stack."""
    doing = thread_doing(ThreadStack("", sample.frames), _NOBODY)
    inner = sample.frames[0] if sample.frames else None
    if is_collective(doing) or sample.call == "wait":
        return "collective"
    if any(
        _DATA in frame.file or short(frame.function).rpartition(".")[2] in _READS for frame in sample.frames
    ):
        return "data"
    called = _called(doing)
    if sample.call or called == "synchronize":
        return "sync"
    if called == "backward":
        return "backward"
    return "device" if inner is not None and _TORCH in inner.file else "python"


def _called(doing: Doing) -> str:
    """The library function, without its class."""
    return doing.rest.removeprefix("in ").removesuffix("()").rpartition(".")[2]


_SHOWN: tuple[Kind, ...] = ("collective", "device", "data", "python")
_NOBODY = RankStacks(0, 0, 1)


def _spot(sample: StackSample) -> Spot:
    doing = thread_doing(ThreadStack("", sample.frames), _NOBODY)
    frame = user_frame(sample.frames) or (sample.frames[0] if sample.frames else None)
    if frame is None:
        return "in many places", ""
    place = f"{frame.file.rpartition('/')[2]}:{frame.line}"
    if doing.verb == "wait" or _called(doing) == "backward":
        return doing.rest.removesuffix("()"), place
    return f"in {sample.call or short(frame.function)}", place


def judge(ranks: Iterable[Spent]) -> Verdict | None:
    """Which ranks hold the others up; None: no rank clearly does."""
    found = sorted(ranks, key=lambda one: one.waits)
    samples = min([one.samples for one in found], default=1)
    count = count_slow([one.waits for one in found], [one.host for one in found], samples)
    return Verdict(tuple(found[:count]), tuple(found[count:])) if count else None


def count_slow(waits: Sequence[float], hosts: Sequence[str], samples: int) -> int:
    """How many ranks are slow, half of them at most.

    ``waits``: how much each of them waits, ascending; ``hosts``: where each of them runs;
    ``samples``: by how many this is known.
    """
    sizes = range(1, len(waits) // 2 + 1)
    count = max(sizes, key=lambda size: waits[size] - waits[size - 1], default=0)
    if not count or waits[count] < LEAST_WAIT:
        return 0
    share_hosts = set(hosts[:count]) & set(hosts[count:])
    least = GAP_OF_SEVERAL if count > 1 and share_hosts else GAP
    return count if waits[count] - waits[count - 1] >= max(least, NOISE / samples**0.5) else 0


def explain_samples(nodes: Sequence[NodeStacks], missing: Sequence[str] = ()) -> list[str]:
    """The verdict, and lines about ranks that were not sampled. ``missing``: hosts that have not answered."""
    ranks = [(node.host, one) for node in nodes for one in node.ranks]
    spent = all_spent(nodes)
    lines = [_headline(spent, judge(spent), has_hosts=len({host for host, _ in ranks}) > 1)]
    lines += [f"host {host} has not answered" for host in missing]
    problems: dict[str, list[int]] = {}
    for _, one in sorted(ranks, key=lambda entry: entry[1].rank):
        if one.sampled is None:
            problems.setdefault(one.problem or "it has ended", []).append(one.rank)
    lines += [f"{numbered('rank', of)}: no samples: {why}" for why, of in [*problems.items()][:MOST_PROBLEMS]]
    return [printable(line) for line in lines]


def all_spent(nodes: Sequence[NodeStacks]) -> list[Spent]:
    """How the ranks of a job spent their time; those that wait least are first."""
    found = [spent for node in nodes for one in node.ranks if (spent := spent_by(node.host, one))]
    return sorted(found, key=lambda one: (one.waits, one.rank))


def _headline(spent: Sequence[Spent], verdict: Verdict | None, *, has_hosts: bool) -> str:
    if len(spent) < 2:
        return f"nothing can be compared: {len(spent)} of the ranks could be sampled"
    if verdict is None:
        least, most = _percent(spent[0].waits), _percent(spent[-1].waits)
        return f"no rank holds the others up: they wait {least} to {most} of the time for each other"
    slow, others = verdict.slow, verdict.others
    ranks = sorted([one.rank for one in slow])
    hosts = sorted({one.host for one in slow})
    host = f" (host {hosts[0]})" if has_hosts and len(hosts) == 1 else ""
    is_one = len(slow) == 1
    spot, share = _reason(slow, others)
    words = f"{numbered('rank', ranks)}{host} hold{'s' * is_one} the others up: {_at(spot, share)}"
    loading = _mean([one.loading for one in slow])
    if spot[0] == "for its data loader" and loading:
        at, part = max(loading.items(), key=lambda pair: pair[1])
        words += f", whose workers are {_at(at, part)}"
    delayed = _average([one.delayed for one in slow])
    if delayed - _average([one.delayed for one in others]) >= DELAYED:
        words += f", {_percent(delayed)} of the time without a free CPU"
    at, _ = max(_mean([one.waiting for one in others]).items(), key=lambda pair: pair[1])
    return f"{words}; the others wait {_at(at, _average([one.waits for one in others]))}"


def _reason(slow: Sequence[Spent], others: Sequence[Spent]) -> tuple[Spot, float]:
    """Where slow ranks spend their time, more than others do, and how much of it: a line, or its function."""
    mine, usual = _mean([one.working for one in slow]), _mean([one.working for one in others])
    more = {spot: share - usual.get(spot, 0.0) for spot, share in mine.items()}
    by_function: defaultdict[Spot, float] = defaultdict(float)
    for spot, share in more.items():
        by_function[_function(spot)] += share
    function = max(by_function, key=by_function.__getitem__)
    line = max([spot for spot in more if _function(spot) == function], key=more.__getitem__)
    if more[line] >= MOSTLY * by_function[function]:
        return line, mine[line]
    return line, sum([share for spot, share in mine.items() if _function(spot) == function])


def _function(spot: Spot) -> Spot:
    return spot[0], spot[1].rpartition(":")[0]


def _mean(shares: Sequence[Shares]) -> dict[Spot, float]:
    found: defaultdict[Spot, float] = defaultdict(float)
    for one in shares:
        for spot, share in one.items():
            found[spot] += share / len(shares)
    return dict(found)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _at(spot: Spot, share: float) -> str:
    return f"{_percent(share)} {spot[0]}" + (f" ({spot[1]})" if spot[1] else "")


def rows_of(spent: Sequence[Spent]) -> list[tuple[str, ...]]:
    """The rows of a table with `TITLES`."""
    return [
        (
            str(one.rank),
            one.host,
            *[_percent(one.kinds.get(kind, 0.0)) for kind in _SHOWN],
            _percent(one.delayed),
            _at(*_most(one)),
        )
        for one in spent
    ]


def figures(one: Spent) -> dict[str, object]:
    """How a rank spent its time, for JSON."""
    return {
        "rank": one.rank,
        "host": one.host,
        **{str(kind): round(one.kinds.get(kind, 0.0), 3) for kind in _SHOWN},
        "waits": round(one.waits, 3),
        "without_cpu": one.delayed,
        "mostly": _at(*_most(one)),
    }


def _most(one: Spent) -> tuple[Spot, float]:
    both = _mean([one.working, one.waiting])
    spot = max(both, key=both.__getitem__)
    return spot, both[spot] * 2


def collapsed(nodes: Sequence[NodeStacks]) -> str:
    """All stacks as ``py-spy record --format raw`` writes them, for flame graphs: outermost frames first."""
    lines = []
    for node in nodes:
        for rank in node.ranks:
            for one in rank.sampled.samples if rank.sampled else ():
                begin = [f"rank {rank.rank} (host {node.host})", *["descendants"] * one.is_child]
                frames = [f"{frame.function} ({frame.file}:{frame.line})" for frame in reversed(one.frames)]
                words = [word.replace(";", ":") for word in (*begin, *(frames or ["rare stacks"]))]
                lines.append(f"{';'.join(words)} {one.count}\n")
    return "".join(lines)
