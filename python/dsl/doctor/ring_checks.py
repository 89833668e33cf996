"""What ``--doctor --ring`` makes of its figures: which device or link is slow against the median. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from dsl._record import Record
from dsl.model.health import Symptom
from dsl.words import counted, first_few, numbered

RING_CHECKS = ("slow-device", "slow-link")
"""The names of what is judged."""
FACTOR = 2.0
"""What takes so many times the median is slow."""
LEAST_S = 0.001
"""A difference below this is no finding: the way through another switch takes longer, too."""

LINK_MEND = "look at interface, cable and route (ethtool, ip -s link), and at other traffic there"
OWN_LINK_MEND = "look at the way between the devices (nvidia-smi topo -m), and at what else runs there"
DEVICE_MEND = "look for another process there, a lower clock or power limit, or fewer CPUs"

Ranks: TypeAlias = "tuple[int, ...]"
"""One rank, or the two ends of a link."""
Finding: TypeAlias = "tuple[tuple[str, ...], Symptom]"
"""The hosts, or the ranks of a single host, and what is found."""


class Figures(Record):
    """What one rank has measured. All times are the best of several, in seconds."""

    rank: int
    host: str
    device: str
    compute_s: float
    """For one multiplication of matrices, while the other ranks do the same."""
    reduce_small_s: float
    reduce_large_s: float
    """For an all_reduce of all ranks, of few bytes and of many."""
    links: tuple[tuple[int, float, float], ...] = ()
    """Ranks to which it has passed something; seconds for few bytes and for many, one way."""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` ends, in rounds in which each end meets at most one other."""
    ends = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in ends[1:]:
        pairs = zip(ends, reversed(ends), strict=True)
        half = [(min(pair), max(pair)) for pair in list(pairs)[: len(ends) // 2]]
        found.append([pair for pair in half if pair[0] >= 0])
        ends = [ends[0], ends[-1], *ends[1:-1]]
    return found


def ends_of(hosts: Sequence[str]) -> list[int]:
    """The ranks that measure links: the first of each host; of one host all. ``hosts``: that of each rank."""
    firsts = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    return firsts if len(firsts) > 1 else list(range(len(hosts)))


def _median(values: Iterable[float]) -> float:
    """The lower one of two: then the slower one of two devices can be found."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def _slow(
    times: Mapping[Ranks, float], usual: float, like: str, best: Mapping[Ranks, float] | None = None
) -> list[tuple[Ranks, str]]:
    """What is slow among its ``like``, and its time beside the median, in words.

    ``best``: the shortest time of each end; a link may take as long as its slower end.
    """
    found = []
    for ranks, time in times.items():
        least = max(usual, *[(best or {}).get((rank,), 0.0) for rank in ranks])
        if time > FACTOR * least and time > least + LEAST_S:
            found.append((ranks, f"{_time(time)}, the median of {like} is {_time(usual)}"))
    return found


def judge(found: Sequence[Figures], small: str, large: str) -> list[Finding]:
    """The slow devices and links. ``small``, ``large``: the sizes of what was passed, in words.

    A host is slow if its fastest link is, so the links of one bad host do not become the usual ones.
    """
    by_rank = {one.rank: one for one in found}
    findings: list[Finding] = []
    compute: dict[Ranks, float] = {(one.rank,): one.compute_s for one in found}
    for (rank,), time in _slow(compute, _median(compute.values()), "all ranks"):
        one = by_rank[rank]
        text = f"rank {rank} ({one.device}) multiplies matrices in {time}: {DEVICE_MEND}"
        findings.append(((one.host,), Symptom("warning", RING_CHECKS[0], text)))
    is_one = len({one.host for one in found}) == 1
    mend = OWN_LINK_MEND if is_one else LINK_MEND
    named: set[Ranks] = set()
    for size, place in ((large, 2), (small, 1)):
        links: dict[Ranks, float] = {(one.rank, link[0]): link[place] for one in found for link in one.links}
        best: dict[Ranks, float] = {}
        for ranks, time_s in links.items():
            best.update({(rank,): min(time_s, best.get((rank,), time_s)) for rank in ranks})
        slow = _slow(best, _median(best.values()), "all ranks" if is_one else "all hosts")
        ends = {rank for (rank,), _ in slow}
        usual = _median([time_s for ranks, time_s in links.items() if not {*ranks} & ends])
        for ranks, time in (*slow, *_slow(links, usual, "links", best)):
            if ranks in named:
                continue
            named.add(ranks)
            what = "the fastest link from here" if len(ranks) == 1 else "the link between them"
            text = f"{what} passes {size} in {time}: {mend}"
            names = [f"rank {rank}" if is_one else by_rank[rank].host for rank in ranks]
            findings.append((tuple(names), Symptom("warning", RING_CHECKS[1], text)))
    return findings


def summary(found: Sequence[Figures], backend: str, small: str, large: str) -> list[str]:
    """The first lines of the page: what was measured, in figures."""
    links = [link for one in found for link in one.links]
    hosts = {one.host for one in found}
    first = found[0]
    reduced = f"{large} in {_time(first.reduce_large_s)}, {small} in {_time(first.reduce_small_s)}"
    lines = [
        f"ring: {counted(len(hosts), 'host')}, {counted(len(found), 'rank')}, {backend}",
        f"all_reduce over all ranks: {reduced}",
    ]
    if links:
        what = "pairs of hosts" if len(hosts) > 1 else "pairs of ranks"
        usual = [_time(_median([link[place] for link in links])) for place in (2, 1)]
        lines.append(f"{what}, the median of {len(links)}: {large} in {usual[0]}, {small} in {usual[1]}")
    return lines


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def absence(what: str, come: Sequence[int], hosts: Mapping[int, str], size: int) -> str:
    """Who holds a step up. ``come``: the ranks that have come to it; ``hosts``: the hosts that are known."""
    missing = [rank for rank in range(size) if rank not in come]
    if not missing:
        return f"{what}, and all ranks have come: a link between their hosts lets little or nothing through"
    names = sorted({hosts[rank] for rank in missing if rank in hosts})
    where = f" (on {first_few(names)})" if names else ""
    return f"{what}: {numbered('rank', missing)}{where} {'has' if len(missing) == 1 else 'have'} not come"
