"""Elastic jobs: how many hosts they may have, which of those that are there they take, and what their workers find."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.machine import make_facts

from dsl._record import replace
from dsl.agent.joining import store_joining
from dsl.agent.planner import Planner
from dsl.cli import deepspeed
from dsl.errors import OptionError
from dsl.model.job import Meeting
from dsl.plan.job import JobPlan, plan_job
from dsl.plan.remote import choose_hosts
from dsl.plan.worker import DEEPSPEED, ELASTIC, group_environment, worker_environment
from dsl.rendezvous.delegate_messages import Claimed

HOSTS = "n0 slots=2\nn1 slots=2\nn2 slots=2\nn3 slots=2\n"
UNEVEN = "n0 slots=2\nidle slots=0\nn1 slots=1\n"
CONFIG = """{"elasticity": {"enabled": true, "max_train_batch_size": 16, "micro_batch_sizes": [4], "version": 0.1}}"""
ODD = """{"elasticity": {"enabled": true, "max_train_batch_size": 3, "micro_batch_sizes": [3], "version": 0.1}}"""


def planned(*words: str, environ: dict[str, str] | None = None, script: str = "t.py") -> JobPlan:
    """What the launching host decides for an elastic job."""
    line = ["--elastic_training", "--master_addr", "10.0.0.1", *words, *script.split()]
    request, _ = deepspeed.read(line, {})
    files = {"/hosts": HOSTS, "/uneven": UNEVEN, "/ok.json": CONFIG, "/odd.json": ODD}
    return plan_job(request, make_facts(cuda=4, files=files, environ=environ or {}))


@pytest.mark.parametrize(
    "ready, least, most, sizes, expected",
    [
        ([(0, 2), (1, 2)], 1, 4, (), (0, 1)),
        ([(2, 2), (0, 2), (1, 2)], 1, 2, (), (0, 2)),  # the most welcome come first
        ([(0, 2)], 2, 4, (), None),
        ([(0, 2), (1, 2), (2, 2)], 1, 4, (2, 4), (0, 1)),
        ([(0, 2), (1, 2), (2, 2)], 3, 4, (2, 4), None),
        ([(0, 1), (1, 4), (2, 4)], 1, 3, (8,), (1, 2)),
        (
            [(0, 1), (1, 4), (2, 2), (3, 1)],
            1,
            4,
            (3, 6),
            (0, 1, 3),
        ),  # as many hosts as possible, then workers
        ([], 1, 1, (), None),
    ],
)
def test_as_many_hosts_take_part_as_the_job_accepts(
    ready: list[tuple[int, int]], least: int, most: int, sizes: tuple[int, ...], expected: Any
) -> None:
    assert choose_hosts(ready, least, most, sizes) == expected


def test_a_job_over_a_hostfile_is_for_the_head() -> None:
    plan = planned("-H", "/hosts", "--num_nodes", "2:3")
    assert plan.remote is not None
    assert (plan.remote.least_nodes, plan.remote.most_nodes, plan.remote.per_node) == (2, 3, True)
    assert plan.job.gives_up
    assert (plan.job.meeting.kind, plan.job.node_count, len(plan.job.hosts)) == ("static", 4, 4)
    assert (plan.job.max_restarts, plan.job.role, plan.job.program.local_rank_option) == (100, "trainer", "")
    assert plan.job.flavour == ELASTIC


def test_restarts_that_are_counted_out_are_all_spent() -> None:
    plan = planned("-H", "/hosts", "--max-restarts", "3")
    assert (plan.job.max_restarts, plan.job.gives_up) == (3, False)


def test_a_number_of_hosts_is_a_part_of_the_hostfile_and_a_range_is_not() -> None:
    assert [host.name for host in planned("-H", "/hosts", "--num_nodes", "2").job.hosts] == ["n0", "n1"]
    assert len(planned("-H", "/hosts", "--num_nodes", "1:2").job.hosts) == 4


def test_each_run_has_a_name_of_its_own_unless_it_is_named() -> None:
    words = ("-H", "/hosts")
    assert planned(*words, environ={"ELASTIC_RUN_ID": "mine"}).job.run_id == "mine"
    assert planned(*words).job.run_id not in ("", "123456789")


def test_without_other_hosts_to_reach_nodes_find_each_other_at_the_master_address() -> None:
    plan = planned("--min_elastic_nodes", "2", "--max_elastic_nodes", "4", "--elastic-wait", "30")
    meeting = plan.job.meeting
    assert plan.remote is None
    assert (meeting.kind, meeting.backend, meeting.endpoint) == ("dynamic", "c10d", "10.0.0.1:29500")
    assert (meeting.least_nodes, plan.job.node_count) == (2, 4)
    assert meeting.settings == (("join_timeout", "30"),)
    assert plan.notices == () or "not used" not in str(plan.notices)


def test_commands_of_one_job_find_the_same_name_and_those_of_another_do_not() -> None:
    words = ("--max_elastic_nodes", "4")
    names = [planned(*words, script=script).job.run_id for script in ("t.py --x", "t.py --x", "t.py --y")]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    "words, text",
    [
        (["-H", "/hosts", "--num_nodes", "5:6"], "at least 5 nodes: there are 4 hosts"),
        (["-H", "/hosts", "--min_elastic_nodes", "0"], "the least must be at least 1"),
        (["-H", "/hosts", "--min_elastic_nodes", "3", "--max_elastic_nodes", "2"], "on 3 to 2 nodes"),
        (["-H", "/hosts", "--num_nodes", "1:2", "--min_elastic_nodes", "2"], "contradict each other"),
        (["-H", "/hosts", "--num_nodes", "0:2"], "MIN must be at least 1"),
    ],
)
def test_bounds_that_make_no_sense_are_one_line(words: list[str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        planned(*words)


def test_the_job_is_asked_for_numbers_of_workers_that_it_accepts() -> None:
    plan = planned("-H", "/hosts", script="t.py --deepspeed_config /ok.json")
    assert plan.remote is not None
    assert plan.remote.world_sizes == (1, 2, 4)


def test_a_job_that_accepts_no_number_of_workers_is_not_started() -> None:
    with pytest.raises(OptionError, match=r"no 1 to 4 hosts make a number of workers .*: it accepts 1$"):
        planned("-H", "/hosts", script="t.py --deepspeed_config /odd.json")


def test_workers_find_what_deepspeeds_elastic_agent_gives_them_fresh_for_each_meeting() -> None:
    job = planned("-H", "/hosts", "--max-restarts", "3", environ={"ELASTIC_RUN_ID": "mine"}).job
    meeting = Meeting(4, 1, (2, 2, 2), "10.0.0.9", 4711, restarts=2, reason="membership")
    env = {**group_environment(job, meeting, {}), **worker_environment(ELASTIC, meeting, 1)}
    assert env == {
        "LOCAL_RANK": "1",
        "RANK": "3",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "mine",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "3",
        "NODE_RANK": "1",
        "DSL_RESTART_REASON": "membership",
        "DSL_ATTEMPT": "4",
    }
    assert ELASTIC.defaults == (("NCCL_ASYNC_ERROR_HANDLING", "1"),)
    assert replace(ELASTIC, **{name: getattr(DEEPSPEED, name) for name in CHANGED}) == DEEPSPEED


CHANGED = ("group_variables", "worker_variables", "constants", "defaults")


def test_without_a_head_a_node_starts_the_slots_of_its_own_host_whatever_its_rank() -> None:
    """The nodes get their ranks in the order in which they find each other, also if no file names them."""
    plan, facts = planned("-H", "/uneven", "--no_ssh", "--node_rank", "2"), make_facts(cuda=4)
    planner, claimed = (
        Planner(plan, facts),
        Claimed(1, 7, "10.0.0.1", "n", "10.0.0.2", 41001, "0" * 64, "n:1"),
    )
    meeting = Meeting(0, 0, (1, 2), "10.0.0.1", 4711)
    node = planner.sketch(meeting)
    assert (node.host, len(node.workers)) == ("n1", 1)
    assert store_joining(plan, claimed, 1, facts, None).hello.host == "n1"
    alone = planned("--no_ssh", "--node_rank", "0", "--num_gpus", "1", "--num_nodes", "1:2")
    second = replace(meeting, node_rank=1, local_world_sizes=(1, 1))
    node = Planner(alone, facts).sketch(second)
    assert (node.host, [one.rank for one in node.workers]) == (facts.names.host, [1])
    assert store_joining(alone, claimed, 1, facts, None).hello.place == 7


@pytest.mark.parametrize(
    "words, bounds",
    [
        (["-H", "/hosts"], (1, 4)),
        (["-H", "/uneven"], (1, 2)),
        (["-H", "/hosts", "--min_elastic_nodes", "2"], (2, 4)),
        (["-H", "/hosts", "--min_elastic_nodes", "5"], (5, 5)),
        (["--min_elastic_nodes", "2"], (2, 2)),
        (["--num_nodes", "1:3"], (1, 3)),
        ([], (1, 1)),
    ],
)
def test_without_a_head_all_hosts_of_the_file_may_take_part_and_others_too(
    words: list[str], bounds: tuple[int, int]
) -> None:
    job = planned(*words, "--no_ssh", "--node_rank", "0").job
    assert (job.meeting.least_nodes, job.node_count) == bounds
