"""Jobs, terms and a stage for tests of the conductor: no process, no network, and a clock of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.events import a_report

from dsl._record import replace
from dsl.conductor.conductor import Conductor
from dsl.conductor.orders import Explain, Send, Speak
from dsl.conductor.terms import Terms, fixed_places, open_places, reached_terms
from dsl.control.messages import Assignment, Checked, Failing, Hello, Lost
from dsl.model.job import Host, Job, Meeting, MeetingPoint, Notice
from dsl.model.request import NO_POLICY, Policy, Program, SignalRequest
from dsl.plan.remote import Remote
from dsl.plan.worker import DEEPSPEED, ELASTIC
from dsl.report.verdict import verdict

MS = 1_000_000
CLOSED = Lost("has closed the connection")


def a_job(
    *sizes: int,
    restarts: int = 0,
    port: int | None = 29501,
    address: str = "10.0.0.1",
    is_elastic: bool = False,
    gives_up: bool = False,
    policy: Policy = NO_POLICY,
) -> Job:
    """A job on hosts of so many slots each."""
    hosts = tuple(Host(f"n{rank}", tuple(range(size))) for rank, size in enumerate(sizes))
    return Job(
        flavour=ELASTIC if is_elastic else DEEPSPEED,
        program=Program("script", "train.py"),
        meeting=MeetingPoint("static", address, port),
        hosts=hosts,
        node_count=len(hosts),
        max_restarts=restarts,
        gives_up=gives_up,
        policy=policy,
        signals=SignalRequest(grace_s=7.0, preempt=10, preempt_grace_s=60.0),
    )


def reached(job: Job, remote: Remote) -> Terms:
    """Terms of members that we reach."""
    return reached_terms(job, remote, Assignment("1", job, 0))


def coming(count: int, restarts: int = 0, spares: int = 0) -> Terms:
    """Terms of members that come by themselves."""
    job = a_job(restarts=restarts)
    job = replace(job, meeting=replace(job.meeting, spares=spares))
    return fixed_places(job, count, "1", "10.0.0.1", 29500, 600.0)


def coming_and_going(
    least: int, most: int, restarts: int = 0, *, last_call_s: float = 30.0, gives_up: bool = False
) -> Terms:
    """Terms of members that come by themselves at any time."""
    job = a_job(restarts=restarts, address="", port=None, is_elastic=True, gives_up=gives_up)
    point = MeetingPoint("dynamic", "", None, "c10d", "n0:29400", least_nodes=least)
    job = replace(job, meeting=point, node_count=most, run_id="")
    return open_places(job, "1", wait_s=60.0, last_call_s=last_call_s)


def verdict_of(conductor: Conductor) -> list[str]:
    """What the user is told at the end."""
    judgement = conductor.judgement if conductor.code is not None else None
    lines = [] if judgement is None else verdict(judgement)
    return [*lines, *[notice.line for notice in conductor.notices]]


def spoken(orders: list[Any]) -> list[str]:
    """What orders say to the user."""
    notices = [
        Notice(one.level, verdict(one.judgement)[0]) if isinstance(one, Explain) else one.notice
        for one in orders
        if isinstance(one, (Explain, Speak))
    ]
    return [notice.line for notice in notices]


def messages(orders: list[Any], kind: type) -> list[tuple[int, Any]]:
    """(place, message) of a kind."""
    return [
        (one.place, one.message) for one in orders if isinstance(one, Send) and isinstance(one.message, kind)
    ]


class Stage:
    """A conductor, and what it has ordered."""

    def __init__(self, terms: Terms, port_of: Callable[[int], int] | None = None) -> None:
        self.now_s = 100.0
        self.terms = terms
        self.conductor = Conductor(terms, self.now_s, port_of)
        self.orders: list[Any] = []

    def note(self, orders: list[Any]) -> list[Any]:
        self.orders += orders
        return orders

    def hear(self, place: int, message: object) -> list[Any]:
        return self.note(self.conductor.hear(place, message, self.now_s))

    def later(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return self.note(self.conductor.wait_is_over(self.now_s))

    def signal(self, signum: int, action: str = "stop", *, is_key: bool = False) -> list[Any]:
        return self.note(self.conductor.signal(signum, action, self.now_s, is_key=is_key))

    def miss(self, place: int, why: str = "cannot be reached: no route") -> list[Any]:
        """What reaches a host has ended without its agent."""
        return self.note(self.conductor.starter_ended([place], why, self.now_s))

    def come(self, *places: int, **checked: Any) -> list[Any]:
        """Agents come, and nothing stands in the way there."""
        orders = []
        for place in places:
            task = self.terms.seats[place].task
            orders += self.hear(
                place, Hello("1", place, "h", 1, is_task=task is not None, local_rank=task or 0)
            )
            orders += self.hear(place, Checked(**{"addresses": (f"10.0.0.{place}",), **checked}))
        return orders

    def fail(self, place: int, rank: int, status: int = 7, at_ms: int = 1, **fields: Any) -> list[Any]:
        """A worker fails, and its node reports."""
        failed: dict[str, Any] = {"rank": rank, "at_ms": at_ms, "host": f"n{place}"}
        orders = self.hear(place, Failing(self.attempt, rank, status, at_ms * MS))
        report = a_report(self.attempt, status, lines=["step 7"], ended=1, **failed, **fields)
        return [*orders, *self.hear(place, report)]

    def report_stopped(self, *places: int, **fields: Any) -> list[Any]:
        """The workers of hosts have been stopped, as ordered."""
        report = a_report(self.attempt, 1, victims=(9,), **fields)
        return [one for place in places for one in self.hear(place, report)]

    @property
    def meeting(self) -> Meeting:
        """That of the present attempt."""
        found: Meeting = messages(self.orders, Meeting)[-1][1]
        return found

    @property
    def attempt(self) -> int:
        return self.meeting.attempt

    def members(self) -> list[tuple[int, int]]:
        """Of the present attempt: place and node rank."""
        meetings = messages(self.orders, Meeting)
        return [(place, one.node_rank) for place, one in meetings if one.attempt == self.attempt]

    @property
    def said(self) -> list[str]:
        """What the user has been told, the verdict last."""
        return [*spoken(self.orders), *verdict_of(self.conductor)]


def fixed(*sizes: int, per_node: bool = True, **job: Any) -> Stage:
    """A job that needs all of its hosts."""
    return Stage(reached(a_job(*sizes, **job), Remote("ssh", per_node=per_node)))


def elastic(*sizes: int, least: int = 1, most: int | None = None, **fields: Any) -> Stage:
    """A job whose hosts come and go."""
    job: dict[str, Any] = {"restarts": 100, "address": "", "port": None, "gives_up": False}
    job["policy"] = NO_POLICY
    job = {name: fields.pop(name, value) for name, value in job.items()}
    remote = {
        "launcher": "ssh",
        "wait_s": 600.0,
        "least_nodes": least,
        "most_nodes": most or len(sizes),
        **fields,
    }
    return Stage(reached(a_job(*sizes, is_elastic=True, **job), Remote(**remote)))


def begun(*sizes: int, per_node: bool = True, first: dict[str, Any] | None = None, **job: Any) -> Stage:
    """A job that needs all of its hosts, and they have come. ``first``: what the first one has said."""
    stage = fixed(*sizes, per_node=per_node, **job)
    for place in range(len(stage.conductor.roster)):
        stage.come(place, **(first or {} if place == 0 else {}))
    return stage
