"""What node 0 of a job with fixed places orders, message by message: its members come by themselves."""

from __future__ import annotations

import pytest
from tests.support.conducting import CLOSED, Stage, coming, messages, spoken
from tests.support.events import a_report

from dsl._record import replace
from dsl.conductor.orders import Dismiss
from dsl.control.messages import Bye, Failing, Hello, Lost, Over, Refused, Stop
from dsl.errors import PortError
from dsl.model.job import Meeting
from dsl.report.verdict import verdict


def hello(place: int, workers: int = 1, role: str = "trainer", **fields: str) -> Hello:
    """What a member says first."""
    return replace(Hello("1", place, f"h{place}", 1, workers=workers, role=role), **fields)


def stage_of(*sizes: int, restarts: int = 0) -> Stage:
    """A job whose members have come, with so many workers each."""
    stage = Stage(coming(len(sizes), restarts), lambda attempt: 29500 + attempt)
    for place, size in enumerate(sizes):
        stage.hear(place, hello(place, size))
    return stage


def test_the_first_attempt_begins_when_all_have_come_with_the_sizes_and_roles_that_they_say() -> None:
    stage = Stage(coming(3), lambda attempt: 29500 + attempt)
    assert stage.hear(2, hello(2, 3)) == []
    assert stage.hear(0, hello(0, 2)) == []
    assert stage.conductor.roster.missing() == [1]
    meetings = messages(stage.hear(1, hello(1, 1, "reader")), Meeting)
    found = [(place, one.node_rank, one.first_role_rank, one.role_size) for place, one in meetings]
    assert found == [(0, 0, 0, 5), (1, 1, 0, 1), (2, 2, 2, 5)]
    assert {(one.local_world_sizes, one.address, one.port) for _, one in meetings} == {
        ((2, 1, 3), "10.0.0.1", 29500)
    }
    assert [one.ranks for _, one in meetings] == [range(2), range(2, 3), range(3, 6)]


@pytest.mark.parametrize("end", [CLOSED, Bye()])
def test_before_the_first_attempt_the_place_of_a_member_that_goes_is_free_again(end: object) -> None:
    stage = Stage(coming(2))
    stage.hear(1, hello(1))
    assert not stage.conductor.expects(1)
    (said,) = spoken(stage.hear(1, end))
    assert said.startswith("node 1 (h1) has left before the job has begun: it has")
    assert stage.conductor.expects(1)
    assert (stage.conductor.roster.missing(), stage.conductor.roster.name(1)) == ([0, 1], "node 1")
    stage.hear(0, hello(0))
    assert messages(stage.hear(1, hello(1)), Meeting)


@pytest.mark.parametrize(
    "strange, why",
    [
        (hello(1, version="0"), "it has dsl 0, this host has 1: install the same version"),
        (hello(1, run_id="mine"), "its --rdzv-id is 'mine', that of node 0 is ''"),
        (hello(1, workers=0), "it has no workers"),
    ],
)
def test_a_member_of_another_job_hears_why_and_its_place_stays_free(strange: Hello, why: str) -> None:
    stage = Stage(coming(2))
    orders = stage.hear(1, strange)
    text = f"node 1 (h1) cannot take part: {why}"
    assert messages(orders, Refused) == [(1, Refused(text, 2))]
    assert stage.said == [f"warning: {text}"]
    assert stage.conductor.expects(1)
    assert stage.conductor.code is None


def test_members_are_waited_for_so_long_and_those_that_have_come_hear_who_is_missing() -> None:
    stage = Stage(coming(4))
    stage.hear(0, hello(0))
    stage.hear(2, hello(2))
    assert stage.conductor.deadline_s == stage.now_s + 600
    orders = stage.later(600)
    text = "after 600 s the job is still waiting for nodes 1,3"
    assert messages(orders, Refused) == [(0, Refused(text, 1)), (2, Refused(text, 1))]
    assert [place for place, _ in messages(orders, Over)] == [0, 2]
    assert (stage.conductor.code, stage.said) == (1, [f"error: {text}"])


@pytest.mark.guarantee("G3")
def test_at_the_end_every_member_is_told_the_same_judgement() -> None:
    stage = stage_of(1, 1, 1, restarts=0)
    orders = stage.hear(2, Failing(0, 2, 7, 1))
    assert [place for place, _ in messages(orders, Stop)] == [0, 1]
    stage.hear(2, a_report(0, 7, rank=2, at_ms=1, host="h2", ended=1))
    stage.hear(0, a_report(0, 1, victims=(0,)))
    ends = messages(stage.hear(1, a_report(0, 1, victims=(1,))), Over)
    assert [(place, one.judgement) for place, one in ends] == [
        (place, stage.conductor.judgement) for place in range(3)
    ]
    assert stage.conductor.judgement is not None
    assert stage.conductor.judgement.code == stage.conductor.code == 7
    for place in range(3):
        orders = stage.hear(place, Bye())
    assert [one for one in orders if isinstance(one, Dismiss)]


@pytest.mark.parametrize("end", [Lost("has not been heard for 15 s", is_silent=True), Bye()])
def test_a_member_that_goes_later_ends_the_job(end: object) -> None:
    stage = stage_of(2, 2, restarts=3)
    assert not stage.conductor.expects(1)
    assert [place for place, _ in messages(stage.hear(1, end), Stop)] == [0]
    stage.hear(0, a_report(0, 1, victims=(0, 1)))
    assert stage.conductor.code == 1
    assert stage.said[0].startswith("node 1 (h1) (ranks 2-3) was lost: it has ")
    assert not stage.conductor.expects(1)


def test_without_a_member_that_has_ended_well_no_attempt_can_follow_and_all_hear_it() -> None:
    stage = stage_of(1, 1, restarts=3)
    stage.hear(1, a_report(0, 0))
    text = "it has ended before its time; without it no other attempt can follow"
    assert spoken(stage.hear(1, Bye())) == [f"warning: node 1 (h1): {text}"]
    stage.fail(0, 0)
    assert stage.conductor.code == 7


def test_a_failed_attempt_is_started_again_at_the_port_that_is_chosen_then() -> None:
    stage = stage_of(1, 1, restarts=1)
    stage.fail(0, 0)
    meetings = messages(stage.report_stopped(1), Meeting)
    assert {(one.attempt, one.restarts, one.reason, one.port) for _, one in meetings} == {
        (1, 1, "failure", 29501)
    }


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize(
    "action, code, how", [("stop", 138, "terminated (SIGUSR1)"), ("preempt", 75, "preempted (SIGUSR1)")]
)
def test_a_signal_between_two_attempts_ends_the_job_and_all_hear_of_it(
    action: str, code: int, how: str
) -> None:
    stage = stage_of(1, 1, restarts=9)
    while stage.conductor.deadline_s is None:
        stage.fail(1, 1)
        stage.report_stopped(0)
    judgements = [one.judgement for _, one in messages(stage.signal(10, action), Over)]
    assert [one.code for one in judgements] == [code] * 2 == [stage.conductor.code] * 2
    assert verdict(judgements[0]) == [f"{how} while waiting to start again"]


def test_without_a_port_for_the_first_attempt_the_job_ends_and_all_hear_why() -> None:
    def port_of(attempt: int) -> int:
        raise PortError("no port is free")

    stage = Stage(coming(1), port_of)
    orders = stage.hear(0, hello(0))
    assert messages(orders, Refused)[0][1].text == "no port is free"
    assert stage.said == ["error: no port is free"]


def test_without_a_port_for_the_next_attempt_all_hear_why_and_how_the_last_one_has_failed() -> None:
    def port_of(attempt: int) -> int:
        if attempt:
            raise PortError("no port is free")
        return 29500

    stage = Stage(coming(1, restarts=1), port_of)
    stage.hear(0, hello(0))
    orders = stage.fail(0, 0)
    assert messages(orders, Over) == [(0, Over(stage.conductor.judgement))]
    assert stage.conductor.judgement is not None
    assert stage.conductor.judgement.causes
    assert stage.conductor.judgement.not_tried == "no port is free"
