"""What ``dsl`` decides against what DeepSpeed 0.19.8 decides (golden/decisions.json, golden/workers.json)."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from tests.contract.golden_file import cases
from tests.support.machine import make_facts
from tests.support.requests import make_request

from dsl._record import replace
from dsl.cli.deepspeed import parse_args, to_request
from dsl.errors import UsageError
from dsl.model.job import Host, Meeting
from dsl.plan.job import plan_job
from dsl.plan.node import AttemptFiles, Static, plan_node

BASE = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4"}
REFUSED = "refused"
# (hostfile is given, visible devices, options) -> our slots. Each is a row of docs/compat.md.
DIFFERENCES: dict[tuple[bool, str | None, str], Any] = {
    (False, "3,1", ""): [["localhost", [3, 1]]],
    (False, "0", "--num_nodes 1"): [["localhost", [0]]],
    (False, "1,1", "--num_nodes 1"): [["localhost", [1]]],
    (False, "2,3", "--num_nodes 1"): [["localhost", [2, 3]]],
    (False, "3,1", "--num_nodes 1"): [["localhost", [3, 1]]],
    (False, None, "-e localhost"): REFUSED,
    (False, None, "--launcher bogus"): REFUSED,
    (False, None, "--no_python --module"): REFUSED,
    (True, None, "--no_ssh --node_rank 0 --master_addr m --num_nodes 5"): REFUSED,
}


def _decide(text: str | None, env: dict[str, str], options: list[str]) -> dict[str, Any]:
    request = to_request(parse_args(["--hostfile", "H", *options, "train.py", "--x"]))
    facts = make_facts(environ={**BASE, **env}, files={} if text is None else {"H": text})
    planned = plan_job(request, facts)
    hosts = planned.job.hosts
    meeting = Static(planned.job, planned.node_rank, facts.ports).meet(0, len(hosts[planned.node_rank].slots))
    return {
        "world": [[host.name, list(host.slots)] for host in hosts],
        "master_addr": meeting.address,
        "master_port": meeting.port,
        "node_rank": planned.node_rank,
    }


@pytest.mark.parametrize("case", cases("decisions"), ids=lambda case: f"{bool(case[0])} {case[1]} {case[2]}")
def test_a_decision(case: list[Any]) -> None:
    text, env, options, answer = case
    key = (text is not None, env.get("CUDA_VISIBLE_DEVICES"), " ".join(options))
    expected = DIFFERENCES.get(key, answer.get("world", REFUSED))
    if expected == REFUSED:
        with pytest.raises(UsageError) as caught:
            _decide(text, env, options)
        builtin = getattr(builtins, answer.get("error", "Exception"))
        assert builtin is AssertionError or isinstance(caught.value, builtin)
    else:
        ours = _decide(text, env, options)
        assert ours["world"] == expected
        if key not in DIFFERENCES:
            assert ours == answer


def test_every_listed_difference_is_one() -> None:
    theirs = {
        (text is not None, env.get("CUDA_VISIBLE_DEVICES"), " ".join(options)): answer.get("world", REFUSED)
        for text, env, options, answer in cases("decisions")
    }
    assert [key for key, ours in DIFFERENCES.items() if theirs[key] == ours] == []


# DeepSpeed's imports leave it behind in the environment of the workers.
LEFT_BEHIND = {"PYTORCH_NVML_BASED_CUDA_CHECK"}
OURS = {"NODE_RANK"}


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("case", cases("workers"), ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_arguments_and_environment_of_workers(case: list[Any]) -> None:
    """Local ranks are ours: DeepSpeed rotates them on nodes of unequal size (docs/compat.md)."""
    world, node_rank, options, workers = case
    script = "dump" if "--module" in options else "SCRIPT"
    request = to_request(parse_args([*options, script, "a b", ""]))
    facts = make_facts(environ={"HOME": "/h"})
    hosts = tuple([Host(name, tuple(slots)) for name, slots in world.items()])
    job = replace(plan_job(request, facts).job, hosts=hosts, node_count=len(hosts), accelerator="cpu")
    meeting = Meeting(0, node_rank, tuple([len(host.slots) for host in hosts]), "m", 29511)
    ours = plan_node(job, meeting, AttemptFiles(None), facts, meeting.node_rank)
    theirs = workers
    if len({len(slots) for slots in world.values()}) > 1:
        theirs = [_with_local_rank(worker, rank) for rank, worker in enumerate(workers)]
    assert [
        list(worker.argv[0 if request.program.kind == "program" else 1 :]) for worker in ours.workers
    ] == [worker["words"] for worker in theirs]
    for worker, other in zip(ours.workers, theirs, strict=True):
        env = {**ours.env, **worker.env}
        assert env.pop("HOME") == "/h"
        assert {name: value for name, value in env.items() if name not in OURS} == {
            name: value for name, value in other["env"].items() if name not in LEFT_BEHIND
        }


def _with_local_rank(worker: dict[str, Any], local_rank: int) -> dict[str, Any]:
    words = [
        f"--local_rank={local_rank}" if word.startswith("--local_rank=") else word for word in worker["words"]
    ]
    return {"words": words, "env": {**worker["env"], "LOCAL_RANK": str(local_rank)}}


def test_a_port_that_deepspeed_would_fight_over_is_replaced() -> None:
    facts = make_facts(environ=BASE, taken=[29500])
    planned = plan_job(make_request("deepspeed"), facts)
    assert Static(planned.job, 0, facts.ports).meet(0, 4).port != 29500
    assert Static(planned.job, 0, make_facts(environ=BASE).ports).meet(0, 4).port == 29500
