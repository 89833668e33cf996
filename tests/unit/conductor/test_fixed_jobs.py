"""What the head of a job orders, message by message: no process, no network, and a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.conducting import CLOSED, MS, Stage, begun, fixed, messages, spoken
from tests.support.events import a_report

from dsl.conductor.attempts import TOGETHER_S
from dsl.conductor.base import BaseConductor
from dsl.conductor.orders import Dismiss, Speak
from dsl.conductor.terms import START_S
from dsl.control.clock import Clock
from dsl.control.messages import (
    Assignment,
    Bye,
    Checked,
    Failing,
    Hello,
    Lost,
    Over,
    Preempted,
    Refused,
    Stop,
)
from dsl.model.health import Health, ProgramLook
from dsl.model.job import Meeting, Notice
from dsl.model.request import Policy


def test_nothing_starts_before_every_host_has_said_that_nothing_stands_in_the_way() -> None:
    stage = fixed(2, 3)
    assert messages(stage.hear(0, Hello("1", 0, "h", 1)), Assignment)[0][1].node_rank == 0
    assert stage.hear(0, Checked()) == []
    assert messages(stage.hear(1, Hello("1", 1, "h", 1)), Assignment)[0][1].node_rank == 1
    meetings = messages(stage.hear(1, Checked()), Meeting)
    assert [(place, one.node_rank, one.local_world_sizes) for place, one in meetings] == [
        (0, 0, (2, 3)),
        (1, 1, (2, 3)),
    ]
    assert all((one.address, one.port) == ("10.0.0.1", 29501) for _, one in meetings)


def test_a_task_of_one_rank_gets_its_place_on_its_host() -> None:
    stage = begun(1, 2, per_node=False)
    assigned = messages(stage.orders, Assignment)
    assert [(one.node_rank, one.task) for _, one in assigned] == [(0, 0), (1, 0), (1, 1)]


def test_a_task_that_its_launcher_has_placed_elsewhere_is_refused() -> None:
    stage = fixed(1, 2, per_node=False)
    stage.hear(2, Hello("1", 2, "h", 1, is_task=True, local_rank=0))
    stage.later(TOGETHER_S)
    assert any("is local rank 0 there, expected 1" in line for line in stage.said)


def test_all_problems_of_all_hosts_are_said_at_once_and_equal_ones_once() -> None:
    stage = fixed(1, 1, 1)
    for place in range(3):
        stage.hear(place, Hello("1", place, "h", 1))
    stage.hear(0, Checked(("no script", "no folder")))
    stage.hear(1, Checked())
    orders = stage.hear(2, Checked(("no script",)))
    assert stage.conductor.code == 2
    assert stage.said == ["error: hosts n0, n2: no script", "error: host n0: no folder"]
    assert [place for place, _ in messages(orders, Over)] == [0, 1, 2]
    assert not messages(stage.orders, Meeting)


def test_another_version_of_dsl_is_refused() -> None:
    stage = fixed(1, 1)
    stage.hear(0, Hello("0", 0, "h", 1))
    stage.hear(1, Hello("1", 1, "h", 1))
    stage.hear(1, Checked())
    assert stage.said == ["error: host n0: it has dsl 0, this host has 1: install the same version"]
    assert stage.conductor.code == 2


def test_a_host_that_cannot_be_reached_waits_a_moment_for_the_problems_of_the_others() -> None:
    stage = fixed(1, 1, 1)
    stage.orders += stage.conductor.starter_ended([0], "cannot be reached: no route", stage.now_s)
    stage.hear(1, Hello("1", 1, "h", 1))
    assert stage.conductor.deadline_s == stage.now_s + TOGETHER_S
    stage.hear(1, Checked(("no script",)))
    stage.later(TOGETHER_S)
    assert stage.said == ["error: host n0: cannot be reached: no route", "error: host n1: no script"]
    assert stage.conductor.code == 1


def test_a_problem_on_a_host_does_not_hide_that_another_cannot_be_reached() -> None:
    stage = fixed(1, 1)
    stage.hear(0, Hello("1", 0, "h", 1))
    stage.hear(0, Checked(("no script",)))
    stage.later(3 * TOGETHER_S)
    assert stage.said == []
    stage.orders += stage.conductor.starter_ended([1], "cannot be reached: timed out", stage.now_s)
    assert stage.said == ["error: host n0: no script", "error: host n1: cannot be reached: timed out"]
    assert stage.conductor.code == 1


def test_hosts_that_never_answer_are_named() -> None:
    stage = fixed(1, 1)
    stage.hear(0, Hello("1", 0, "h", 1))
    stage.hear(0, Checked())
    stage.later(START_S)
    assert stage.said == [f"error: host n1: has not answered within {START_S:g} s"]
    assert stage.conductor.code == 1


def test_a_taken_port_is_replaced_only_if_nobody_asked_for_it() -> None:
    stage = begun(1, 1, port=None, first={"is_port_free": False, "free_port": 4242})
    assert {one.port for _, one in messages(stage.orders, Meeting)} == {4242}
    assert stage.said == ["master port 29500 is taken on host n0, using 4242"]


def test_the_address_is_that_by_which_the_first_host_was_reached() -> None:
    stage = begun(1, 1, address="", first={"addresses": ("10.9.9.9", "10.8.8.8")})
    assert {one.address for _, one in messages(stage.orders, Meeting)} == {"10.9.9.9"}


def test_without_any_address_the_user_is_asked_for_one() -> None:
    stage = begun(1, 1, address="", first={"addresses": ()})
    assert "give --master_addr" in stage.said[0]
    assert stage.conductor.code == 2


def test_the_first_failure_stops_the_others_before_its_own_node_has_ended() -> None:
    stage = begun(1, 1, 1)
    orders = stage.hear(1, Failing(0, 1, 7, 5))
    assert [(place, stop.signum, stop.grace_s) for place, stop in messages(orders, Stop)] == [
        (0, 15, 7.0),
        (2, 15, 7.0),
    ]
    assert messages(stage.hear(2, Failing(0, 2, 1, 6)), Stop) == []


def test_the_verdict_names_the_first_cause_its_code_and_the_victims() -> None:
    stage = begun(1, 1, 1)
    stage.conductor.clocks.update({0: Clock(0, 1), 1: Clock(0, 1), 2: Clock(0, 1)})
    stage.fail(1, 1, status=9, at_ms=1)
    stage.fail(2, 2, status=1, at_ms=5)
    orders = stage.hear(0, a_report(0, 1, victims=(0,), followers=(3,)))
    assert len(messages(orders, Over)) == 3
    assert stage.conductor.code == 9
    assert stage.said == [
        "rank 1 (local rank 0, pid 1001, host n1) failed first: exit code 9",
        "last output of rank 1:",
        "  | step 7",
        "also failed: rank 2 (local rank 0, pid 1002, host n2) failed: exit code 1",
        "stopped by dsl: rank 0",
        "ended because of it: rank 3",
    ]


def test_clocks_that_differ_decide_who_was_first() -> None:
    stage = begun(1, 1)
    stage.conductor.clocks.update({0: Clock(0, MS), 1: Clock(100 * MS, MS)})
    stage.fail(0, 0, status=3, at_ms=50)
    stage.fail(1, 1, status=4, at_ms=120)  # 20 on our clock
    assert stage.conductor.code == 4
    assert "failed first" in stage.said[0]


def test_a_job_that_succeeds_ends_when_all_have_said_goodbye() -> None:
    stage = begun(1, 1)
    assert stage.hear(0, a_report(0, 0)) == []
    orders = stage.hear(1, a_report(0, 0))
    assert [place for place, _ in messages(orders, Over)] == [0, 1]
    assert stage.conductor.code == 0
    assert stage.hear(0, Bye()) == []
    assert stage.hear(1, Bye()) == [Dismiss(BaseConductor.farewell_s)]
    assert stage.said == []


def test_a_failed_attempt_is_started_again_on_all_hosts() -> None:
    stage = begun(1, 1, restarts=1)
    stage.fail(0, 0)
    orders = stage.hear(1, a_report(0, 1, victims=(1,)))
    assert [(place, one.attempt, one.round) for place, one in messages(orders, Meeting)] == [
        (0, 1, 1),
        (1, 1, 1),
    ]
    assert stage.said[-1] == "warning: starting all hosts again, restart 1 of 1"
    stage.fail(1, 1, status=5)
    stage.hear(0, a_report(1, 1, victims=(0,)))
    assert stage.conductor.code == 5
    assert stage.said[-1] == "2 attempts have failed"


def test_a_failure_that_the_policy_excludes_ends_the_job_on_all_hosts() -> None:
    stage = begun(1, 1, restarts=9, policy=Policy(restart_on=tuple(range(1, 256)), give_up_on=(3,)))
    stage.fail(0, 0)
    stage.report_stopped(1)
    assert stage.attempt == 1
    stage.fail(1, 1, status=3)
    orders = stage.report_stopped(0)
    assert sorted(place for place, _ in messages(orders, Over)) == [0, 1]
    assert stage.conductor.code == 3
    assert "not tried again: exit code 3 is in --give-up-on" in stage.said
    assert stage.said[-1] == "2 attempts have failed"


def test_a_policy_looks_for_output_on_all_hosts() -> None:
    stage = begun(1, 1, restarts=9, policy=Policy(restart_on=(7,)))
    for attempt, has_output in enumerate([False, False, True, False, False, False]):
        assert stage.attempt == attempt
        stage.fail(attempt % 2, attempt % 2, is_silent=True)
        stage.report_stopped(1 - attempt % 2, is_silent=not has_output)
    assert stage.conductor.code == 7
    assert "not tried again: exit code 7 3 times in a row, before any output of the script" in stage.said


def a_crash_loop() -> Stage:
    """Six attempts have failed at once, and the next one has to wait."""
    stage = begun(1, 1, restarts=99)
    for attempt in range(6):
        assert stage.attempt == attempt
        stage.fail(0, 0)
        stage.hear(1, a_report(attempt, 1, victims=(1,)))
    return stage


def test_a_crash_loop_waits_longer_and_longer() -> None:
    stage = a_crash_loop()
    assert stage.said[-1].startswith(
        "warning: starting all hosts again, restart 6 of 99, in 0.1 s (crash loop: 6"
    )
    assert stage.conductor.deadline_s == pytest.approx(stage.now_s + 0.1)
    assert stage.later(0.05) == []
    assert [place for place, _ in messages(stage.later(0.1), Meeting)] == [0, 1]
    assert stage.attempt == 6
    assert stage.conductor.deadline_s is None
    stage.now_s += 2.0
    stage.fail(0, 0)
    assert messages(stage.hear(1, a_report(6, 1, victims=(1,))), Meeting)


@pytest.mark.guarantee("G2")
def test_a_signal_or_a_lost_host_ends_a_job_that_waits_to_be_started_again() -> None:
    stage = a_crash_loop()
    orders = stage.signal(2)
    assert [place for place, _ in messages(orders, Over)] == [0, 1]
    assert stage.conductor.code == 130
    assert stage.said[-1] == "interrupted (SIGINT) while waiting to start again"
    stage = a_crash_loop()
    orders = stage.hear(1, CLOSED)
    assert messages(orders, Over)
    assert spoken(orders) == ["warning: host n1 was lost: it has closed the connection"]
    assert stage.conductor.code == 7
    stage = a_crash_loop()
    assert messages(stage.conductor.starters_lost("pdsh has ended", stage.now_s), Over)
    assert (stage.conductor.code, stage.conductor.notices[-1].text) == (1, "error: pdsh has ended")


def test_what_an_earlier_attempt_says_late_changes_nothing() -> None:
    stage = begun(1, 1, restarts=1)
    stage.fail(0, 0)
    stage.hear(1, a_report(0, 1))
    assert stage.hear(1, Failing(0, 1, 9, 9)) == []
    assert stage.hear(1, a_report(0, 9)) == []


def test_a_lost_host_stops_the_others_is_named_and_not_waited_for() -> None:
    stage = begun(2, 2, restarts=3)
    orders = stage.hear(1, Lost("has not been heard for 15 s"))
    assert [place for place, _ in messages(orders, Stop)] == [0]
    stage.hear(0, a_report(0, 1, victims=(0, 1)))
    assert stage.conductor.code == 1
    assert stage.said == [
        "host n1 (ranks 2-3) was lost: it has not been heard for 15 s",
        "stopped by dsl: ranks 0-1",
    ]
    assert stage.hear(0, Bye()) == [Dismiss(BaseConductor.farewell_s)]
    assert not stage.conductor.roster.is_complete


def test_a_signal_stops_all_hosts_and_the_second_ends_the_grace() -> None:
    stage = begun(1, 1)
    first = stage.signal(2)
    second = stage.signal(2)
    assert [stop.grace_s for _, stop in messages(first, Stop)] == [7.0, 7.0]
    assert [stop.grace_s for _, stop in messages(second, Stop)] == [0.0, 0.0]
    stage.hear(0, a_report(0, 1, victims=(0,)))
    stage.hear(1, a_report(0, 1, victims=(1,)))
    assert stage.conductor.code == 130
    assert stage.said[-1] == "interrupted (SIGINT): ranks 0-1 ended"


def test_the_key_by_which_the_user_ended_the_job_is_named() -> None:
    stage = begun(1, 1)
    stage.signal(2, is_key=True)
    stage.hear(0, a_report(0, 1, victims=(0,)))
    stage.hear(1, a_report(0, 1, followers=(1,)))
    assert stage.said[-1] == "interrupted (Ctrl-C): ranks 0-1 ended"


def test_a_job_whose_workers_end_well_after_a_signal_still_ends_by_it() -> None:
    stage = begun(1, 1)
    stage.signal(15)
    stage.hear(0, a_report(0, 0))
    stage.hear(1, a_report(0, 0))
    assert stage.conductor.code == 143


def test_a_preemption_gives_the_workers_its_time_and_can_be_queued_again() -> None:
    stage = begun(1, 1)
    orders = stage.signal(10, "preempt")
    assert {(stop.signum, stop.grace_s) for _, stop in messages(orders, Stop)} == {(10, 60.0)}
    stage.hear(0, a_report(0, 0))
    stage.hear(1, a_report(0, 0))
    assert stage.conductor.code == 75


@pytest.mark.guarantee("G2")
def test_a_preemption_that_reaches_the_hosts_counts_for_the_job_and_only_others_are_told() -> None:
    """A scheduler tells the agents: two of them here, and the third has to be told by us."""
    stage = begun(1, 1, 1)
    assert messages(stage.hear(1, Preempted(0, 10)), Stop) == []
    assert messages(stage.hear(0, Preempted(0, 10)), Stop) == []
    due_s = stage.conductor.deadline_s
    assert due_s is not None
    told = messages(stage.conductor.wait_is_over(due_s), Stop)
    assert [(place, one.signum, one.grace_s) for place, one in told] == [(2, 10, 60.0)]
    for place in (1, 0):
        stage.hear(place, a_report(0, 138, stop_signal=10))
    stage.hear(2, a_report(0, 0))
    assert stage.conductor.code == 75


@pytest.mark.guarantee("G2")
def test_a_preemption_while_no_worker_runs_ends_the_job_and_one_during_a_stop_lets_no_attempt_follow() -> (
    None
):
    for stage in (a_crash_loop(), fixed(1, 1)):
        stage.signal(10, "preempt")
        assert stage.conductor.code == 75
        assert stage.said[-2] == "the job was preempted, exit code 75: it can be queued again"
        assert stage.said[-1].startswith("preempted (SIGUSR1) while waiting ")
    stage = begun(1, 1, restarts=1)
    stage.fail(0, 0)
    assert stage.signal(10, "preempt") == []
    stage.report_stopped(1)
    assert stage.conductor.code == 7


def test_an_agent_that_says_goodbye_before_the_start_does_not_take_part() -> None:
    stage = fixed(1, 1)
    stage.hear(1, Hello("1", 1, "h", 1))
    stage.hear(1, Bye())
    stage.hear(1, CLOSED)
    stage.hear(0, Hello("1", 0, "h", 1))
    stage.hear(0, Checked())
    assert stage.conductor.code == 2
    assert stage.said == ["error: host n1: was lost: it has ended before its time"]


@pytest.mark.parametrize("restarts", [0, 3])
def test_an_agent_that_says_goodbye_while_its_workers_run_is_lost(restarts: int) -> None:
    """Nobody waits for its report."""
    stage = begun(1, 1, restarts=restarts)
    orders = stage.hear(1, Bye())
    assert [place for place, _ in messages(orders, Stop)] == [0]
    stage.hear(0, a_report(0, 143, victims=(0,)))
    assert stage.conductor.code == 1
    assert stage.said[-2:] == [
        "host n1 (rank 1) was lost: it has ended before its time",
        "stopped by dsl: rank 0",
    ]


def test_an_agent_that_refuses_its_part_of_an_attempt_ends_the_job() -> None:
    stage = begun(1, 1)
    orders = stage.hear(1, Refused("cannot bind", 2))
    assert [place for place, _ in messages(orders, Stop)] == [0]
    stage.hear(0, a_report(0, 1, victims=(0,)))
    assert stage.conductor.code == 2
    assert stage.said[0] == "host n1: cannot bind"


@pytest.mark.parametrize(
    "ends, said",
    [
        ((a_report(0, 0), a_report(0, 0)), []),
        ((a_report(0, 1, victims=(0, 1)), CLOSED), ["stopped by dsl: ranks 0-1"]),
    ],
)
def test_agents_whose_launcher_has_ended_get_their_grace_and_it_is_named(
    ends: tuple[object, ...], said: list[str]
) -> None:
    stage = begun(2, 2, restarts=3)
    orders = stage.conductor.starters_lost("pdsh was killed by SIGKILL (signal 9)", stage.now_s)
    assert [(place, stop.grace_s) for place, stop in messages(orders, Stop)] == [(0, 7.0), (1, 7.0)]
    for place, end in enumerate(ends):
        stage.hear(place, end)
    assert stage.conductor.code == 1
    assert stage.said == ["pdsh was killed by SIGKILL (signal 9)", *said]


def test_agents_that_do_not_answer_any_more_are_not_waited_for_without_a_launcher() -> None:
    stage = begun(1, 1)
    stage.orders += stage.conductor.starters_lost("pdsh has ended with 1", stage.now_s)
    stage.hear(0, a_report(0, 1, victims=(0,)))
    stage.later(7.0 + BaseConductor.farewell_s)
    stage.later(BaseConductor.farewell_s)
    assert stage.conductor.roster.is_done
    assert stage.conductor.code == 1


def test_a_clock_that_is_wrong_and_a_machine_that_is_named_twice_are_worth_a_word() -> None:
    stage = fixed(1, 1)
    stage.conductor.clocks[1] = Clock(-3_600_000 * MS, MS)
    for place in range(2):
        stage.hear(place, Hello("1", place, "h", 1))
        stage.hear(place, Checked(machine="the same"))
    assert [line.partition(",")[0] for line in stage.said] == [
        "warning: hosts n0",
        "warning: the clock of host n1 is 3600.0 s behind this one's (to within 1.0 ms): times in their logs do not compare",
    ]
    assert len(messages(stage.orders, Meeting)) == 2


def looked_at(python: str = "3.12.1", torch: str = "2.6.0", **fields: Any) -> Health:
    """What a host knows of itself with ``--doctor-first``."""
    return Health(program=ProgramLook("/bin/python", python, torch), **fields)


def test_what_the_doctor_finds_between_the_hosts_is_said_once_before_the_first_attempt() -> None:
    stage = begun(1, 1, first={"health": looked_at()}, restarts=1)
    assert messages(stage.orders, Meeting)
    stage = fixed(1, 1, 1, restarts=1)
    settings = (("CUDA_LAUNCH_BLOCKING", "1"),)
    for place, python in enumerate(("3.12.1", "3.12.4", "3.11.0")):
        stage.come(place, health=looked_at(python, variables=settings))
    warnings = [line for line in stage.said if "[" in line]
    assert warnings == [
        "warning: n0, n1, n2: CUDA_LAUNCH_BLOCKING=1 makes training much slower: unset it after debugging [slow-settings]",
        "warning: Python differs: 3.12 on n0, n1; 3.11 on n2; use the same version on every host [python-version]",
    ]
    stage.fail(0, 0)
    stage.report_stopped(1, 2)
    stage.later(9)
    assert stage.attempt == 1
    assert [line for line in stage.said if "[" in line] == warnings


def test_an_error_of_the_doctor_between_the_hosts_ends_the_job_before_a_worker_starts() -> None:
    stage = fixed(1, 1)
    stage.come(0, health=looked_at())
    orders = stage.come(1, health=looked_at("3.11.0", "2.7.0"))
    assert stage.conductor.code == 2
    assert stage.said == [
        "warning: Python differs: 3.12 on n0; 3.11 on n1; use the same version on every host [python-version]",
        "error: torch differs: 2.6.0 on n0; 2.7.0 on n1; install the same version on every host [torch-version]",
    ]
    assert [place for place, _ in messages(orders, Over)] == [0, 1]
    assert not messages(stage.orders, Meeting)


def test_a_launcher_that_dies_of_a_failure_does_not_hide_it() -> None:
    stage = begun(1, 1)
    stage.fail(1, 1, status=9)
    assert stage.conductor.starters_lost("mpirun has ended with 9", stage.now_s) == []
    stage.hear(0, a_report(0, 1, victims=(0,)))
    assert stage.conductor.code == 9
    assert stage.said[0] == "rank 1 (local rank 0, pid 1001, host n1) failed first: exit code 9"


def test_a_launcher_that_dies_before_the_start_ends_the_job() -> None:
    stage = fixed(1, 1)
    stage.hear(0, Hello("1", 0, "h", 1))
    orders = stage.conductor.starters_lost("pdsh was killed by SIGKILL (signal 9)", stage.now_s)
    assert messages(orders, Over) == [(0, Over())]
    assert (stage.conductor.code, stage.said) == (1, ["error: pdsh was killed by SIGKILL (signal 9)"])


def test_a_launcher_that_ends_with_the_job_is_nothing_special() -> None:
    stage = begun(1)
    stage.hear(0, a_report(0, 0))
    assert stage.conductor.starters_lost("pdsh has ended with 0", stage.now_s) == []
    assert (stage.conductor.code, stage.said) == (0, [])


def test_a_host_that_stops_for_a_reason_of_its_own_is_named_and_no_restart_follows() -> None:
    """Its guard was killed: it can start nothing."""
    stage = begun(1, 1, restarts=2)
    stage.hear(1, a_report(0, 137, victims=(1,)))
    stage.hear(0, a_report(0, 1, victims=(0,)))
    assert stage.conductor.code == 137
    assert stage.said == ["host n1 has stopped its workers, exit code 137", "stopped by dsl: ranks 0-1"]


def test_a_signal_of_the_scheduler_to_a_host_is_the_code_of_the_job() -> None:
    stage = begun(1, 1)
    stage.hear(1, a_report(0, 143, stop_signal=15, victims=(1,)))
    stage.hear(0, a_report(0, 1, victims=(0,)))
    assert (stage.conductor.code, stage.said) == (143, ["terminated (SIGTERM): ranks 0-1 ended"])


def test_agents_whose_output_nobody_reads_are_waited_for() -> None:
    stage = begun(1)
    stage.hear(0, a_report(0, 0))
    for _ in range(3):
        stage.now_s += BaseConductor.farewell_s
        stage.conductor.wait_longer(stage.now_s)
        assert stage.later(0.0) == []
    assert stage.later(BaseConductor.farewell_s) == [Dismiss(BaseConductor.farewell_s)]


def test_a_signal_ends_the_waiting_for_who_reads_the_output() -> None:
    stage = begun(1, 1)
    stage.hear(0, a_report(0, 0))
    stage.hear(1, a_report(0, 0))
    orders = stage.signal(15)
    assert orders[0] == Speak(Notice("warning", "SIGTERM received: output that nobody has read is lost"))
    assert orders[1:] == [Dismiss(BaseConductor.farewell_s)]
    assert stage.conductor.code == 143


def test_a_failure_keeps_its_code_when_its_output_is_cut() -> None:
    stage = begun(1)
    stage.fail(0, 0, status=9)
    stage.signal(15)
    assert stage.conductor.code == 9
