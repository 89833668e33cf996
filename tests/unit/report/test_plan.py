"""What ``--dry-run`` and ``--report-bindings`` show of a plan."""

from __future__ import annotations

import json

from tests.support.machine import make_facts, numa_table
from tests.support.requests import make_request, plan_of

from dsl.cli import deepspeed
from dsl.launchers.base import Start
from dsl.machine.kernel import Topology
from dsl.model.job import NodePlan
from dsl.plan.job import JobPlan, plan_job
from dsl.report.plan import bindings_table, hosts_json, hosts_text, plan_json, plan_text

ENVIRON = {"HOME": "/home/user", "SECRET": "x"}
TOPOLOGY = Topology(numa_table(range(4), range(4, 8)), tuple((cpu,) for cpu in range(8)))


def _plan(bind: str = "auto", cuda: int = 2) -> NodePlan:
    request = make_request("torch", "my train.py", nproc_per_node="2", bind=bind, names_devices=True)
    return plan_of(request, make_facts(environ=ENVIRON, cuda=cuda, topology=TOPOLOGY))


def test_the_table_has_a_row_for_each_worker() -> None:
    assert [line.split() for line in bindings_table(_plan())[1:]] == [
        ["0", "H200", "0000:00:00.0", "0", "0-1", "preferred", "0", "2"],
        ["1", "H200", "0000:01:00.0", "0", "2-3", "preferred", "0", "2"],
    ]


def test_without_binding_or_device_the_table_says_so() -> None:
    assert bindings_table(_plan("none", 0))[1].split() == ["0", "-", "-", "-", "all", "default", "1"]


def test_the_text_names_commands_and_only_what_the_job_changes() -> None:
    text = "\n".join(plan_text(_plan(), ENVIRON))
    assert "SECRET" not in text
    assert "  WORLD_SIZE=2" in text
    assert "  command: /opt/python -u 'my train.py'" in text
    assert "  device: H200 0000:01:00.0" in text
    assert "  cores: 2-3, memory: preferred 0" in text


def test_json_says_the_same_to_programs() -> None:
    shown = json.loads(plan_json(_plan(), {**ENVIRON, "GONE": "1"}))
    first, second = shown["workers"]
    assert shown["environment"]["WORLD_SIZE"] == "2"
    assert "SECRET" not in shown["environment"]
    assert shown["removed"] == ["GONE"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert second["cores"] == [2, 3]
    assert second["memory"] == {"mode": "preferred", "nodes": [0]}
    assert second["device"] == {"name": "H200", "pci_address": "0000:01:00.0", "numa_node": 0}
    assert second["environment"]["OMP_NUM_THREADS"] == "2"
    assert second["command"] == ["/opt/python", "-u", "my train.py"]


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
