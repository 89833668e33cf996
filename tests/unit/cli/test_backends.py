"""No option of `dsl` is lost on its way to a host, whatever starts the agent there."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from tests.support.machine import make_facts
from tests.support.options import LINES, NEEDS, ROWS, said

from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.cli import deepspeed
from dsl.control.messages import TO_AGENT, Assignment
from dsl.facts import Facts
from dsl.launchers.base import Agents, Start
from dsl.launchers.table import TABLE, each_host
from dsl.model.codec import from_line, to_line
from dsl.model.job import Job, Meeting, NodePlan
from dsl.plan.job import JobPlan, plan_job
from dsl.plan.remote import LAUNCHERS, RANK_LAUNCHERS

pytestmark = pytest.mark.guarantee("G5")

HOSTS = "here slots=4\nthere slots=4\n"
FEWER_HOSTS = "here slots=2\nthere slots=2\n"


class Case(NamedTuple):
    """One option: a value that fits, and what else has to be said."""

    value: str = ""
    with_: str = ""


CHOOSES_HOSTS = {
    "hostfile": Case("/fewer"),
    "include": Case("here:1,3@there:0,2"),
    "exclude": Case("there:0"),
    "num_nodes": Case("1", with_="--force_multi"),
    "num_gpus": Case("3"),
    "force_multi": Case(with_="--num_nodes 1"),
}
IS_TOLD_THE_LAUNCHER = {
    "launcher_args": Case("x y"),
    "ssh_port": Case("6"),
    "venv_script": Case("v"),
}
IS_TOLD_THE_AGENTS = {
    "no_ssh_check": Case(),
    "heartbeat": Case("3"),
}
EXCEPTIONS = {
    "ssh_program": "it takes the place of a launcher",
    "wait_hosts": "it is for the command on this host",
    "fork_server_per": "it has no effect",
    "launcher": "each test goes through all of its words",
    "one_agent_per_node": "below, for the launchers that start ranks",
    "no_ssh": "no host is reached then",
    "strict": "what it does not refuse starts as it does without",
    "node_rank": "it counts with --no_ssh alone",
    "events": "it is for the command on this host",
    "metrics": "it is for the command on this host",
    "detach": "it is for the command on this host",
    "autotuning": "it is refused where one job is planned",
    "doctor": "nothing is started",
    "doctor_first": "the agents are told with the job",
    "ring": "another program is started",
    "dry_run": "nothing is started",
    "dry_run_json": "nothing is started",
    "min_elastic_nodes": "below, for jobs whose hosts come and go",
    "max_elastic_nodes": "below, for jobs whose hosts come and go",
    "elastic_wait": "below, for jobs whose hosts come and go",
    "discover": "it names the hosts of such jobs",
}
NO_EFFECT = {("slurm", "ssh_port"): "--ssh_port has no effect with --launcher slurm, which uses no ssh"}
OPTIONS = {option.dest: option for option in LINES["dsl"].options}
WITH = {
    **NEEDS,
    "bind_core_list": "--bind_cores_to_rank",
    "elastic_training": "--master_addr 10.0.0.2",
    "max_restarts": "--elastic_training --master_addr 10.0.0.2",
}
"""What else has to be said with an option of the job, so that it has an effect."""
ELSEWHERE = {*CHOOSES_HOSTS, *IS_TOLD_THE_LAUNCHER, *IS_TOLD_THE_AGENTS, *EXCEPTIONS}
IN_THE_JOB = {
    dest: Case(ROWS["dsl"][dest][0], WITH.get(dest, "")) for dest in OPTIONS if dest not in ELSEWHERE
}

every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


class Conducted:
    """A meeting as the head makes it, where the job leaves something open."""

    def __init__(self, job: Job, node_rank: int) -> None:
        self._job = job
        self._node_rank = node_rank

    def meet(self, attempt: int, local_world_size: int) -> Meeting:
        asked = self._job.meeting
        sizes = tuple(len(host.slots) for host in self._job.hosts)
        assert sizes[self._node_rank] == local_world_size
        address = asked.address or "10.0.0.1"
        return Meeting(attempt, self._node_rank, sizes, address, asked.port or 29500)


def machine() -> Facts:
    return make_facts(cuda=4, files={"/hosts": HOSTS, "/fewer": FEWER_HOSTS})


def planned(launcher: str, *words: str) -> JobPlan:
    """What the launching host decides."""
    hosts = [] if "--hostfile" in words else ["--hostfile", "/hosts"]
    request, _ = deepspeed.read(["--launcher", launcher, *hosts, *words, "t.py", "--x"], {})
    return plan_job(request, machine())


def words_of(dest: str, case: Case) -> list[str]:
    return [*case.with_.split(), *said(OPTIONS[dest], case.value)]


def without_and_with(launcher: str, dest: str, case: Case) -> tuple[JobPlan, JobPlan]:
    return planned(launcher, *case.with_.split()), planned(launcher, *words_of(dest, case))


def arrived(job: Job) -> Job:
    """The job as an agent reads it from the bytes that the head sends."""
    message = from_line(to_line(Assignment("0", job, 1)), TO_AGENT)
    assert isinstance(message, Assignment)
    return message.job


def node_plans(job: Job) -> list[NodePlan]:
    """What each host starts."""
    planners = [Planner(JobPlan(job, rank), machine()) for rank in range(len(job.hosts))]
    for rank, planner in enumerate(planners):
        planner.meet_by(Conducted(job, rank))
    return [planner.plan(0) for planner in planners]


def starts(plan: JobPlan) -> tuple[Start, ...]:
    """What the launching host has to start."""
    assert plan.remote is not None
    agents = Agents(("-m", "dsl_launcher.node"), "/opt/python", plan.job.hosts, folder="/folder")
    return TABLE[plan.remote.launcher](plan.remote, agents)


def count_of(start: Start) -> str:
    """The number of tasks that a launcher of ranks is asked for."""
    place = next(place for place, word in enumerate(start.argv) if word in ("-n", "-np"))
    return start.argv[place + 1]


def table(cases: dict[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dest, case", cases.items(), ids=list(cases))


def test_every_row_of_this_file_is_an_option() -> None:
    assert {*ELSEWHERE, *WITH} <= {*OPTIONS}


@every_launcher
@table(IN_THE_JOB)
def test_an_option_of_the_job_decides_on_every_host_what_it_decides_here(
    dest: str, case: Case, launcher: str
) -> None:
    before, after = without_and_with(launcher, dest, case)
    assert after.remote is not None
    assert after.remote.launcher == launcher
    here, there, unasked = node_plans(after.job), node_plans(arrived(after.job)), node_plans(before.job)
    assert there == here
    has_effect = dest != "no_local_rank" or launcher not in RANK_LAUNCHERS
    assert [one != other for one, other in zip(there, unasked, strict=True)] == [has_effect] * 2


@every_launcher
@table({**IN_THE_JOB, **CHOOSES_HOSTS})
def test_all_launchers_start_the_same_workers(dest: str, case: Case, launcher: str) -> None:
    """But that MPI and Slurm tell none of them its local rank by an option, as with DeepSpeed."""
    jobs = [planned(one, *words_of(dest, case)).job for one in ("ssh", launcher)]
    if launcher in RANK_LAUNCHERS:
        jobs[0] = replace(jobs[0], program=replace(jobs[0].program, local_rank_option=""))
    assert node_plans(arrived(jobs[1])) == node_plans(jobs[0])


@every_launcher
@table(CHOOSES_HOSTS)
def test_an_option_that_chooses_hosts_and_slots_does_so(dest: str, case: Case, launcher: str) -> None:
    before, after = without_and_with(launcher, dest, case)
    assert after.remote is not None
    if dest == "force_multi":
        assert before.remote is None
        return
    assert after.job.hosts != before.job.hosts
    slots = [
        tuple(map(int, plan.env["CUDA_VISIBLE_DEVICES"].split(",")))
        for plan in node_plans(arrived(after.job))
    ]
    assert slots == [host.slots for host in after.job.hosts]


@every_launcher
@table({**IS_TOLD_THE_LAUNCHER, **CHOOSES_HOSTS})
def test_an_option_for_the_launcher_stands_in_its_command(dest: str, case: Case, launcher: str) -> None:
    before, after = without_and_with(launcher, dest, case)
    if dest == "force_multi":
        assert before.remote is None
        assert starts(after)
    elif (launcher, dest) in NO_EFFECT:
        assert starts(after) == starts(before)
        assert [notice.text for notice in after.notices] == [NO_EFFECT[launcher, dest]]
    elif dest in CHOOSES_HOSTS and launcher not in RANK_LAUNCHERS and dest != "num_nodes":
        assert starts(after) == starts(before)  # an agent a host, however many slots that gives
    else:
        assert starts(after) != starts(before)


@every_launcher
@table({**IS_TOLD_THE_LAUNCHER, **IS_TOLD_THE_AGENTS})
def test_what_a_launcher_is_told_changes_nothing_of_the_job(dest: str, case: Case, launcher: str) -> None:
    before, after = without_and_with(launcher, dest, case)
    assert after.job == before.job
    assert after.remote != before.remote


@pytest.mark.parametrize("launcher", RANK_LAUNCHERS)
def test_a_launcher_of_ranks_starts_a_task_a_slot_or_an_agent_a_host(launcher: str) -> None:
    include = ["--include", "here:1,3@there:0,2"]
    ranks, nodes = planned(launcher, *include), planned(launcher, *include, "--one-agent-per-node")
    assert node_plans(arrived(nodes.job)) == node_plans(ranks.job)
    counts = [count_of(one) for one in (*starts(ranks), *starts(nodes))]
    assert counts == ["4", "2"]


ELASTIC = ("--elastic_training", "--master_addr", "10.0.0.2")


@every_launcher
@pytest.mark.parametrize(
    "words, expected",
    [
        ([], (1, 2, 600.0)),
        (["--num_nodes", "2:2"], (2, 2, 600.0)),
        (["--min_elastic_nodes", "2"], (2, 2, 600.0)),
        (["--max_elastic_nodes", "1"], (1, 1, 600.0)),
        (["--num_nodes", "1:4", "--elastic-wait", "7"], (1, 2, 7.0)),
    ],
)
def test_the_bounds_of_an_elastic_job_are_for_the_head(
    launcher: str, words: list[str], expected: tuple[int, int, float]
) -> None:
    plan = planned(launcher, *ELASTIC, *words)
    assert plan.remote is not None
    assert (plan.remote.least_nodes, plan.remote.most_nodes, plan.remote.wait_s) == expected
    assert [host.name for host in plan.job.hosts] == ["here", "there"]  # those beyond the most are spares


@every_launcher
def test_an_elastic_job_has_one_program_for_each_host_that_starts_one_agent(launcher: str) -> None:
    plan = planned(launcher, *ELASTIC)
    assert plan.remote is not None
    assert plan.remote.per_node
    agents = Agents(("-m", "dsl_launcher.node"), "/opt/python", plan.job.hosts, folder="/folder")
    starts = each_host(plan.remote, agents)
    assert [start.node_rank for start in starts] == [0, 1]
    for place, start in enumerate(starts):
        words = " ".join([*start.argv, *[text for _, text in start.files]])
        assert f"--first-place {place}" in words
        assert ("here" in words.split(), "there" in words.split()) == (place == 0, place == 1) or (
            launcher in ("openmpi", "mvapich")
        )
        if launcher in RANK_LAUNCHERS:
            assert count_of(start) == "1"
    assert len({path for start in starts for path, _ in start.files}) == sum(
        len(start.files) for start in starts
    )
