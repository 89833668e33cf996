"""The hosts of an elastic job that a program prints, when it starts and later."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.machine import make_facts

from dsl._record import replace
from dsl.cli import deepspeed
from dsl.errors import DslError, HostfileError, OptionError
from dsl.plan.job import JobPlan, plan_job
from dsl.plan.listed import relisted
from dsl.resources.hosts import parse_discovered
from dsl.words import MOST_NODES

FILES = {
    "one": "here slots=2\n",
    "two": "a slots=2\nb:3\n",
    "config": '{"elasticity": {"enabled": true, "micro_batch_sizes": [1], "max_train_batch_size": 4, "version": 0.1}}',
}
ELASTIC = "--elastic_training --master_addr m"


def planned(*words: str, given: str = ELASTIC, after: str = "") -> JobPlan:
    line = ["--discover", "list two", *given.split(), *words, "t.py", *after.split()]
    return plan_job(deepspeed.read(line, {})[0], make_facts(files=FILES, programs=("ssh", "srun", "list")))


def listed(text: str, plan: JobPlan | None = None) -> Any:
    plan = plan or planned()
    assert plan.remote is not None
    job, remote, places = relisted(plan.job, plan.remote, text, "/opt/python")
    return [(host.name, len(host.slots)) for host in job.hosts], remote.pythons, sorted(places)


def test_the_program_names_the_hosts_and_may_name_more_later() -> None:
    plan = planned()
    remote = plan.remote
    assert remote is not None
    assert [(host.name, len(host.slots)) for host in plan.job.hosts] == [("a", 2), ("b", 3)]
    assert (remote.discover, remote.least_nodes, remote.most_nodes) == (("list", "two"), 1, MOST_NODES)
    assert plan.notices == ()
    bounded = planned("--num_nodes", "3:4").remote
    assert bounded is not None
    assert (bounded.least_nodes, bounded.most_nodes) == (3, 4)


def test_a_job_that_has_this_machine_alone_by_now_is_conducted_by_a_head() -> None:
    assert planned("--discover", "list one").remote is not None


def test_without_an_elastic_job_it_has_no_effect() -> None:
    plan = planned(given="")
    assert plan.remote is None
    assert "--discover has no effect without --elastic_training" in [one.text for one in plan.notices]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "words, kind, text",
    [
        ("--hostfile H", OptionError, "--hostfile cannot be used with --discover"),
        ("--exclude a", OptionError, "--exclude cannot be used with --discover"),
        ("--num_nodes 2", OptionError, "--num_nodes without a range cannot be used with --discover"),
        ("--num_gpus 2", OptionError, "--num_gpus cannot be used with --discover"),
        ("--no_ssh --node_rank 0", OptionError, "--no_ssh cannot be used with --discover"),
        ("--launcher SLURM", OptionError, "--launcher slurm cannot be used with --discover"),
        ("--launcher impi", OptionError, "--launcher impi cannot be used with --discover"),
        ("--discover nothing", OptionError, "--discover 'nothing' names no program"),
        ("--discover=", None, ""),
        ("--discover=list\\", OptionError, "--discover 'list\\\\' are no words of a shell"),
    ],
)
def test_what_is_refused(words: str, kind: type[DslError] | None, text: str) -> None:
    if kind is None:
        assert planned(*words.split()).remote is None
        return
    with pytest.raises(kind) as caught:
        planned(*words.split())
    assert str(caught.value).startswith(text)


def test_a_host_keeps_its_place_and_another_number_of_slots_makes_it_another_one() -> None:
    assert listed("b slots=3\na slots=2\n") == ([("a", 2), ("b", 3)], (), [0, 1])
    assert listed("c:1\nb slots=3\nd slots=0\n") == ([("a", 2), ("b", 3), ("c", 1)], (), [1, 2])
    assert listed("a slots=1\n") == ([("a", 2), ("b", 3), ("a", 1)], (), [2])


def test_a_new_host_may_have_an_interpreter_of_its_own() -> None:
    hosts, pythons, _ = listed("c slots=1 python=/c/python\n")
    assert (len(hosts), pythons) == (3, ("/opt/python", "/opt/python", "/c/python"))


def test_there_is_a_bound_for_all_hosts_that_were_ever_listed() -> None:
    with pytest.raises(HostfileError, match="different hosts were listed"):
        listed("".join([f"n{number}:1\n" for number in range(MOST_NODES)]))


def test_hosts_are_written_as_in_a_hostfile_or_as_horovod_has_them() -> None:
    lines = ["# all", "", "a slots=4 python=/p", "b:2", "u@[::1]:3", "[::2] slots=1", "idle:0"]
    assert parse_discovered(lines) == {"a": 4, "b": 2, "u@[::1]": 3, "[::2]": 1}
    for text in ("a", "a:x", "a b:2", "::"):
        with pytest.raises(HostfileError, match="--discover line 1: hostfile contains a bad entry"):
            parse_discovered([text])
    with pytest.raises(HostfileError, match="--discover: no host has a slot"):
        parse_discovered(["idle:0", "b slots=0"])


def test_a_job_that_accepts_no_number_of_workers_yet_waits_for_hosts() -> None:
    plan = planned(after="--deepspeed_config config")
    assert plan.remote is not None
    assert plan.remote.world_sizes == (1, 2, 4)
    assert replace(plan.remote, world_sizes=()) == planned().remote
