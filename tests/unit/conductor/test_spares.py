"""What a conductor does with spares and bad members: for hosts that we reach, and nodes that come by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.conducting import CLOSED, Stage, coming, coming_and_going, elastic, messages
from tests.support.events import a_report

from dsl._record import replace
from dsl.control.messages import Bye, Checked, Hello, Over, Stop
from dsl.model.job import Meeting
from dsl.report.verdict import verdict


def come(stage: Stage, *places: int, attempts: int = 0, restarts: int = 0) -> None:
    """Nodes come by themselves, with one worker each and a port for rank 0, maybe from another conductor."""
    for place in places:
        hello = Hello("1", place, f"h{place}", 1, workers=1, role="default")
        stage.hear(place, replace(hello, attempts=attempts, restarts=restarts))
        stage.hear(place, Checked(addresses=(f"10.0.0.{place}",), free_port=30000 + place))


def fixed_job() -> Stage:
    """Three nodes and two spares whose users gave them places."""
    stage = Stage(coming(3, 9, spares=2))
    come(stage, *range(5))
    return stage


def open_job() -> Stage:
    """Five nodes that have come through a store, and three of them run."""
    stage = Stage(coming_and_going(3, 3, 9))
    come(stage, *range(5))
    return stage


def reached_job() -> Stage:
    """Five hosts that we reach, and three of them run."""
    stage = elastic(1, 1, 1, 1, 1, least=3, most=3, restarts=9)
    stage.come(*range(5))
    return stage


JOBS = {
    "fixed": (fixed_job, "node {0} (h{0})"),
    "open": (open_job, "node h{0}"),
    "reached": (reached_job, "host n{0}"),
}


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest) -> tuple[Stage, Callable[[int], str]]:
    """A job of three members with two spares, and what it calls a member."""
    start, name = JOBS[request.param]
    return start(), name.format


def order(stage: Stage) -> list[int]:
    """The members of the present attempt, in the order of their ranks."""
    return [place for place, _ in stage.members()]


def fail(stage: Stage, place: int) -> None:
    """A worker of this member fails first, and the others are stopped."""
    members = order(stage)
    stage.now_s += 60  # so late that the next attempt follows at once
    stage.fail(place, members.index(place))
    stage.report_stopped(*[one for one in members if one != place])


@pytest.mark.parametrize(
    "failures, members",
    [
        ([1], [0, 1, 2]),
        ([1, 1], [0, 3, 2]),
        ([1, 2, 1], [0, 1, 2]),
        ([0, 0], [3, 1, 2]),
        ([1, 1, 3], [0, 3, 2]),
        ([1, 1, 3, 3], [0, 4, 2]),
        ([1, 1, 3, 3, 4, 4], [0, 4, 2]),  # they are all bad now
    ],
)
def test_a_member_that_failed_first_twice_in_a_row_gives_its_place_and_ranks_to_a_spare(
    failures: list[int], members: list[int], job: tuple[Stage, Callable[[int], str]]
) -> None:
    stage, _ = job
    assert order(stage) == [0, 1, 2]
    for place in failures:
        fail(stage, place)
    assert order(stage) == members
    assert stage.meeting.restarts == len(failures)
    assert [place for place in range(5) if stage.conductor.takes_part(place)] == sorted(members)


def test_the_user_hears_it_once_and_again_in_the_verdict(job: tuple[Stage, Callable[[int], str]]) -> None:
    stage, name = job
    for place in (1, 1, 2):
        fail(stage, place)
    line = f"{name(1)} failed first twice in a row: {name(3)} takes its place"
    assert stage.said.count(line) == 1
    stage.signal(15)
    stage.report_stopped(0, 3, 2)
    assert f"before: {line}" in stage.said


def test_nobody_is_blamed_if_clocks_cannot_tell_who_was_first() -> None:
    stage = fixed_job()
    stage.conductor.clocks.clear()
    for _ in range(2):
        for place in (1, 2):
            stage.hear(place, a_report(stage.attempt, 7, rank=place, at_ms=place, host=f"h{place}", ended=1))
        stage.report_stopped(0)
    assert (stage.attempt, order(stage)) == (2, [0, 1, 2])


def test_a_member_that_comes_again_starts_with_a_clean_record() -> None:
    stage = fixed_job()
    fail(stage, 1)
    stage.hear(1, CLOSED)
    stage.report_stopped(0, 2)
    assert order(stage) == [0, 3, 2]
    assert "node 3 (h3) takes the place of node 1 (h1)" in stage.said
    come(stage, 1)
    assert "node 1 (h1) is there now" in stage.said
    stage.hear(4, Bye())
    fail(stage, 0)
    fail(stage, 0)
    fail(stage, 1)
    assert order(stage) == [1, 3, 2]


def test_another_conductor_does_not_know_which_members_were_bad() -> None:
    """docs/elastic.md says so."""
    stage = open_job()
    for place in (1, 1):
        fail(stage, place)
    assert order(stage) == [0, 3, 2]
    stage = Stage(coming_and_going(3, 3, 9))
    come(stage, 0, 1, 2, 3, attempts=3, restarts=2)
    assert (stage.attempt, stage.meeting.restarts, order(stage)) == (3, 2, [0, 1, 2])
    fail(stage, 1)
    assert order(stage) == [0, 1, 2]
    fail(stage, 1)
    assert order(stage) == [0, 3, 2]


def test_a_node_with_a_fixed_place_cannot_say_how_many_restarts_are_left() -> None:
    """Nobody but node 0 conducts such a job."""
    stage = Stage(coming(2, 1, spares=1))
    come(stage, 0, 1)
    stage.hear(2, Hello("1", 2, "h2", 1, workers=1, attempts=9, restarts=9))
    fail(stage, 0)
    assert (stage.meeting.attempt, stage.meeting.restarts) == (1, 1)


def test_a_spare_is_not_waited_for_and_a_node_before_it_is() -> None:
    stage = Stage(coming(3, spares=1))
    come(stage, 0, 2, 3)
    assert not messages(stage.later(29), Meeting)
    come(stage, 1)
    assert order(stage) == [0, 1, 2]
    assert stage.said == [
        "starting with 3 nodes: h0, h1, h2",
        "node 3 (h3) is a spare, in case that another is lost",
    ]
    late = Stage(coming(3, spares=1))
    come(late, 0, 2, 3)
    late.later(30)
    assert order(late) == [0, 2, 3]


def test_a_node_that_leaves_is_replaced_without_a_restart_and_comes_back_as_a_spare() -> None:
    stage = Stage(coming(2, spares=1))
    come(stage, 0, 1)
    orders = stage.hear(1, a_report(0, 143, stop_signal=15, victims=(1,)))
    assert [place for place, _ in messages(orders, Over)] == [1]
    assert [place for place, _ in messages(orders, Stop)] == [0]
    stage.hear(1, Bye())
    stage.report_stopped(0)
    assert stage.said[-1] == "warning: 1 of at least 2 nodes is there: waiting for more, 600 s at most"
    come(stage, 2)
    assert order(stage) == [0, 2]
    assert (stage.meeting.reason, stage.meeting.restarts) == ("membership", 0)
    assert (stage.meeting.address, stage.meeting.port) == ("10.0.0.0", 30000)
    come(stage, 1)
    assert stage.said[-1] == "node 1 (h1) is a spare, in case that another is lost"


@pytest.mark.guarantee("G3")
def test_when_too_few_are_left_for_too_long_all_hear_it_and_what_was_lost() -> None:
    stage = Stage(coming(2, spares=1))
    come(stage, 0, 1)
    stage.hear(1, CLOSED)
    stage.report_stopped(0)
    ((_, over),) = messages(stage.later(600), Over)
    assert over.judgement == stage.conductor.judgement
    assert verdict(over.judgement)[-1] == (
        "not tried again: after 600 s the job is still waiting for nodes 1-2"
    )
    assert "node 1 (h1) (rank 1) was lost: it has closed the connection" in stage.said
    assert stage.conductor.code == 1


def test_members_that_have_failed_before_a_spare_took_over_hear_that_the_job_has_succeeded() -> None:
    stage = fixed_job()
    fail(stage, 1)
    fail(stage, 1)
    for place in order(stage):
        orders = stage.hear(place, a_report(stage.attempt, 0))
    assert dict(messages(orders, Over)) == dict.fromkeys(range(5), Over(has_succeeded=True))
    assert stage.conductor.code == 0
