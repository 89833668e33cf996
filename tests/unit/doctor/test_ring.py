"""What `--doctor --ring` says of figures: it names the slow device, host or link, and nothing where all is well."""

from __future__ import annotations

from itertools import combinations

import pytest

from dsl._record import replace
from dsl.doctor.job_checks import line_of
from dsl.doctor.ring_checks import LEAST_S, Figures, absence, ends_of, judge, rounds, summary

SMALL_S, LARGE_S = 0.0001, 0.004
Slow = dict[tuple[int, ...], tuple[float, float]]


def measured(count: int, slow: Slow | None = None, *, hosts: int = 0) -> list[Figures]:
    """Figures of ranks, one on each host unless there are fewer. ``slow``: factors of a rank's or pair's times."""
    names = [f"n{rank % (hosts or count)}" for rank in range(count)]
    ends = ends_of(names)
    links: dict[int, list[tuple[int, float, float]]] = {rank: [] for rank in range(count)}
    for pair in combinations(ends, 2):
        small, large = SMALL_S, LARGE_S
        for ranks, factors in (slow or {}).items():
            if {*ranks} <= {*pair}:
                small, large = small * factors[0], large * factors[1]
        links[pair[0]].append((pair[1], small, large))
    return [Figures(at, names[at], "CPU", 0.002, 0.001, 0.02, tuple(links[at])) for at in range(count)]


def said(found: list[Figures]) -> list[str]:
    return [line_of(*one) for one in judge(found, "8 bytes", "4 MB")]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("hosts", [0, 1])
def test_equal_figures_are_no_finding(count: int, hosts: int) -> None:
    assert said(measured(count, hosts=hosts)) == []
    assert said(measured(count, {(0,): (1.9, 1.9)}, hosts=hosts)) == []


@pytest.mark.parametrize(
    "count, slow, starts",
    [
        (3, {(2,): (1, 5)}, ["warning  n2: the fastest link from here passes 4 MB in 20 ms, the median of all hosts is 4 ms: l"]),
        (3, {(2,): (300, 1)}, ["warning  n2: the fastest link from here passes 8 bytes in 30 ms, the median of all hosts is"]),
        (3, {(1, 2): (1, 5)}, ["warning  n1, n2: the link between them passes 4 MB in 20 ms, the median of links "]),
        (3, {(0,): (300, 9)}, ["warning  n0: the fastest link from here passes 4 MB"]),
        (5, {(0,): (1, 5), (3, 4): (1, 6)}, ["warning  n0: the fastest", "warning  n3, n4: the link between them"]),
        (5, {(0, 4): (1, 5), (1, 2): (90, 1)}, ["warning  n0, n4: the link between", "warning  n1, n2: the link"]),
        (4, {(0,): (1, 3), (0, 1): (1, 9)}, ["warning  n0: the fastest", "warning  n0, n1: the link between them"]),
        (6, {(0, 1): (9, 1)}, []),  # less than a millisecond more may be another switch
        (2, {(0, 1): (1, 99)}, []),  # nothing to compare with
    ],
)  # fmt: skip
def test_slow_hosts_and_links_are_named_once(count: int, slow: Slow, starts: list[str]) -> None:
    lines = said(measured(count, slow))
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
        assert line.endswith("[slow-link]")


def test_on_one_host_the_links_are_those_of_ranks() -> None:
    lines = said(measured(4, {(3,): (1, 5)}, hosts=1))
    assert lines[0].startswith("warning  rank 3: the fastest link from here passes 4 MB in 20 ms")
    assert len(lines) == 1


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_slow_device_is_named(count: int) -> None:
    found = measured(count)
    found[1] = replace(found[1], device="NVIDIA X", compute_s=0.006)
    (line,) = said(found)
    assert line.startswith(
        "warning  n1: rank 1 (NVIDIA X) multiplies matrices in 6 ms, the median of all ranks is"
    )
    assert line.endswith("[slow-device]")
    found[1] = replace(found[1], compute_s=0.002 + LEAST_S)
    assert said(found) == []


def test_ends_are_the_first_rank_of_each_host_or_all_ranks_of_one() -> None:
    assert ends_of(["a", "a", "b", "b", "c"]) == [0, 2, 4]
    assert ends_of(["a", "a"]) == [0, 1]
    assert ends_of(["a"]) == [0]


@pytest.mark.parametrize("count", range(10))
def test_each_pair_meets_once_and_no_end_is_in_two_pairs_of_a_round(count: int) -> None:
    found = rounds(count)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    for pairs in found:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len({*ends})


def test_the_page_has_the_figures() -> None:
    assert summary(measured(3), "gloo on the CPU", "8 bytes", "4 MB") == [
        "ring: 3 hosts, 3 ranks, gloo on the CPU",
        "all_reduce over all ranks: 4 MB in 20 ms, 8 bytes in 1 ms",
        "pairs of hosts, the median of 3: 4 MB in 4 ms, 8 bytes in 0.1 ms",
    ]
    assert len(summary(measured(1), "gloo on the CPU", "8 bytes", "4 MB")) == 2


@pytest.mark.parametrize(
    "come, text",
    [
        ([0, 2], "the end did not end within 30 s: ranks 1,3 (on n1) have not come"),
        ([0, 1, 2], "the end did not end within 30 s: rank 3 has not come"),
        ([0, 1, 2, 3], "all ranks have come: a link between their hosts lets little or nothing through"),
    ],
)
def test_ranks_that_hold_a_step_up_are_named(come: list[int], text: str) -> None:
    assert text in absence("the end did not end within 30 s", come, {0: "n0", 1: "n1", 2: "n2"}, 4)
