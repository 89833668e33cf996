"""What ``dsl`` decides against what DeepSpeed 0.19.8 decides (golden/decisions.json, golden/workers.json)."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from tests.contract.golden_file import cases
from tests.support.machine import make_host

from dsl._record import replace
from dsl.cli.deepspeed import parse_args, to_request
from dsl.errors import UsageError
from dsl.model import Node, Plan, Request
from dsl.plan.build import build_node_plan, build_plan

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
    (False, None, "--no_python --module"): REFUSED,
    (True, None, "--no_ssh --node_rank 0 --master_addr m --num_nodes 5"): REFUSED,
}


def _decide(text: str | None, env: dict[str, str], options: list[str]) -> Plan:
    request = to_request(parse_args(["--hostfile", "H", *options, "train.py", "--x"]))
    return build_plan(request, {**BASE, **env}, make_host(files={} if text is None else {"H": text}))


def _describe(plan: Plan) -> dict[str, Any]:
    return {
        "world": [[node.host, list(node.slots)] for node in plan.nodes],
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "node_rank": plan.node_rank,
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
        ours = _describe(_decide(text, env, options))
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
OURS = {"LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}


@pytest.mark.parametrize("case", cases("workers"), ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_arguments_and_environment_of_workers(case: list[Any]) -> None:
    """G5. Local ranks are ours: DeepSpeed rotates them on nodes of unequal size (docs/compat.md)."""
    world, node_rank, options, workers = case
    script = "dump" if "--module" in options else "SCRIPT"
    request: Request = to_request(parse_args([*options, script, "a b", ""]))
    nodes = tuple(Node(host, tuple(slots)) for host, slots in world.items())
    plan = Plan(nodes, node_rank, "cpu", "m", 29511)
    ours = build_node_plan(request, plan, {"HOME": "/h"}, make_host())
    theirs = workers
    if len({len(slots) for slots in world.values()}) > 1:
        theirs = [_with_local_rank(worker, rank) for rank, worker in enumerate(workers)]
    assert [list(worker.argv[0 if request.no_python else 1 :]) for worker in ours.workers] == [
        worker["words"] for worker in theirs
    ]
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
    host = make_host(taken=[29500])
    plan = build_plan(Request("t.py"), BASE, host)
    assert plan.master_port != 29500
    assert replace(plan, master_port=29500) == replace(
        build_plan(Request("t.py"), BASE, make_host()), notices=plan.notices
    )
