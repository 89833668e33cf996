"""What level debug tells of a plan, for both commands: all that matters, and no value of a variable."""

from __future__ import annotations

import pytest
from tests.support.machine import make_facts
from tests.support.requests import make_request, plan_of

from dsl.plan.node import MOST_COMMANDS

ALL_WORKERS = (
    "variables for all workers: CROSS_RANK, CROSS_SIZE, CUDA_VISIBLE_DEVICES, LOCAL_SIZE, "
    "MASTER_ADDR, MASTER_PORT, NODE_RANK, WORLD_SIZE; for each worker: LOCAL_RANK, RANK"
)
SECRET = "hf_verysecret"


def _lines(flavour: str, files: dict[str, str] | None = None, **wishes: object) -> list[str]:
    facts = make_facts(environ={"HF_TOKEN": SECRET, "NCCL_DEBUG": "INFO"}, files=files or {})
    plan = plan_of(make_request(flavour, "t.py", "--lr", "1 2", log_level="debug", **wishes), facts)
    return [notice.text for notice in plan.notices if notice.level == "debug"]


def test_hosts_and_slots_command_and_variables_of_dsl() -> None:
    hosts = {"H": "alpha slots=4\nbeta slots=2\n"}
    wishes = {"hostfile": "H", "no_ssh": True, "node_rank": 1, "master_addr": "10.0.0.1"}
    assert _lines("deepspeed", hosts, **wishes) == [
        "host 0 is alpha with slots 0-3",
        "host 1 is beta with slots 0-1",
        "node 1 of 2 (beta) starts ranks 4-5 of 6, which meet at 10.0.0.1:29500",
        "attempt 0, 0 restarts, 30 s of grace",
        ALL_WORKERS,
        "variables that they inherit: HF_TOKEN, NCCL_DEBUG",
        "rank 4 runs /opt/python -u t.py --local_rank=0 --lr '1 2'",
        "rank 5 runs /opt/python -u t.py --local_rank=1 --lr '1 2'",
    ]


def test_the_same_of_dslrun() -> None:
    lines = _lines(
        "torch", nproc_per_node="2", max_restarts=3, grace_s=7.0, rdzv_backend="c10d", run_id="mine"
    )
    assert lines[:2] == [
        "node 0 of 1 (machine) starts ranks 0-1 of 2, which meet at 127.0.0.1:40001",
        "run mine, attempt 0, 3 restarts, 7 s of grace, files in /var/folder/dslrun_0123456789abcdef",
    ]
    assert "TORCHELASTIC_RUN_ID" in lines[2]
    assert lines[3:] == [
        "variables that they inherit: HF_TOKEN, NCCL_DEBUG",
        "rank 0 runs /opt/python -u t.py --lr '1 2'",
        "rank 1 runs /opt/python -u t.py --lr '1 2'",
    ]


@pytest.mark.parametrize("flavour", ["deepspeed", "torch"])
def test_no_value_of_a_variable_is_told(flavour: str) -> None:
    assert all(SECRET not in line and "INFO" not in line for line in _lines(flavour))


def test_many_workers_are_counted() -> None:
    lines = _lines("torch", nproc_per_node="1000")
    commands = [line for line in lines if " runs " in line]
    assert len(commands) == MOST_COMMANDS
    assert lines[-1] == f"{1000 - MOST_COMMANDS} more run the same with ranks of their own"


def test_a_long_command_is_cut() -> None:
    facts = make_facts()
    plan = plan_of(make_request("torch", "t.py", "x" * 100_000, log_level="debug"), facts)
    assert max(len(notice.text) for notice in plan.notices) < 3000


@pytest.mark.parametrize("level", ["info", "error"])
def test_other_levels_hear_nothing_of_it(level: str) -> None:
    plan = plan_of(make_request("torch", log_level=level), make_facts())
    assert [notice for notice in plan.notices if notice.level == "debug"] == []
