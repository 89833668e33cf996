"""Which failure was first in the whole job, and its exit code: from the facts that members report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.events import MS, a_plan, a_report, an_attempt, an_exit, end

from dsl._record import replace
from dsl.conductor.judge import Context, Judged, judge, judge_alone
from dsl.control.clock import Clock
from dsl.control.messages import TO_HEAD
from dsl.evidence.reports import report_of
from dsl.model.codec import from_json, from_line, from_plain, to_json, to_line, to_plain
from dsl.model.judgement import MOST_STACKS, Absence, Judgement, Report
from dsl.model.observation import Frame, RankStacks, ThreadStack
from dsl.report.verdict import verdict

pytestmark = pytest.mark.guarantee("G2", "G3")

EXACT = Clock(0, 0)


def members(*hosts: int) -> dict[int, Judged]:
    return {place: Judged(f"host n{host}", host) for place, host in enumerate(hosts)}


def judged(
    *reports: Report,
    clocks: Mapping[int, Clock] | None = None,
    hosts: tuple[int, ...] = (),
    **context: Any,
) -> Judgement:
    """Each report is of a place of its own, and on a host of its own unless ``hosts`` says otherwise."""
    places = range(len(reports))
    known = dict.fromkeys(places, EXACT) if clocks is None else clocks
    return judge(
        dict(enumerate(reports)),
        members(*(hosts or places)),
        known,
        Context(**context),
    )


STOPPED = a_report(0, 1, host="n0", victims=(0,))
ALSO = a_report(0, 1, host="n1", victims=(3,))
FIRST = a_report(0, 7, rank=1, at_ms=5, host="n1")
LATER = a_report(0, 9, rank=2, at_ms=6, host="n2")
LOST = Report(0, 1, absence=Absence("host n1", "it has closed the connection", first_rank=2, rank_count=2))
LEFT = a_report(0, 1, host="n1", survivors=1)


@pytest.mark.parametrize(
    "reports, context, code, lines",
    [
        ((a_report(0, 0), a_report(0, 0)), {}, 0, []),
        (
            (STOPPED, FIRST, LATER),
            {},
            7,
            [
                "rank 1 (local rank 0, pid 1001, host n1) failed first: exit code 7",
                "also failed: rank 2 (local rank 0, pid 1002, host n2) failed: exit code 9",
                "stopped by dsl: rank 0",
            ],
        ),
        (
            (STOPPED, LOST),
            {},
            1,
            ["host n1 (ranks 2-3) was lost: it has closed the connection", "stopped by dsl: rank 0"],
        ),
        (
            (LOST, FIRST),  # a loss shows only later
            {},
            7,
            [
                "rank 1 (local rank 0, pid 1001, host n1) failed first: exit code 7",
                "also failed: host n1 (ranks 2-3) was lost: it has closed the connection",
            ],
        ),
        (
            (STOPPED, Report(0, 2, absence=Absence("host n1", "cannot bind", is_lost=False))),
            {},
            2,
            ["host n1: cannot bind", "stopped by dsl: rank 0"],
        ),
        ((STOPPED, FIRST), {"fault": "pdsh has ended"}, 1, ["pdsh has ended", "stopped by dsl: rank 0"]),
        ((STOPPED, ALSO), {"signum": 2}, 130, ["interrupted (SIGINT): ranks 0,3 ended"]),
        ((STOPPED, ALSO), {"signum": 2, "is_key": True}, 130, ["interrupted (Ctrl-C): ranks 0,3 ended"]),
        ((STOPPED, FIRST), {"signum": 2}, 7, None),
        (
            (STOPPED, replace(ALSO, code=143, stop_signal=15)),
            {"begun_by": 1},
            143,
            ["terminated (SIGTERM): ranks 0,3 ended"],
        ),
        (
            (STOPPED, LEFT),
            {"begun_by": 1},
            1,
            [
                "host n1 has stopped its workers, exit code 1",
                "stopped by dsl: rank 0",
                "host n1: process 70 (stuck, state D) did not die of SIGKILL",
            ],
        ),
        (
            (STOPPED,),
            {"is_preempted": True, "preempt_signal": 10},
            75,
            ["preempted (SIGUSR1): rank 0 ended (SIGTERM)"],
        ),
        ((STOPPED, FIRST), {"is_preempted": True, "preempt_signal": 10}, 7, None),
    ],
)
def test_code_and_lines_follow_from_the_reports(
    reports: tuple[Report, ...], context: dict[str, Any], code: int, lines: list[str] | None
) -> None:
    judgement = judged(*reports, **context)
    assert judgement.code == code
    if lines is not None:
        told = verdict(judgement)
        assert told == lines


def test_compared_clocks_put_failures_in_order() -> None:
    early = replace(FIRST, cause=replace(FIRST.cause, ended_ns=100 * MS))
    judgement = judged(early, LATER, clocks={0: Clock(99 * MS, 0), 1: EXACT})
    assert [one.rank for one in judgement.causes] == [1, 2]
    assert judgement.rivals == 0


@pytest.mark.parametrize(
    "clocks, hosts, rivals",
    [
        ({0: Clock(0, MS), 1: EXACT}, (0, 1), 1),
        ({0: EXACT, 1: EXACT}, (0, 1), 0),
        ({0: EXACT}, (0, 1), 1),
        ({}, (0, 0), 0),
    ],
)
def test_failures_that_clocks_cannot_put_in_order_are_rivals(
    clocks: dict[int, Clock], hosts: tuple[int, ...], rivals: int
) -> None:
    judgement = judged(FIRST, LATER, clocks=clocks, hosts=hosts)
    assert judgement.rivals == rivals
    assert any("or first: rank 2" in line for line in verdict(judgement)) == bool(rivals)


def test_a_worker_that_failed_before_its_host_was_lost_keeps_its_time_and_code() -> None:
    absence = Absence("host n1", "it is gone", rank_count=1, first_rank=3, rank=3, status=9, ended_ns=4 * MS)
    judgement = judged(FIRST, Report(0, 9, absence=absence))
    assert judgement.code == 9
    assert verdict(judgement)[0] == "rank 3 failed with 9, then host n1 (rank 3) was lost: it is gone"


@pytest.mark.parametrize(
    "times_ms, error_ms, begun_by, quitter",
    [
        ((5, 9), 0, 1, "host n0"),  # its report came later, but it was the first to stop
        ((5, 9), 0, 0, "host n0"),
        ((9, 5), 0, 0, "host n1"),
        ((5, 9), 3, 1, "host n1"),  # the clocks cannot tell
        ((0, 9), 0, 1, "host n1"),  # nobody knows when
    ],
)
def test_of_members_that_stop_by_themselves_the_first_by_the_clock_is_named(
    times_ms: tuple[int, int], error_ms: int, begun_by: int, quitter: str
) -> None:
    reports = [
        a_report(0, 40 + place, host=f"n{place}", stopped_ns=at_ms * MS, victims=(place,))
        for place, at_ms in enumerate(times_ms)
    ]
    clocks = {place: Clock(0, error_ms * MS) for place in (0, 1)}
    judgement = judged(*reports, clocks=clocks, begun_by=begun_by)
    assert judgement.quitter == quitter
    assert judgement.code == 40 + int(quitter[-1])


REPORTS = st.builds(
    lambda kind, code, at_ms, rank: {
        "well": a_report(0, 0),
        "stopped": a_report(0, 1, victims=(rank,)),
        "failed": a_report(0, code, rank=rank, at_ms=at_ms),
        "lost": Report(0, code, absence=Absence("host", "it is gone", first_rank=rank, rank_count=1)),
    }[kind],
    st.sampled_from(["well", "stopped", "failed", "lost"]),
    st.integers(1, 255),
    st.integers(1, 20),
    st.integers(0, 9),
)
HISTORIES = st.lists(
    st.tuples(
        REPORTS,
        st.integers(0, 3),
        st.none() | st.builds(Clock, st.integers(0, 9 * MS), st.integers(0, 9 * MS)),
    ),
    min_size=1,
    max_size=6,
)


@given(HISTORIES, st.randoms(), st.none() | st.sampled_from([2, 15]))
@settings(deadline=None)
def test_the_same_judgement_whatever_the_order_of_arrival(
    history: list[tuple[Report, int, Clock | None]], random: object, signum: int | None
) -> None:
    places = {place: one for place, (one, _, _) in enumerate(history)}
    hosts = members(*(host for _, host, _ in history))
    clocks = {place: clock for place, (_, _, clock) in enumerate(history) if clock is not None}
    judgement = judge(places, hosts, clocks, Context(signum=signum))
    shuffled = list(places)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = judge({place: places[place] for place in shuffled}, hosts, clocks, Context(signum=signum))
    assert again == judgement
    assert verdict(again) == verdict(judgement)
    if judgement.causes:
        assert judgement.code == judgement.causes[0].code
    of_host = {id(places[place].cause): hosts[place].host for place in places if places[place].cause}
    first = judgement.causes[:1]
    for rival in judgement.causes[1 : 1 + judgement.rivals]:
        assert of_host[id(rival.cause)] != of_host[id(first[0].cause)], "one clock"


def test_facts_travel_whole() -> None:
    tail = b'Traceback (most recent call last):\n  File "/t.py", line 4, in f\n    x\nValueError: \xe4\n'
    cause = an_exit(1, code=1, at_ms=3)
    exits = [
        cause,
        *[an_exit(worker, code=2, at_ms=4) for worker in range(2, 14)],
        an_exit(0, signal=15, by_us=True),
    ]
    attempt = an_attempt(
        a_plan(14), exits, end(cause, survivors=[(7, "D", "x", None, None)], tail=tail, shown_since=None)
    )
    report = report_of(attempt)
    assert from_line(to_line(report), TO_HEAD) == report
    judgement = judge_alone(report, Context())
    there = from_plain(from_json(to_json(to_plain(judgement))), {"Judgement": Judgement})
    assert there == judgement
    assert verdict(there) == verdict(judgement)
    assert verdict(there)[0].endswith("failed first: exit code 1: ValueError: \ufffd (t.py:4 in f)")


def test_only_the_first_cause_brings_its_last_output() -> None:
    loud = a_report(0, 9, rank=2, at_ms=6, host="n2", lines=["a traceback"])
    judgement = judged(replace(FIRST, evidence=loud.evidence), loud)
    assert [one.evidence.lines for one in judgement.causes] == [("a traceback",), ()]


def sleeping(rank: int) -> RankStacks:
    main = ThreadStack("MainThread", (Frame("f", "/u/train.py", 5),), is_main=True, call="clock_nanosleep")
    return RankStacks(rank, rank, 1000 + rank, (main,), "S")


def test_what_the_other_ranks_did_is_told_for_all_members() -> None:
    reports = {
        0: a_report(code=143, stacks=(sleeping(0),)),
        1: a_report(code=3, rank=1, host="n1", stacks=(sleeping(2),)),
    }
    members = {place: Judged(f"host n{place}", place) for place in reports}
    judgement = judge(reports, members, {}, Context())
    assert [one.stacks for one in judgement.causes] == [()]
    assert "the others at that moment: all 2 ranks are in sleep() (train.py:5)" in verdict(judgement)


def test_a_judgement_holds_the_stacks_of_so_many_workers_only() -> None:
    stacks = tuple(map(sleeping, range(200)))
    reports = {place: a_report(code=3, rank=place, host=f"n{place}", stacks=stacks) for place in range(2)}
    members = {place: Judged(f"host n{place}", place) for place in reports}
    judgement = judge(reports, members, {}, Context())
    assert sum(len(one.ranks) for one in judgement.stacks) == MOST_STACKS
