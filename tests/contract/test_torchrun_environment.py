"""The environment of every worker, as torchrun makes it, but for a list of differences.

Here it is planned; `tests/proc/test_dslrun.py` looks at that of real workers.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract import torchrun_inputs as inputs
from tests.contract.golden_file import cases
from tests.contract.torchrun_difference import as_torchrun
from tests.support.machine import make_facts
from tests.support.requests import plan_of

from dsl.agent.joining import joining_of
from dsl.agent.member import Member
from dsl.agent.planner import Planner
from dsl.cli.torchrun import parse_args, to_request
from dsl.conductor.conductor import Conductor
from dsl.conductor.terms import fixed_places
from dsl.model.job import Meeting
from dsl.plan.job import plan_job
from dsl.plan.node import count_workers

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


@pytest.mark.parametrize("case", cases("torchrun_nodes"), ids=lambda case: case[0])
def test_nodes_that_differ_are_counted_as_by_torchrun(case: Any) -> None:
    """As node 0 has them meet, and each plans."""
    _, options, each, workers = case
    environ = {"PATH": "/bin"}
    facts = make_facts(environ=environ)
    lines = [f"--nproc-per-node {one} {options} --node-rank {rank}" for rank, one in enumerate(each)]
    planned = [plan_job(to_request(parse_args([*line.split(), "t.py"], environ)), facts) for line in lines]
    first = joining_of(planned[0], facts, count_workers(planned[0].job, 0, facts))
    terms = fixed_places(planned[0].job, len(each), first.hello.version, first.address, first.port, 600.0)
    conductor = Conductor(terms, 0.0)
    said: list[Any] = []
    for one in planned:
        joining = joining_of(one, facts, count_workers(one.job, one.node_rank, facts))
        said += conductor.hear(one.node_rank, joining.hello, 0.0)
    met = [one.message for one in said if isinstance(one.message, Meeting)]
    ours = []
    for meeting, one in zip(met, planned, strict=True):
        planner = Planner(one, facts)
        planner.meet_by(Member(None, meeting))  # type: ignore[arg-type]
        plan = planner.plan(0)
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
    assert changed == {"MASTER_ADDR", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
