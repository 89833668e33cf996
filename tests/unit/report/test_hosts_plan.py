"""What a dry run shows of a job on several hosts."""

from __future__ import annotations

import json

from tests.support.machine import make_facts

from dsl.cli import deepspeed
from dsl.launchers.base import Start
from dsl.plan.job import JobPlan, plan_job
from dsl.report.plan import hosts_json, hosts_text

HOSTS = "n0 slots=1\nn1 slots=2\nn2 slots=1\n"
ELASTIC = ("--elastic_training", "--master_addr", "10.0.0.1", "--num_nodes", "1:2")


def planned(*words: str) -> JobPlan:
    request, _ = deepspeed.read(["-H", "/hosts", *words, "t.py"], {})
    return plan_job(request, make_facts(files={"/hosts": HOSTS}))


def test_ranks_are_those_of_all_hosts_also_where_some_may_be_spares() -> None:
    for words, first in (
        ((), "node 0 (n0): ranks 0 on slots 0"),
        (ELASTIC, "runs on 1 to 2 of these hosts; on all of them:"),
    ):
        plan = planned(*words)
        assert plan.remote is not None
        lines = hosts_text(plan.job, plan.remote, [Start(argv=("ssh", "n0"))])
        assert lines[0] == first
        assert "node 1 (n1): ranks 1-2 on slots 0-1" in lines


def test_programs_are_told_how_many_hosts_take_part() -> None:
    for words, expected in (((), (3, 3)), (ELASTIC, (1, 2))):
        plan = planned(*words)
        assert plan.remote is not None
        found = json.loads(hosts_json(plan.job, plan.remote, []))
        assert (found["least_hosts"], found["most_hosts"], found["world_size"]) == (*expected, 4)
