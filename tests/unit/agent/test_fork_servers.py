"""The agent starts fork servers before the first attempt, and keeps them for the next ones."""

from __future__ import annotations

from typing import Any

from tests.support.conducting import a_job
from tests.support.events import FakeSupervisor, a_plan, an_exit, end, exited

from dsl._record import replace
from dsl.agent.agent import Agent
from dsl.model.job import ForkServer, NodePlan

FAILED = an_exit(1, code=7)
WELL = [exited(an_exit(0, code=0)), exited(an_exit(1, code=0)), end()]
BADLY = [exited(an_exit(0, code=0)), exited(FAILED), end(FAILED)]
SERVER = ForkServer(("python", "-u"), {"A": "1"}, preload=("decimal",), script="t.py")


def forked_plan(attempt: int, *servers: ForkServer) -> NodePlan:
    """Two workers of the last of these servers, or executed ones."""
    plan = a_plan(2, attempt=attempt, fork_servers=servers)
    number = len(servers) - 1 if servers else None
    workers = [
        replace(one, argv=("python", "-u", "t.py"), fork_server=number, fork_entry=2) for one in plan.workers
    ]
    return replace(plan, workers=tuple(workers))


class Plans:
    """A source of plans that the test has made."""

    def __init__(self, *plans: NodePlan) -> None:
        job = a_job(1, restarts=len(plans) - 1)
        self._plans = [replace(plan, job=job) for plan in plans]

    def plan(self, attempt: int) -> NodePlan:
        return self._plans[attempt]

    def prepare(self, plan: NodePlan) -> NodePlan:
        return plan


class Ear:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def hear(self, event: object) -> None:
        self.heard.append(event)


def run(*plans: NodePlan) -> tuple[FakeSupervisor, Ear]:
    attempts = [*[BADLY] * (len(plans) - 1), WELL]
    supervisor, ear = FakeSupervisor(*attempts), Ear()
    source = Plans(*plans)
    outcome = Agent(source, source.plan(0), [ear]).run(supervisor)  # type: ignore[arg-type]
    assert outcome.code == 0
    return supervisor, ear


def numbers(spec: Any) -> list[int | None]:
    """The fork servers of the workers, as the engine gets them."""
    return [worker.fork_server for worker in spec.workers]


def test_a_server_is_started_first_and_its_workers_name_it() -> None:
    supervisor, _ = run(forked_plan(0, SERVER))
    ((words, env),) = supervisor.fork_servers
    assert words[:2] == ("python", "-u")
    assert {"decimal", "t.py"} <= set(words)
    assert env == {"A": "1"}
    (spec,) = supervisor.started
    assert numbers(spec) == [7, 7]
    assert [worker.fork_entry for worker in spec.workers] == [2, 2]


def test_a_server_is_placed_beside_its_workers() -> None:
    placed = replace(SERVER, cpus=(0, 1))
    supervisor, _ = run(forked_plan(0, SERVER, placed))
    assert supervisor.server_places == [None, (0, 1)]


def test_the_next_attempt_uses_the_servers_that_are_there() -> None:
    supervisor, _ = run(forked_plan(0, SERVER), forked_plan(1, replace(SERVER)))
    assert len(supervisor.fork_servers) == 1
    assert [numbers(spec) for spec in supervisor.started] == [[7, 7], [7, 7]]


def test_an_attempt_that_needs_another_server_gets_one() -> None:
    other = replace(SERVER, env={"A": "2"})
    supervisor, _ = run(forked_plan(0, SERVER), forked_plan(1, other), forked_plan(2, other, SERVER))
    assert [env for _, env in supervisor.fork_servers] == [{"A": "1"}, {"A": "2"}]
    assert [numbers(spec) for spec in supervisor.started] == [[7, 7], [8, 8], [7, 7]]


def test_without_a_server_nothing_of_it_is_started() -> None:
    supervisor, _ = run(forked_plan(0))
    assert supervisor.fork_servers == []
    assert numbers(supervisor.started[0]) == [None, None]
