"""The environment of workers, beyond what the contract shows."""

from __future__ import annotations

import pytest
from tests.support.machine import make_facts

from dsl._record import replace
from dsl.errors import NoDevicesError
from dsl.model.job import Host, Job, Meeting, MeetingPoint, Pairs
from dsl.model.request import Program
from dsl.plan.node import AttemptFiles, plan_node
from dsl.plan.worker import DEEPSPEED, POD_ENVIRONMENT_PATH, TORCH, parse_pod_environment


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


def _environment(
    environ: dict[str, str], visible_devices: str | None = None, accelerator: str = "cuda"
) -> dict[str, str]:
    """That of the second of two nodes. Without an accelerator of the job, each node has its own."""
    job = Job(
        DEEPSPEED,
        Program("script", "t.py"),
        MeetingPoint("static", "10.0.0.1", 5),
        hosts=(Host("a", (0,)), Host("b", (4, 6))),
        node_count=2,
        accelerator=accelerator,
        visible_devices=visible_devices,
    )
    facts = make_facts(environ=environ, cuda=8, files={POD_ENVIRONMENT_PATH: "export FC_TASK_INDEX=2"})
    meeting = Meeting(0, 1, (1, 2), "10.0.0.1", 5)
    return dict(plan_node(job, meeting, AttemptFiles(None), facts, meeting.node_rank).env)


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
    plan = plan_node(job, meeting, AttemptFiles(None), make_facts(), meeting.node_rank)
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
    ],
)
@pytest.mark.parametrize("variable", ["SLURM_STEP_GPUS", "SLURM_JOB_GPUS"])
def test_slots_are_counted_among_the_devices_that_slurm_has_given(
    variable: str, given: str, shown: str
) -> None:
    environ = {variable: "x", "CUDA_VISIBLE_DEVICES": given}
    assert _environment(environ, accelerator="")["CUDA_VISIBLE_DEVICES"] == shown
    del environ[variable]
    assert _environment(environ)["CUDA_VISIBLE_DEVICES"] == "4,6"


@pytest.mark.parametrize(
    "given, shown",
    [
        ({"CUDA_VISIBLE_DEVICES": "6,5,4"}, "4,6"),
        ({"CUDA_VISIBLE_DEVICES": "0,6,5,4,1,2,3"}, "4,6"),
        ({"CUDA_VISIBLE_DEVICES": "7,6,5,3,2,1,0"}, "2,0"),
        ({}, "4,6"),
    ],
)
def test_slots_that_were_found_on_this_machine_are_numbers_of_devices(
    given: dict[str, str], shown: str
) -> None:
    assert _environment({"SLURM_STEP_GPUS": "4,5,6", **given})["CUDA_VISIBLE_DEVICES"] == shown


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("accelerator", ["", "cuda"])
@pytest.mark.parametrize(
    "given, said",
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "2 GPUs here (CUDA_VISIBLE_DEVICES=2,3)"),
        ({"CUDA_VISIBLE_DEVICES": "6"}, "1 GPU here (CUDA_VISIBLE_DEVICES=6)"),
        ({}, "3 GPUs here (0,1,6, and CUDA_VISIBLE_DEVICES is not set)"),
    ],
)
def test_no_device_that_slurm_has_not_given_is_taken(
    accelerator: str, given: dict[str, str], said: str
) -> None:
    """It may be another job's. Workers on the CPU take none."""
    environ = {"SLURM_STEP_GPUS": "0,1,6", **given}
    with pytest.raises(NoDevicesError) as caught:
        _environment(environ, accelerator=accelerator)
    assert str(caught.value).startswith(f"Slurm has given {said}, too few for slots 4,6: ask it for")
    assert _environment(environ, accelerator="cpu")["CUDA_VISIBLE_DEVICES"] == "4,6"


def _variables(text: str) -> dict[str, str]:
    return dict([word.split("=", 1) for word in text.split()])


# What a launcher of tasks says to the second of two tasks, on a host of its own: first its rank and how many there are.
TOLD = {
    "openmpi": """OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
        OMPI_COMM_WORLD_NODE_RANK=0 OMPI_UNIVERSE_SIZE=2 OMPI_MCA_ess=^singleton OMPI_MCA_orte_hnp_uri=x""",
    "pmix": "PMIX_RANK=1 PMIX_SIZE=2 PMIX_NAMESPACE=n PMIX_SERVER_URI4=u",
    "hydra": "PMI_RANK=1 PMI_SIZE=2 PMI_FD=5 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1",
    "pals": "PALS_RANKID=1 PALS_SIZE=2 PALS_LOCAL_RANKID=0 PALS_NODEID=1",
    "mvapich": "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=0",
    "jsrun": "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=0",
    "flux": "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=0",
    "slurm": """SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NPROCS=2 SLURM_GTIDS=1 SLURM_TASK_PID=9
        SLURM_TASKS_PER_NODE=1(x2) SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_NTASKS_PER_NODE=1""",
}
KEPT = _variables("""OMPI_MCA_btl=tcp PMIX_MCA_gds=hash MV2_SUPPORT_DL=1 SLURM_JOB_ID=3
    SLURM_NODEID=1 SLURM_STEP_GPUS=0 SLURM_NNODES=2""")


def _inherited(environ: dict[str, str], count: int, *, own: Pairs = ()) -> dict[str, str]:
    """What the workers of the second of two nodes have beside ours."""
    job = Job(
        TORCH, Program("script", "t.py"), MeetingPoint("static", "a", 5), node_count=2, workers=str(count)
    )
    meeting = Meeting(0, 1, (1, count), "a", 5)
    plan = plan_node(
        replace(job, env=own), meeting, AttemptFiles(None), make_facts(environ=environ), meeting.node_rank
    )
    return {name: value for name, value in plan.env.items() if name in {**environ, **dict(own)}}


@pytest.mark.parametrize("launcher", TOLD)
def test_several_workers_do_not_see_the_one_rank_that_a_launcher_has_given_their_agent(launcher: str) -> None:
    told = _variables(TOLD[launcher])
    assert _inherited({**KEPT, **told}, 2) == KEPT
    assert _inherited({**KEPT, **told}, 2, own=tuple(told.items())) == {**KEPT, **told}


@pytest.mark.parametrize("launcher", TOLD)
def test_a_single_worker_sees_it_if_it_is_its_own(launcher: str) -> None:
    told = _variables(TOLD[launcher])
    assert _inherited({**KEPT, **told}, 1) == {**KEPT, **told}
    rank, size, *_ = told
    assert _inherited({**KEPT, **told, rank: "0"}, 1) == KEPT
    assert _inherited({**KEPT, **told, size: "3"}, 1) == KEPT


def test_the_tasks_per_node_that_slurm_tells_a_worker_are_as_many_as_its_node_has() -> None:
    """Lightning fails without them, or with another number."""
    told = {**_variables(TOLD["slurm"]), "SLURM_NTASKS_PER_NODE": "8"}
    assert _inherited(told, 1)["SLURM_NTASKS_PER_NODE"] == "1"
    assert "SLURM_NTASKS_PER_NODE" not in _inherited(told, 2)


def test_what_an_allocation_has_asked_for_is_nobodys_rank() -> None:
    """A shell of `salloc` is no task."""
    asked = {"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    assert _inherited({**KEPT, **asked}, 1) == KEPT
