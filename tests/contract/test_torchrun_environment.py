"""The environment of every worker, as torchrun makes it, but for a list of differences.

Here it is planned; `tests/proc/test_dslrun.py` looks at that of real workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract import torchrun_inputs as inputs
from tests.contract.golden_file import cases
from tests.contract.torchrun_difference import as_torchrun
from tests.support.machine import make_facts
from tests.support.requests import plan_of

from dsl.agent.planner import Planner
from dsl.cli.torchrun import parse_args, to_request
from dsl.plan.job import plan_job
from dsl.plan.node import count_workers
from dsl.rendezvous.delegate_messages import Meet
from dsl.rendezvous.dynamic import Dynamic
from dsl.rendezvous.leader import Leader

if TYPE_CHECKING:
    from dsl.rendezvous.delegate_messages import Answer

NAME = "torchrun_environment"


def _planned(options: str, given: dict[str, str]) -> list[dict[str, str]]:
    environ = {"PATH": "/bin", **given}
    request = to_request(parse_args([*options.split(), "t.py"], environ))
    plan = plan_of(request, make_facts(environ=environ))
    found = []
    for worker in plan.workers:
        env = {**plan.env, **worker.env}
        new = {name: value for name, value in env.items() if environ.get(name) != value}
        found.append({name: inputs.normal(name, value, options) for name, value in new.items()})
    return found


@pytest.mark.parametrize("case", cases(NAME), ids=lambda case: case[0])
def test_each_worker_has_the_environment_that_torchrun_gives_it(case: Any) -> None:
    _, options, given, workers = case
    ours = _planned(f"--nproc-per-node {inputs.WORKERS} {options}", given)
    assert ours == [as_torchrun(worker) for worker in workers]


@pytest.mark.parametrize("case", cases(NAME, "nodes"), ids=lambda case: case[0])
def test_the_nodes_of_a_job_agree_as_with_torchrun(case: Any) -> None:
    _, options, given, workers = case
    ours = []
    for node_rank in (0, 1):
        ours += _planned(f"--nproc-per-node 2 {options} --node-rank {node_rank}", given)
    assert ours == [as_torchrun(worker) for worker in workers]


class Says:
    """A delegate that says one thing."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def send(self, order: object) -> None:
        pass

    def receive(self) -> list[Answer]:
        return [self._answer]


@pytest.mark.parametrize("case", cases("torchrun_nodes"), ids=lambda case: case[0])
def test_nodes_that_differ_are_counted_as_by_torchrun(case: Any) -> None:
    """As node 0 has them meet, and each plans."""
    _, options, each, workers = case
    environ = {"PATH": "/bin"}
    facts = make_facts(environ=environ)
    lines = [f"--nproc-per-node {one} {options} --node-rank {rank}" for rank, one in enumerate(each)]
    planned = [plan_job(to_request(parse_args([*line.split(), "t.py"], environ)), facts) for line in lines]
    leader = Leader(len(each), planned[0].job.meeting.address, lambda _: planned[0].job.meeting.port or 0)
    says = []
    for one in planned:
        leader.come(one.node_rank, f"n{one.node_rank}")
        size = count_workers(one.job, one.node_rank, facts)
        says += leader.hear(one.node_rank, Meet(size, one.job.role, 0, "start"))
    ours = []
    for (place, met), one in zip(says, planned, strict=True):
        rendezvous = Dynamic(one.job, place, f"n{place}", Says(met))  # type: ignore[arg-type]
        rendezvous.open(0, lambda _: None)
        plan = Planner(one, facts, rendezvous).plan(0)
        for worker in plan.workers:
            env = {**plan.env, **worker.env}
            new = {name: value for name, value in env.items() if environ.get(name) != value}
            found = {name: inputs.normal(name, value, options) for name, value in new.items()}
            assert (found.pop("DSL_RESTART_REASON"), found.pop("DSL_ATTEMPT")) == ("start", "0")
            ours.append(found)
    assert ours == [as_torchrun(worker) for worker in workers]


def test_the_list_of_differences_is_in_use() -> None:
    """A difference that no longer is one must not stay on the list."""
    recorded = [worker for case in cases(NAME) for worker in case[3]]
    changed = {name for worker in recorded for name in worker if as_torchrun(worker)[name] != worker[name]}
    assert changed == {"MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"}
