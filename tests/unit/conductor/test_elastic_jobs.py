"""What the head of an elastic job orders, message by message: no process, no network, and a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.conducting import CLOSED, MS, elastic, messages
from tests.support.events import a_report

from dsl.conductor.attempts import TOGETHER_S
from dsl.conductor.conductor import COMPANY_S, STEADY_S
from dsl.conductor.members import LONGEST_RETRY_S, MENDED_S, RETRY_S
from dsl.conductor.orders import Dismiss, Drop, Reach
from dsl.conductor.restarts import MOST_FRUITLESS
from dsl.conductor.terms import LAST_CALL_S, START_S
from dsl.control.messages import Assignment, Bye, Checked, Failing, Forward, Hello, Lost, Over, Refused, Stop
from dsl.model.job import Meeting
from dsl.model.request import Policy


def reached(orders: list[Any]) -> list[int]:
    """Places that are to be reached."""
    return [one.place for one in orders if isinstance(one, Reach)]


# ------------------------------------------------------------------ the start


def test_when_all_hosts_have_come_the_job_starts_at_once_in_the_order_of_the_hostfile() -> None:
    stage = elastic(2, 2, 2)
    stage.come(2, 0)
    assert not messages(stage.orders, Meeting)
    stage.come(1)
    assert stage.members() == [(0, 0), (1, 1), (2, 2)]
    meeting = stage.meeting
    assert (meeting.attempt, meeting.restarts, meeting.reason) == (0, 0, "start")
    assert (meeting.address, meeting.port, meeting.world_size) == ("10.0.0.0", 29500, 6)


def test_every_agent_knows_that_it_may_have_to_wait() -> None:
    stage = elastic(1, 1)
    stage.come(1)
    ((place, assignment),) = messages(stage.orders, Assignment)
    assert (place, assignment.node_rank, assignment.is_elastic) == (1, 1, True)


def test_enough_hosts_wait_for_the_last_call_while_others_are_starting() -> None:
    stage = elastic(1, 1, 1, least=2)
    stage.come(0, 2)
    assert not messages(stage.later(LAST_CALL_S - 1), Meeting)
    stage.later(1)
    assert stage.members() == [(0, 0), (2, 1)]


def test_nobody_waits_for_a_host_that_cannot_be_reached() -> None:
    stage = elastic(1, 1, 1, least=2)
    stage.come(0, 2)
    stage.miss(1)
    assert stage.members() == [(0, 0), (2, 1)]
    assert "warning: host n1: cannot be reached: no route; it is tried again" in stage.said


def test_a_host_that_cannot_be_reached_is_tried_again_later_and_later_and_named_once() -> None:
    stage = elastic(1, 1)
    stage.come(0)
    pauses = []
    for _ in range(9):
        stage.miss(1)
        before_s = stage.now_s
        while not reached(stage.later(0.5)):
            pass
        pauses.append(stage.now_s - before_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert (pauses[0], pauses[-1]) == (RETRY_S, LONGEST_RETRY_S)
    assert sum("cannot be reached" in line for line in stage.said) == 1


def test_a_host_that_does_not_answer_is_tried_again() -> None:
    stage = elastic(1, 1)
    stage.come(0)
    orders = stage.later(START_S)
    assert Drop(1) in orders
    assert reached(stage.later(RETRY_S)) == [1]


def test_a_queue_of_slurm_is_waited_for() -> None:
    stage = elastic(1, 1, launcher="slurm")
    stage.come(0)
    stage.later(LAST_CALL_S)
    assert not [one for one in stage.later(10 * START_S) if isinstance(one, (Drop, Reach))]


def test_too_few_hosts_are_waited_for_so_long_and_then_named() -> None:
    stage = elastic(1, 1, 1, least=3)
    stage.come(0, 1)
    stage.miss(2)
    assert stage.said[-1] == "warning: 2 of at least 3 hosts are there: waiting for more, 600 s at most"
    for _ in range(600):
        stage.later(1.0)
        if 2 in reached(stage.orders[-3:]):
            stage.miss(2)
    assert stage.conductor.code == 1
    assert stage.said[-2:] == [
        "error: 2 of at least 3 hosts are there, and no more came within 600 s",
        "error: host n2: cannot be reached: no route",
    ]


def test_when_something_is_wrong_on_too_many_hosts_all_of_it_is_said_and_nothing_starts() -> None:
    stage = elastic(1, 1, 1, least=2)
    for place in (0, 1):
        stage.hear(place, Hello("1", place, "h", 1))
        stage.hear(place, Checked(("no script",)))
    stage.later(TOGETHER_S)
    assert stage.conductor.code == 2
    assert stage.said == ["error: hosts n0, n1: no script"]
    assert not messages(stage.orders, Meeting)


def test_a_host_where_something_is_wrong_is_left_out_and_asked_again_later() -> None:
    stage = elastic(1, 1, 1, least=2)
    stage.come(0)
    stage.hear(1, Hello("1", 1, "h", 1))
    orders = stage.hear(1, Checked(("no script",)))
    assert messages(orders, Over) == [(1, Over())]
    stage.come(2)
    assert stage.members() == [(0, 0), (2, 1)]
    assert "warning: host n1 cannot take part: no script" in stage.said
    stage.hear(1, Bye())
    stage.hear(1, CLOSED)
    assert reached(stage.later(MENDED_S)) == [1]


def test_another_version_of_dsl_is_left_out() -> None:
    stage = elastic(1, 1)
    stage.come(0)
    stage.hear(1, Hello("0", 1, "h", 1))
    assert stage.members() == [(0, 0)]
    assert any("it has dsl 0, this host has 1" in line for line in stage.said)


def test_the_hosts_that_stand_first_are_taken_if_they_come_in_time() -> None:
    stage = elastic(1, 1, 1, most=2)
    stage.come(1, 2)
    assert not messages(stage.orders, Meeting)
    stage.come(0)
    assert stage.members() == [(0, 0), (1, 1)]
    assert "host n2 is a spare, in case that another is lost" in stage.said


def test_the_address_is_one_of_the_host_of_rank_0() -> None:
    stage = elastic(1, 1, address="10.0.0.0")
    stage.come(1)
    stage.miss(0)
    assert stage.meeting.address == "10.0.0.1"


def test_a_port_that_is_taken_on_the_host_of_rank_0_is_replaced() -> None:
    stage = elastic(1, port=29501)
    stage.come(0, is_port_free=False, free_port=4242)
    assert stage.meeting.port == 4242
    assert stage.said == ["master port 29501 is taken on host n0, using 4242"]


def test_when_the_waiting_is_over_the_hosts_that_are_there_begin_if_they_are_enough() -> None:
    stage = elastic(1, 1, 1, least=2, wait_s=5.0)
    stage.come(0, 1)
    stage.later(5.0)
    assert stage.members() == [(0, 0), (1, 1)]
    assert stage.conductor.code is None


# ------------------------------------------------------------------ hosts come and go


def test_a_lost_host_is_a_change_of_membership_that_costs_no_restart() -> None:
    stage = elastic(2, 2, 2, restarts=0)
    stage.come(0, 1, 2)
    orders = stage.hear(1, CLOSED)
    assert [(place, stop.grace_s) for place, stop in messages(orders, Stop)] == [(0, 7.0), (2, 7.0)]
    stage.report_stopped(0)
    stage.report_stopped(2)
    assert stage.members() == [(0, 0), (2, 1)]
    meeting = stage.meeting
    assert (meeting.attempt, meeting.restarts, meeting.reason) == (1, 0, "membership")
    assert meeting.local_world_sizes == (2, 2)
    assert "warning: host n1 (ranks 2-3) was lost: it has closed the connection" in stage.said
    assert reached(stage.later(RETRY_S)) == [1]


def test_workers_that_fail_because_a_host_is_lost_cost_no_restart_either() -> None:
    stage = elastic(1, 1, 1, restarts=0)
    stage.come(0, 1, 2)
    stage.fail(0, 0, status=1)
    stage.report_stopped(2)
    assert stage.conductor.code is None
    stage.hear(1, Lost("has not been heard for 15 s", is_silent=True))
    assert (stage.meeting.attempt, stage.meeting.reason) == (1, "membership")


def test_a_worker_that_fails_before_its_host_is_lost_costs_one() -> None:
    stage = elastic(1, 1, restarts=0)
    stage.come(0, 1)
    stage.hear(1, Failing(0, 1, 9, MS))
    stage.report_stopped(0)
    stage.hear(1, CLOSED)
    assert stage.conductor.code == 9
    assert stage.said[-2].startswith("rank 1 failed with 9, then host n1")


def test_a_silent_host_is_tried_again_only_when_it_must_have_seen_that_we_are_gone() -> None:
    stage = elastic(1, 1, heartbeat_s=15.0)
    stage.come(0, 1)
    stage.hear(1, Lost("has not been heard for 15 s", is_silent=True))
    assert not reached(stage.later(14.0))
    assert reached(stage.later(1.0)) == [1]


def test_a_host_that_comes_back_is_taken_in_at_its_old_place() -> None:
    stage = elastic(2, 2, 2)
    stage.come(0, 1, 2)
    stage.hear(1, CLOSED)
    stage.report_stopped(0, 2)
    stage.later(RETRY_S)
    orders = stage.come(1)
    assert [place for place, _ in messages(orders, Stop)] == [0, 2]
    stage.report_stopped(0, 2)
    assert stage.members() == [(0, 0), (1, 1), (2, 2)]
    assert (stage.meeting.attempt, stage.meeting.restarts, stage.meeting.reason) == (2, 0, "membership")
    assert stage.said[-2:] == [
        "host n1 has come: starting again with all of them",
        "running on 3 of 3 hosts with 6 workers: n0, n1, n2",
    ]


def test_hosts_that_come_together_are_taken_in_together_but_do_not_wait_long_for_company() -> None:
    together, alone = elastic(1, 1, 1), elastic(1, 1, 1)
    for stage in (together, alone):
        stage.come(0)
        stage.miss(1)
        stage.miss(2)
        stage.later(RETRY_S)
        assert not messages(stage.come(1), Stop)
    assert [place for place, _ in messages(together.come(2), Stop)] == [0]
    together.report_stopped(0)
    assert len(together.members()) == 3
    assert [place for place, _ in messages(alone.later(COMPANY_S), Stop)] == [0]


def test_a_spare_takes_the_place_of_a_lost_host_at_once() -> None:
    stage = elastic(1, 1, 1, least=2, most=2)
    stage.come(0, 1, 2)
    assert stage.members() == [(0, 0), (1, 1)]
    stage.hear(0, CLOSED)
    stage.report_stopped(1)
    assert stage.members() == [(2, 0), (1, 1)]
    assert "host n2 takes the place of host n0" in stage.said


def test_a_spare_that_is_lost_disturbs_nobody() -> None:
    stage = elastic(1, 1, 1, most=2)
    stage.come(0, 1, 2)
    assert not messages(stage.hear(2, CLOSED), Stop)
    assert reached(stage.later(RETRY_S)) == [2]


def test_workers_are_not_stopped_for_a_host_when_some_of_them_have_ended_well() -> None:
    stage = elastic(1, 1, 1)
    stage.come(0, 1)
    stage.miss(2)
    stage.hear(0, a_report(0, 0))
    stage.later(RETRY_S)
    assert not messages(stage.come(2), Stop)
    stage.hear(1, a_report(0, 0))
    assert stage.conductor.code == 0


def test_a_host_whose_agent_was_told_to_end_leaves() -> None:
    stage = elastic(1, 1, restarts=0)
    stage.come(0, 1)
    orders = stage.hear(1, a_report(0, 143, stop_signal=15, victims=(1,)))
    assert messages(orders, Over) == [(1, Over())]
    assert [place for place, _ in messages(orders, Stop)] == [0]
    stage.report_stopped(0)
    assert stage.members() == [(0, 0)]
    assert "warning: host n1 has left: SIGTERM received there" in stage.said
    stage.hear(1, Bye())
    stage.hear(1, CLOSED)
    assert reached(stage.later(LONGEST_RETRY_S - 1)) == []
    assert reached(stage.later(1)) == [1]


def test_below_the_least_the_job_waits_and_goes_on_when_a_host_comes() -> None:
    stage = elastic(1, 1, least=2)
    stage.come(0, 1)
    stage.hear(1, CLOSED)
    stage.report_stopped(0)
    assert stage.said[-1] == "warning: 1 of at least 2 hosts is there: waiting for more, 600 s at most"
    stage.later(RETRY_S)
    stage.come(1)
    assert (stage.meeting.attempt, len(stage.members())) == (1, 2)


def test_below_the_least_for_too_long_the_verdict_names_what_was_lost() -> None:
    stage = elastic(1, 1, least=2, wait_s=5.0)
    stage.come(0, 1)
    stage.hear(1, CLOSED)
    stage.report_stopped(0)
    stage.later(5.0)
    assert stage.conductor.code == 1
    assert stage.said[-4:] == [
        "host n1 (rank 1) was lost: it has closed the connection",
        "stopped by dsl: rank 9",
        "error: 1 of at least 2 hosts is there, and no more came within 5 s",
        "error: host n1: was lost: it has closed the connection",
    ]


@pytest.mark.parametrize(
    "said, warning",
    [
        (Refused("cannot bind", 2), "warning: host n1 cannot take part: cannot bind"),
        (Bye(), "warning: host n1 (rank 1) was lost: it has ended before its time"),
        (a_report(0, 1, victims=(1,), survivors=1), ""),
    ],
    ids=["cannot start its part", "ends without a report", "has workers that would not end"],
)
def test_a_host_that_cannot_go_on_is_left_out(said: object, warning: str) -> None:
    stage = elastic(1, 1, restarts=0 if warning else 100)
    stage.come(0, 1)
    if warning:
        stage.hear(1, said)
        stage.report_stopped(0)
    else:
        stage.fail(0, 0)
        stage.hear(1, said)
    assert stage.members() == [(0, 0)]
    assert not warning or warning in stage.said


def test_a_host_that_is_lost_over_and_over_ends_the_job() -> None:
    stage = elastic(1, 1, least=2)
    stage.come(0, 1)
    for _ in range(MOST_FRUITLESS):
        assert stage.conductor.code is None
        stage.hear(1, CLOSED)
        stage.report_stopped(0)
        stage.later(LONGEST_RETRY_S)
        stage.come(1)
    assert stage.conductor.code == 1
    assert stage.said[-1] == "host n1 was lost over and over as soon as its workers ran: the job is given up"


def test_a_host_that_has_been_steady_is_tried_again_without_delay() -> None:
    stage = elastic(1, 1)
    stage.come(0, 1)
    for _ in range(4):
        stage.now_s += STEADY_S
        stage.hear(1, CLOSED)
        stage.report_stopped(0)
        assert reached(stage.later(RETRY_S)) == [1]
        stage.come(1)
        stage.report_stopped(0)


# ------------------------------------------------------------------ the number of workers


def test_only_a_number_of_workers_that_the_job_accepts_is_started() -> None:
    stage = elastic(1, 1, 1, world_sizes=(1, 2))
    stage.come(0, 1, 2)
    assert stage.members() == [(0, 0), (1, 1)]
    assert "host n2 is a spare, in case that another is lost" in stage.said


def test_hosts_that_make_no_accepted_number_wait_for_others() -> None:
    stage = elastic(2, 2, 2, 2, least=2, world_sizes=(8,))
    stage.come(0, 1, 2)
    stage.miss(3)
    assert not messages(stage.orders, Meeting)
    assert "3 hosts are there, but none of them make a number of workers that is valid (8)" in stage.said[-1]
    stage.later(RETRY_S)
    stage.come(3)
    assert len(stage.members()) == 4


# ------------------------------------------------------------------ workers that fail


def test_a_worker_that_fails_costs_a_restart() -> None:
    stage = elastic(1, 1, restarts=1)
    stage.come(0, 1)
    stage.now_s += 60
    assert [place for place, _ in messages(stage.fail(0, 0), Stop)] == [1]
    stage.report_stopped(1)
    assert (stage.meeting.attempt, stage.meeting.restarts, stage.meeting.reason) == (1, 1, "failure")
    assert stage.said[-1] == "warning: starting all hosts again, restart 1 of 1"


def test_when_the_restarts_are_spent_the_code_is_that_of_the_last_first_failure() -> None:
    stage = elastic(1, 1, restarts=1)
    stage.come(0, 1)
    stage.fail(0, 0, status=3)
    stage.report_stopped(1)
    stage.fail(1, 1, status=5)
    orders = stage.report_stopped(0)
    assert sorted(place for place, _ in messages(orders, Over)) == [0, 1]
    assert stage.conductor.code == 5
    assert stage.said[-5:] == [
        "rank 1 (local rank 0, pid 1001, host n1) failed first: exit code 5",
        "last output of rank 1:",
        "  | step 7",
        "stopped by dsl: rank 9",
        "2 attempts have failed",
    ]
    stage.hear(0, Bye())
    assert [one for one in stage.hear(1, Bye()) if isinstance(one, Dismiss)]


def test_a_policy_holds_for_failures_and_not_for_lost_hosts() -> None:
    stage = elastic(1, 1, policy=Policy(restart_on=(5,)))
    stage.come(0, 1)
    stage.hear(1, CLOSED)
    stage.report_stopped(0)
    assert (stage.attempt, stage.meeting.reason) == (1, "membership")
    stage.fail(0, 0, status=5)
    assert (stage.attempt, stage.meeting.reason) == (2, "failure")
    stage.fail(0, 0, status=3)
    assert stage.conductor.code == 3
    assert "not tried again: exit code 3 is not in --restart-on" in stage.said


def test_a_failure_while_hosts_are_taken_in_costs_a_restart() -> None:
    stage = elastic(1, 1, 1)
    stage.come(0, 1)
    stage.miss(2)
    stage.later(RETRY_S)
    stage.come(2)
    stage.fail(0, 0)
    stage.report_stopped(1)
    assert (stage.meeting.restarts, stage.meeting.reason) == (1, "failure")
    assert len(stage.members()) == 3


def test_attempts_that_fail_at_once_follow_later_and_later_and_are_given_up() -> None:
    stage = elastic(1, gives_up=True)
    stage.come(0)
    pauses = []
    for _ in range(MOST_FRUITLESS):
        before_s, attempt = stage.now_s, stage.attempt
        stage.fail(0, 0)
        while stage.conductor.code is None and stage.attempt == attempt:
            stage.later(0.5)
        pauses.append(stage.now_s - before_s)
    assert pauses == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.0]
    assert stage.conductor.code == 7
    assert stage.said[-1].startswith("crash loop: 10 attempts in a row failed the same way")
    assert stage.said[-1].endswith(": the job is given up")


def test_restarts_that_were_counted_out_are_all_spent() -> None:
    stage = elastic(1, restarts=MOST_FRUITLESS + 1)
    stage.come(0)
    for _ in range(MOST_FRUITLESS + 1):
        stage.fail(0, 0)
        stage.later(60.0)
    assert stage.conductor.code is None
    stage.fail(0, 0)
    assert stage.conductor.code == 7


def test_a_host_that_stops_its_workers_for_a_reason_of_its_own_is_left_out() -> None:
    stage = elastic(1, 1, restarts=0)
    stage.come(0, 1)
    orders = stage.hear(1, a_report(0, 137, victims=(1,)))
    assert messages(orders, Over) == [(1, Over())]
    stage.report_stopped(0)
    assert (stage.members(), stage.meeting.reason) == ([(0, 0)], "membership")
    assert "warning: host n1 is left out: it has stopped its workers, exit code 137" in stage.said
    assert reached(stage.later(RETRY_S)) == [1]


# ------------------------------------------------------------------ signals, and the end


def test_a_job_that_succeeds_ends_on_all_hosts_spares_too() -> None:
    stage = elastic(1, 1, most=1)
    stage.come(0, 1)
    orders = stage.hear(0, a_report(0, 0))
    assert [place for place, _ in messages(orders, Over)] == [0, 1]
    assert stage.conductor.code == 0
    stage.hear(0, Bye())
    assert [one for one in stage.hear(1, Bye()) if isinstance(one, Dismiss)]
    assert stage.conductor.roster.is_done


def test_a_signal_stops_the_workers_and_disturbs_no_spare() -> None:
    stage = elastic(1, 1, most=1)
    stage.come(0, 1)
    orders = stage.signal(15)
    assert [place for place, _ in messages(orders, Stop)] == [0]
    stage.report_stopped(0)
    assert stage.conductor.code == 143


def test_a_signal_while_the_job_waits_for_hosts_ends_it_at_once() -> None:
    stage = elastic(1, 1, least=2)
    stage.come(0)
    orders = stage.signal(2)
    assert messages(orders, Over) == [(0, Over())]
    assert stage.conductor.code == 130
    assert stage.said[-1] == "interrupted (SIGINT) while waiting for host n1"


def test_a_forwarded_signal_reaches_those_whose_workers_run() -> None:
    stage = elastic(1, 1, 1, most=2)
    stage.come(0, 1, 2)
    assert messages(stage.signal(10, "forward"), Forward) == [(0, Forward(10)), (1, Forward(10))]


def test_a_host_that_comes_when_the_job_is_over_is_sent_home() -> None:
    stage = elastic(1, 1)
    stage.come(0)
    stage.miss(1)
    stage.hear(0, a_report(0, 0))
    assert messages(stage.hear(1, Hello("1", 1, "h", 1)), Over) == [(1, Over())]
    stage.hear(0, Bye())
    assert stage.conductor.roster.is_done


def test_when_what_keeps_the_programs_is_lost_the_job_ends() -> None:
    stage = elastic(1, 1)
    stage.come(0, 1)
    orders = stage.note(stage.conductor.starters_lost("python was killed by SIGKILL", stage.now_s))
    assert [place for place, _ in messages(orders, Stop)] == [0, 1]
    stage.report_stopped(0)
    stage.later(60.0)
    assert stage.conductor.code == 1
    assert stage.said[-2] == "python was killed by SIGKILL"


def test_the_end_does_not_wait_for_hosts_that_are_tried_again() -> None:
    stage = elastic(1, 1)
    stage.come(0)
    stage.miss(1)
    stage.hear(0, a_report(0, 0))
    orders = stage.hear(0, Bye())
    assert [one for one in orders if isinstance(one, Dismiss)]
    assert stage.conductor.deadline_s is None
