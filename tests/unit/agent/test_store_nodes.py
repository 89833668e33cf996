"""A node of a job that meets through a store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.events import a_plan, a_signal, an_attempt, an_exit, end
from tests.unit.agent.test_part import FIRST, Talk

from dsl._record import replace
from dsl.agent.calling import Calling, Orphaned
from dsl.agent.fixed_nodes import ended_without_us
from dsl.agent.joining import store_joining
from dsl.agent.torch_nodes import StoreMember
from dsl.control.messages import Checked, Lost, MeetByTorch, Over, Stop
from dsl.model.job import Job, MeetingPoint, Notice
from dsl.model.judgement import Judgement
from dsl.model.outcome import Awaiting, Decision
from dsl.model.request import Program
from dsl.plan.job import JobPlan
from dsl.plan.worker import ELASTIC
from dsl.rendezvous.delegate_messages import Claimed

JOB = Job(ELASTIC, Program("script", "t.py"), MeetingPoint("dynamic", "", None, "c10d", "n0"), run_id="j")


class Heir:
    def decide(self, _event: object, _last: object) -> Decision:
        return Decision("stop")


class Nodes(Talk):
    """The way to the conductor, and what else the member asks for."""

    has_sought, is_patient = False, True
    offer = staticmethod(Checked)

    def seek(self, _last: object) -> bool:
        self.has_sought = True
        return self.is_patient

    def yield_to_torch(self, _order: object) -> Heir:
        """The next decider."""
        return Heir()


def a_member(nodes: Any) -> StoreMember:
    return StoreMember(nodes, nodes, FIRST)


def test_a_node_that_comes_late_takes_the_number_of_the_attempt_of_the_others() -> None:
    later = replace(FIRST, attempt=5, round=5)
    nodes: Any = Nodes()
    assert StoreMember(nodes, nodes, later).meet(0, 2) == later


def test_without_a_conductor_another_one_decides() -> None:
    member, last = a_member(Nodes([MeetByTorch(1)], [Stop(15, 1.0)])), an_attempt(a_plan(2), [], end())
    (event,) = member.read()
    assert member.decide(event, last) == Decision("go_on", told=Awaiting(last, "meeting"))
    assert member.decide(object(), last) == Decision("stop")


def test_what_comes_together_with_the_first_meeting_is_heard_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node was frozen for a while, or the machine is busy."""
    facts: Any = SimpleNamespace(names=SimpleNamespace(host="h", pid=1))
    claimed = Claimed(1, 1, "10.0.0.2", "n1", "10.0.0.1", 4000, "00" * 32, "n0:29400")
    joining = store_joining(JobPlan(JOB, 0), claimed, FIRST.local_world_size, facts, None)
    stop = Stop(15, 1.0)
    said = [(None, one) for one in (FIRST, stop, Lost("has closed the connection"))]
    monkeypatch.setattr("dsl.agent.calling.Hub", lambda _: SimpleNamespace(read=lambda: said))
    node: Any = Calling(joining, Checked, print)
    assert node.join() == FIRST
    assert node.deadline_s == 0.0
    lost = Orphaned("the node that conducts the job has closed the connection")
    assert node.receive() == [stop, lost]
    assert node.deadline_s is None


def test_a_node_that_has_lost_its_conductor_stops_its_workers_and_looks_for_the_next() -> None:
    nodes, lost = Nodes(), Orphaned("gone")
    member = a_member(nodes)
    assert member.decide(lost, None) == Decision("stop", why="gone")
    last = replace(an_attempt(a_plan(2), [], end()), news=(lost,))
    assert member.decide(last, last) == Decision("go_on", told=Awaiting(last, "meeting"))
    assert nodes.has_sought
    nodes.is_patient = False
    decision = member.decide(lost, last)
    assert (decision.kind, decision.code) == ("end", 1)


def test_a_node_that_was_asked_to_end_looks_for_nobody() -> None:
    nodes = Nodes()
    failed = an_exit(1, code=7)
    last = an_attempt(a_plan(2), [failed], end(failed))
    last = replace(last, news=(a_signal(15, "stop"), Orphaned("gone")))
    assert a_member(nodes).decide(last, last) == Decision("end", code=7)
    assert not nodes.has_sought


def test_a_node_that_finds_no_other_conductor_knows_why_it_ends() -> None:
    """Its delegate is lost, too: nobody else judges this end."""
    member, last = a_member(Nodes()), an_attempt(a_plan(2), [], end())
    refused = Over(Judgement(1, "dslrun", 3))
    assert member.decide(refused, last) == Decision("end", code=1)
    assert member.judgement == refused.judgement


def test_a_spare_ends_as_the_job_does() -> None:
    unneeded = Notice("info", "the job j has ended without this node, which was a spare")
    assert ended_without_us(JOB, Over()) == (unneeded, 0)
    notice, code = ended_without_us(JOB, Over(Judgement(9, quitter="node n1")))
    assert code == 9
    assert notice is not None
    assert notice.text.startswith("the job is over: ")
