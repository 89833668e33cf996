"""What a conductor orders if members come by themselves at any time: through a store that all of them know."""

from __future__ import annotations

import pytest
from tests.support.conducting import CLOSED, Stage, coming_and_going, messages, spoken
from tests.support.events import a_report

from dsl._record import replace
from dsl.conductor.members import MOST_PLACES
from dsl.control.messages import (
    Bye,
    Checked,
    Failing,
    Hello,
    Lost,
    MeetByTorch,
    Over,
    Preempted,
    Refused,
    Stop,
)
from dsl.model.job import Meeting
from dsl.model.request import Policy
from dsl.report.verdict import verdict


def open_job(least: int, most: int, restarts: int = 0, last_call_s: float = 30.0) -> Stage:
    return Stage(coming_and_going(least, most, restarts, last_call_s=last_call_s))


def come(stage: Stage, *places: int, **fields: object) -> None:
    """Members come, with two workers each and a port for rank 0."""
    for place in places:
        hello = Hello("1", place, f"h{place}", 1, workers=2, role="default")
        stage.hear(place, replace(hello, **fields))
        stage.hear(place, Checked(addresses=(f"10.0.0.{place}",), free_port=30000 + place))


def test_the_job_starts_at_once_when_it_is_full_and_rank_0_says_where_it_listens() -> None:
    stage = open_job(1, 3)
    come(stage, 0, 4)
    assert not messages(stage.orders, Meeting)
    come(stage, 2)
    assert stage.members() == [(0, 0), (2, 1), (4, 2)]
    meeting = stage.meeting
    assert (meeting.address, meeting.port, meeting.local_world_sizes) == ("10.0.0.0", 30000, (2, 2, 2))
    assert (meeting.role_size, meeting.reason) == (6, "start")
    assert stage.said == ["starting with 3 nodes: h0, h2, h4"]


def test_ranks_follow_the_addresses_of_nodes_as_with_torch() -> None:
    stage = open_job(2, 2)
    come(stage, 0, order="b")
    come(stage, 1, order="a")
    assert stage.members() == [(1, 0), (0, 1)]
    assert (stage.meeting.address, stage.meeting.port) == ("10.0.0.1", 30001)


def test_enough_nodes_wait_for_the_last_call_once() -> None:
    stage = open_job(1, 3, last_call_s=5)
    come(stage, 0)
    assert not messages(stage.later(4.5), Meeting)
    assert messages(stage.later(0.5), Meeting)
    assert stage.hear(0, Bye()) != []
    come(stage, 1)  # the nodes of the last attempt have gone: nobody waits again
    assert stage.members() == [(1, 0)]


def test_too_few_nodes_are_waited_for_so_long_and_those_that_are_there_hear_it() -> None:
    stage = open_job(2, 2)
    come(stage, 0)
    orders = stage.later(60)
    text = (
        "too few nodes have come to n0:29400 with run id  within 60 s, it takes 2: start them with the same run "
        "id and endpoint, or raise join_timeout (dsl: --elastic-wait)"
    )
    assert messages(orders, Refused) == [(0, Refused(text, 1))]
    assert stage.conductor.code == 1
    heir = open_job(2, 2)
    heir.hear(0, Hello("1", 0, "h0", 1, workers=1, attempts=3))
    (over,) = [one for _, one in messages(heir.later(60), Over)]
    assert (over.judgement.code, verdict(over.judgement)) == (1, [text])


def test_nodes_that_wait_in_vain_for_another_hear_why_the_job_ends_and_not_how_that_node_has_left() -> None:
    stage = open_job(2, 2)
    come(stage, 0, 1)
    stage.hear(1, a_report(0, 143, stop_signal=15, victims=(1,)))
    stage.report_stopped(0)
    ((_, over),) = messages(stage.later(60), Over)
    assert over.judgement.code == stage.conductor.code == 1
    stopped, why = verdict(over.judgement)
    assert stopped == "stopped by dsl: ranks 1,9"
    assert why.startswith(
        "not tried again: too few nodes have come to n0:29400 with run id  within 60 s, it takes 2"
    )


def test_a_node_that_comes_is_taken_in_and_costs_no_restart() -> None:
    stage = open_job(1, 2, last_call_s=1)
    come(stage, 0)
    stage.later(1)
    come(stage, 1)
    assert [place for place, _ in messages(stage.orders, Stop)] == [0]
    stage.report_stopped(0)
    assert (stage.meeting.reason, stage.meeting.restarts, stage.meeting.node_count) == ("membership", 0, 2)
    assert stage.said[-2:] == [
        "node h1 has come: starting again with all of them",
        "starting again with 2 nodes: h0, h1",
    ]


def test_the_port_of_rank_0_is_the_one_that_its_node_has_named_last() -> None:
    stage = open_job(1, 1, restarts=1)
    come(stage, 0)
    stage.hear(0, Failing(0, 0, 7, 1))
    stage.hear(0, Checked(addresses=("10.0.0.0",), free_port=31000))
    stage.hear(0, a_report(0, 7, rank=0, at_ms=1, host="h0", ended=2))
    assert (stage.meeting.attempt, stage.meeting.port, stage.meeting.restarts) == (1, 31000, 1)


def test_all_nodes_hear_why_a_failure_is_not_tried_again() -> None:
    terms = coming_and_going(2, 2, 9)
    stage = Stage(replace(terms, job=replace(terms.job, policy=Policy(give_up_on=(7,)))))
    come(stage, 0, 1)
    stage.hear(0, Failing(0, 0, 7, 1))
    stage.hear(0, a_report(0, 7, rank=0, at_ms=1, host="h0", ended=2))
    told = messages(stage.report_stopped(1), Over)
    assert [place for place, _ in told] == [0, 1]
    assert {one.judgement.not_tried for _, one in told} == {"exit code 7 is in --give-up-on"}
    assert stage.conductor.code == 7


@pytest.mark.parametrize(
    "end", [a_report(0, 143, stop_signal=15, victims=(2, 3)), a_report(0, 75, stop_signal=10)]
)
def test_a_node_that_is_asked_to_end_leaves_and_the_others_go_on_without_a_restart(end: object) -> None:
    stage = open_job(1, 2)
    come(stage, 0, 1)
    stage.hear(1, Preempted(0, 10))
    assert not messages(stage.orders, Stop)
    orders = stage.hear(1, end)
    assert [place for place, _ in messages(orders, Over)] == [1]
    assert [place for place, _ in messages(orders, Stop)] == [0]
    stage.hear(1, Bye())
    stage.report_stopped(0)
    assert stage.members() == [(0, 0)]
    assert (stage.meeting.reason, stage.meeting.restarts) == ("membership", 0)
    assert any(line.startswith("warning: node h1 has left: ") for line in stage.said)


def test_a_lost_node_is_not_called_again_and_a_spare_takes_its_place() -> None:
    stage = open_job(2, 2)
    come(stage, 0, 1, 2)
    assert "node h2 is a spare, in case that another is lost" in stage.said
    stage.hear(1, Lost("has not been heard for 15 s", is_silent=True))
    stage.report_stopped(0)
    assert [place for place, _ in stage.members()] == [0, 2]
    assert not [line for line in stage.said if "tried again" in line]
    assert stage.conductor.deadline_s is None


def test_a_spare_that_goes_changes_nothing() -> None:
    stage = open_job(1, 1)
    come(stage, 0, 1)
    assert spoken(stage.hear(1, Bye())) == ["node h1 has left the job"]
    assert stage.attempt == 0


@pytest.mark.guarantee("G3")
def test_at_the_end_members_and_spares_and_whoever_comes_late_hear_the_same() -> None:
    stage = open_job(2, 2)
    come(stage, 0, 1, 2)
    stage.fail(1, 2)
    stage.report_stopped(0)
    ends = messages(stage.orders, Over)
    come(stage, 3)
    ends += messages(stage.orders, Over)[len(ends) :]
    assert [place for place, _ in ends] == [0, 1, 2, 3]
    assert {id(one.judgement) for _, one in ends} == {id(stage.conductor.judgement)}
    assert stage.conductor.code == 7


def test_failures_of_jobs_that_cannot_shrink_are_not_paused_for_long() -> None:
    stage = open_job(1, 1, restarts=9)
    come(stage, 0)
    for _ in range(5):
        stage.fail(0, 0)
    assert stage.attempt == 5


def test_a_node_under_torchrun_makes_all_nodes_meet_by_torch() -> None:
    """Also those that come later. The restarts so far go with them."""
    stage = open_job(1, 2, restarts=1)
    come(stage, 0, 1)
    stage.fail(1, 2)
    stage.report_stopped(0)
    assert stage.attempt == 1
    assert [place for place, _ in messages(stage.note(stage.conductor.meet_by_torch(stage.now_s)), Stop)] == [
        0,
        1,
    ]
    assert stage.conductor.meet_by_torch(stage.now_s) == []
    orders = stage.report_stopped(0, 1)
    assert messages(orders, MeetByTorch) == [(0, MeetByTorch(1)), (1, MeetByTorch(1))]
    assert not messages(orders, Meeting)
    late = stage.hear(2, Hello("1", 2, "h2", 1, workers=2))
    assert messages(late, MeetByTorch) == [(2, MeetByTorch(1))]
    assert stage.conductor.code is None


def test_before_the_first_attempt_they_do_so_at_once() -> None:
    stage = open_job(2, 2)
    come(stage, 0)
    assert messages(stage.conductor.meet_by_torch(stage.now_s), MeetByTorch) == [(0, MeetByTorch(0))]


def test_places_have_an_end() -> None:
    stage = open_job(1, 1)
    assert stage.conductor.expects(MOST_PLACES - 1)
    assert not stage.conductor.expects(MOST_PLACES)


def test_a_node_that_goes_before_the_start_is_not_missed() -> None:
    stage = open_job(1, 2)
    come(stage, 0)
    assert spoken(stage.hear(0, CLOSED))[0].startswith("node h0 has left before the job has begun")
    assert not messages(stage.later(40), Meeting)
