"""The environment of workers, beyond what the contract shows."""

from __future__ import annotations

import pytest
from tests.support.machine import make_facts

from dsl.model.job import Host, Job, Meeting, MeetingPoint
from dsl.model.request import Program
from dsl.plan.environ import POD_ENVIRONMENT_PATH, parse_pod_environment
from dsl.plan.flavours import DEEPSPEED, TORCH
from dsl.plan.node import AttemptFiles, plan_node


@pytest.mark.parametrize(
    "text, found",
    [
        (
            "export FC_TASKROLE_NAME=worker\nexport FC_TASK_INDEX=3\n",
            {"FC_TASKROLE_NAME": "worker", "FC_TASK_INDEX": "3"},
        ),
        ('export FC_TASKROLE_NAME="a b"\n', {"FC_TASKROLE_NAME": "a b"}),
        ("export FC_TASKROLE_NAME=a=b\n", {"FC_TASKROLE_NAME": "a=b"}),
        ("FC_TASK_INDEX=1\n# export FC_TASK_INDEX=1\nexport\nexport FC_TASK_INDEX\n\nexport OTHER=1\n", {}),
        ("", {}),
    ],
)
def test_the_pod_file_is_read_and_its_oddities_are_skipped(text: str, found: dict[str, str]) -> None:
    assert parse_pod_environment(text) == found


def _environment(environ: dict[str, str], visible_devices: str | None = None) -> dict[str, str]:
    """That of the second of two nodes."""
    job = Job(
        DEEPSPEED,
        Program("script", "t.py"),
        MeetingPoint("static", "10.0.0.1", 5),
        hosts=(Host("a", (0,)), Host("b", (4, 6))),
        node_count=2,
        accelerator="cuda",
        visible_devices=visible_devices,
    )
    facts = make_facts(environ=environ, files={POD_ENVIRONMENT_PATH: "export FC_TASK_INDEX=2"})
    meeting = Meeting(0, 1, (1, 2), "10.0.0.1", 5)
    return dict(plan_node(job, meeting, AttemptFiles(None), facts).env)


def test_workers_of_deepspeed_get_no_names_of_torchrun_but_the_one_that_lightning_reads() -> None:
    env = _environment({})
    assert "LOCAL_WORLD_SIZE" not in env
    assert "GROUP_RANK" not in env
    assert env["NODE_RANK"] == env["CROSS_RANK"] == "1"


def test_what_is_inherited_stays_unless_it_belongs_to_the_job() -> None:
    before = {"HOME": "/h", "WORLD_SIZE": "99", "CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "3"}
    env = _environment(before)
    assert (env["HOME"], env["OMP_NUM_THREADS"], env["FC_TASK_INDEX"]) == ("/h", "3", "2")
    assert (env["WORLD_SIZE"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "4,6")
    assert before["WORLD_SIZE"] == "99"


def _torch_environment(meeting: Meeting) -> tuple[dict[str, str], list[dict[str, str]]]:
    """That of a node, and what each of its workers has over it."""
    job = Job(
        TORCH, Program("script", "t.py"), MeetingPoint("static", "10.0.0.1", 5), node_count=2, workers="2"
    )
    plan = plan_node(job, meeting, AttemptFiles(None), make_facts())
    return dict(plan.env), [dict(worker.env) for worker in plan.workers]


def test_roles_of_several_nodes_have_ranks_of_their_own() -> None:
    meeting = Meeting(0, 1, (1, 2), "10.0.0.1", 5, first_role_rank=3, role_size=7)
    env, workers = _torch_environment(meeting)
    assert (env["ROLE_WORLD_SIZE"], env["WORLD_SIZE"]) == ("7", "3")
    assert [(one["RANK"], one["ROLE_RANK"]) for one in workers] == [("1", "3"), ("2", "4")]


def test_workers_are_told_why_they_were_started_where_nodes_come_and_go() -> None:
    env, _ = _torch_environment(Meeting(4, 1, (1, 2), "10.0.0.1", 5, restarts=2, reason="membership"))
    told = {name: env[name] for name in ("TORCHELASTIC_RESTART_COUNT", "DSL_RESTART_REASON", "DSL_ATTEMPT")}
    assert told == {
        "TORCHELASTIC_RESTART_COUNT": "2",
        "DSL_RESTART_REASON": "membership",
        "DSL_ATTEMPT": "4",
    }


def test_devices_without_numbers_are_passed_on() -> None:
    assert _environment({}, visible_devices="GPU-a,GPU-b")["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


@pytest.mark.parametrize(
    "given, shown",
    [
        ("1,3,5,7,9,11,13", "9,13"),
        ("0,1,2,3,4,5,6,7", "4,6"),
        ("GPU-0,GPU-1,GPU-2,GPU-3,GPU-4,GPU-5,GPU-6", "GPU-4,GPU-6"),
        ("2,3", "4,6"),
        ("", "4,6"),
    ],
)
def test_slots_are_counted_among_the_devices_that_a_step_of_slurm_has(given: str, shown: str) -> None:
    """Those that it has not given may be another job's."""
    environ = {"SLURM_STEP_GPUS": "x", "CUDA_VISIBLE_DEVICES": given}
    assert _environment(environ)["CUDA_VISIBLE_DEVICES"] == shown
    del environ["SLURM_STEP_GPUS"]
    assert _environment(environ)["CUDA_VISIBLE_DEVICES"] == "4,6"
