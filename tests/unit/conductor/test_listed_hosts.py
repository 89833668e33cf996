"""What follows when the list of hosts of an elastic job changes: message by message."""

from __future__ import annotations

from typing import Any

from tests.support.conducting import CLOSED, Stage, a_job, messages, reached

from dsl.conductor.listed import ListedConductor
from dsl.conductor.members import MENDED_S
from dsl.conductor.orders import Reach
from dsl.control.messages import Bye, Hello, Over, Refused, Stop
from dsl.plan.remote import Remote


class Listed(Stage):
    """A job with hosts n0, n1 and so on, of one slot each."""

    conductor: ListedConductor

    def __init__(self, count: int, least: int = 1, most: int = 9) -> None:
        self._remote = Remote("ssh", wait_s=600.0, least_nodes=least, most_nodes=most)
        super().__init__(self._terms(count))
        self.conductor = ListedConductor(self.terms, self.now_s)

    def _terms(self, count: int) -> Any:
        job = a_job(*[1] * count, is_elastic=True, restarts=100, address="", port=None)
        return reached(job, self._remote)

    def list(self, *places: int) -> list[Any]:
        """The list has these hosts now."""
        self.terms = self._terms(max(len(self.conductor.roster), *[place + 1 for place in places]))
        return self.note(self.conductor.list_hosts(self.terms, places, self.now_s))


def running(count: int, **how: int) -> Listed:
    """A job that runs on all of its hosts."""
    stage = Listed(count, **how)
    stage.come(*range(count))
    assert len(stage.members()) == count
    return stage


def reaches(orders: list[Any]) -> list[int]:
    return [one.place for one in orders if isinstance(one, Reach)]


def told(orders: list[Any], kind: type) -> list[int]:
    return [place for place, _ in messages(orders, kind)]


def test_a_list_that_says_what_is_known_changes_nothing() -> None:
    assert running(2).list(1, 0) == []


def test_a_new_host_is_reached_and_taken_in() -> None:
    stage = running(2)
    assert reaches(stage.list(0, 1, 2)) == [2]
    assert told(stage.come(2), Stop) == [0, 1]
    stage.report_stopped(0, 1)
    assert stage.members() == [(0, 0), (1, 1), (2, 2)]
    assert (stage.meeting.attempt, stage.meeting.restarts, stage.meeting.reason) == (1, 0, "membership")
    assert "running on 3 of 3 hosts with 3 workers: n0, n1, n2" in stage.said


def test_a_new_host_is_a_spare_where_the_most_are_there() -> None:
    stage = running(2, most=2)
    stage.list(0, 1, 2)
    assert told(stage.come(2), Stop) == []
    assert "host n2 is a spare, in case that another is lost" in stage.said


def test_a_job_that_waits_for_hosts_starts_with_those_that_are_listed_later() -> None:
    stage = Listed(1, least=2)
    stage.come(0)
    stage.list(0, 1)
    stage.come(1)
    assert len(stage.members()) == 2


def test_a_host_that_leaves_the_list_is_let_go_after_its_report_and_costs_no_restart() -> None:
    stage = running(3)
    orders = stage.list(0, 2)
    assert told(orders, Stop) == [0, 1, 2]
    assert told(orders, Over) == []
    assert told(stage.report_stopped(1), Over) == [1]
    stage.report_stopped(0, 2)
    assert stage.members() == [(0, 0), (2, 1)]
    assert (stage.meeting.restarts, stage.meeting.reason) == (0, "membership")
    stage.hear(1, Bye())
    assert reaches(stage.later(1000.0)) == []
    assert "host n1 is not listed any more" in stage.said
    assert "running on 2 of 2 hosts with 2 workers: n0, n2" in stage.said


def test_a_spare_that_leaves_the_list_disturbs_nobody() -> None:
    stage = Listed(3, most=2)
    stage.come(0, 1, 2)
    orders = stage.list(0, 1)
    assert told(orders, Stop) == []
    assert told(orders, Over) == [2]


def test_a_host_that_leaves_the_list_while_it_starts_is_sent_home_when_it_comes() -> None:
    stage = running(2)
    stage.list(0, 1, 2)
    stage.list(0, 1)
    assert told(stage.hear(2, Hello("1", 2, "h", 1)), Over) == [2]
    assert reaches(stage.later(1000.0)) == []
    assert len(stage.members()) == 2


def test_a_host_that_has_gone_is_not_tried_again_whatever_befalls_it() -> None:
    for message in (CLOSED, Refused("no")):
        stage = running(2)
        stage.list(0)
        stage.hear(1, message)
        assert reaches(stage.later(MENDED_S)) == []
        stage.report_stopped(0)
        assert stage.members() == [(0, 0)]


def test_a_host_that_comes_back_is_reached_again() -> None:
    stage = running(2)
    stage.list(0)
    stage.report_stopped(0, 1)
    stage.hear(1, Bye())
    assert reaches(stage.list(0, 1)) == [1]
    stage.come(1)
    stage.report_stopped(0)
    assert stage.members() == [(0, 0), (1, 1)]


def test_a_host_that_is_back_before_its_workers_have_ended_goes_on_with_the_others() -> None:
    stage = running(2)
    stage.list(0)
    assert reaches(stage.list(0, 1)) == []
    stage.report_stopped(0, 1)
    assert stage.members() == [(0, 0), (1, 1)]


def test_too_few_hosts_in_the_list_are_waited_for_and_then_named() -> None:
    stage = running(2, least=2)
    stage.list(0)
    stage.report_stopped(0, 1)
    assert "1 of at least 2 hosts is there: waiting for more, 600 s at most" in str(stage.said)
    stage.later(600.0)
    assert stage.conductor.code == 1
    assert any("host n1: is not listed any more" in line for line in stage.said), stage.said


def test_a_list_after_the_end_changes_nothing() -> None:
    stage = running(1)
    stage.signal(15)
    stage.report_stopped(0)
    assert stage.list(0, 1) == []
