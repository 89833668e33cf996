"""Where each option counts: in the job, which travels, on this node alone, or on the host that launches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.machine import make_facts
from tests.support.options import FRONT_ENDS, LINES, NEEDS, OPTIONS, ROWS, said

from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.errors import UnsupportedError
from dsl.facts import Facts
from dsl.model.codec import from_plain, to_plain
from dsl.model.job import Job
from dsl.model.options import Option
from dsl.plan.job import JobPlan, plan_job

TWO_HOSTS = "here slots=2\nthere slots=2\n"
ELASTIC = "--elastic_training --master_addr 10.0.0.1"
HOSTS = "--hostfile /hosts --no_ssh --master_addr 10.0.0.1"


# What else has to be said with an option, so that it has an effect.
WITH = {
    ("dsl", "hostfile"): "--num_nodes 1",
    ("dsl", "num_nodes"): f"{HOSTS} --node_rank 0",
    ("dsl", "master_addr"): f"{HOSTS} --node_rank 1",
    ("dsl", "min_elastic_nodes"): f"{ELASTIC} --max_elastic_nodes 3",
    ("dsl", "max_elastic_nodes"): ELASTIC,
    ("dsl", "elastic_training"): "--master_addr 10.0.0.1",
    ("dsl", "no_ssh"): "--node_rank 0",
    ("dsl", "node_rank"): HOSTS,
    **{
        ("dslrun", dest): "--nnodes 2"
        for dest in ("node_rank", "master_addr", "standalone", "rdzv_id", "spares")
    },
    ("dslrun", "run_path"): "--module",
    ("dslrun", "use_env"): "--local-rank-arg dash",
    **{(command, dest): words for command in LINES for dest, words in NEEDS.items()},
}
INSTEAD = {("dsl", "node_rank"): "--node_rank 0"}
"""The value of an option that cannot be left out, for the other side of a comparison."""

CHECKED = "it is checked and has no effect on a job of this version"
SHOWS = "the devices are looked up to be shown, by the one node that plans and starts nothing"
WITHOUT_EFFECT = {
    **{(command, "fork_server_per"): "numa is gone" for command in LINES},
    ("dslrun", "monitor_interval"): CHECKED,
    ("dslrun", "exit_barrier_timeout"): CHECKED,
    ("dslrun", "print_completion"): "the command prints a script in place of a job",
    ("dslrun", "rdzv_conf"): CHECKED,
    ("dslrun", "event_log_handler"): CHECKED,
}
REFUSED = {
    ("dsl", "autotuning"): "the command runs other jobs for it",
}
IN_THE_JOB = {
    ("dsl", "force_multi"): "where hosts are reached, variables of the command travel",
    ("dsl", "dry_run"): SHOWS,
    ("dsl", "dry_run_json"): SHOWS,
    ("dslrun", "dry_run"): SHOWS,
    ("dslrun", "dry_run_json"): SHOWS,
    ("dslrun", "local_addr"): "a job of one node meets at the address of that node",
}
EXCEPTIONS = {**WITHOUT_EFFECT, **REFUSED, **IN_THE_JOB}

NOT_IN_THE_JOB = {
    ("dsl", "node"): {"node_rank"},
    ("dslrun", "node"): {"node_rank", "local_addr"},
    ("dslrun", "launcher"): {"doctor", "doctor_first", "ring", "dry_run", "dry_run_json", "detach", "events"},
    ("dsl", "launcher"): {
        *("doctor", "doctor_first", "ring", "dry_run", "dry_run_json", "detach", "events"),
        *("hostfile", "include", "exclude"),
        *("num_nodes", "num_gpus"),
        *("no_ssh", "no_ssh_check", "force_multi", "launcher", "launcher_args", "ssh_port"),
        *("venv_script", "one_agent_per_node", "heartbeat", "autotuning", "elastic_wait"),
        *("ssh_program", "wait_hosts", "discover"),
    },
}
"""Options that count on this node alone, or only on the host that launches; all others travel in the job."""
SCOPES = {(command, dest): scope for (command, scope), names in NOT_IN_THE_JOB.items() for dest in names}


def options(scope: str) -> pytest.MarkDecorator:
    """The options of this scope, without the exceptions; ``""``: the exceptions."""
    found = []
    for command, option in OPTIONS:
        is_exception = (command, option.dest) in EXCEPTIONS
        its = SCOPES.get((command, option.dest), "job")
        if is_exception if scope == "" else its == scope and not is_exception:
            found.append((command, option))
    ids = [f"{command} {option.dest}" for command, option in found]
    return pytest.mark.parametrize("command, option", found, ids=ids)


def machine() -> Facts:
    return make_facts(cuda=4, files={"/hosts": TWO_HOSTS})


def planned(command: str, words: Sequence[str]) -> JobPlan:
    request, _ = FRONT_ENDS[command].read([*words, "t.py", "--x"], {})
    return plan_job(request, machine())


def given(command: str, option: Option) -> JobPlan:
    """What is planned with the option."""
    words = WITH.get((command, option.dest), "").split()
    return planned(command, [*words, *said(option, ROWS[command][option.dest][0])])


def without_and_with(command: str, option: Option) -> tuple[JobPlan, JobPlan]:
    """What is planned without the option and with it."""
    key = (command, option.dest)
    words = f"{WITH.get(key, '')} {INSTEAD.get(key, '')}".split()
    return planned(command, words), given(command, option)


def with_hosts_of(job: Job, other: Job) -> Job:
    """A job on the hosts and slots of another one, which meets where that one meets."""
    return replace(
        job,
        hosts=other.hosts,
        node_count=other.node_count,
        accelerator=other.accelerator,
        visible_devices=other.visible_devices,
        meeting=other.meeting,
    )


def test_every_row_of_this_file_is_an_option() -> None:
    assert {*EXCEPTIONS, *WITH, *SCOPES} <= {(command, option.dest) for command, option in OPTIONS}


@options("job")
def test_what_an_option_of_the_job_says_travels(command: str, option: Option) -> None:
    before, after = without_and_with(command, option)
    there = from_plain(to_plain(after.job), {"Job": type(after.job)})
    assert there == after.job
    assert there != before.job


@options("node")
def test_what_an_option_of_a_node_says_stays_there(command: str, option: Option) -> None:
    before, after = without_and_with(command, option)
    assert after.job == before.job
    plans = [Planner(one, machine()).plan(0) for one in (before, after)]
    assert plans[0] != plans[1]


@options("launcher")
def test_what_an_option_of_the_launching_host_says_is_used_up_there(command: str, option: Option) -> None:
    """At most it decides which hosts and slots take part, and so where they meet."""
    before, after = without_and_with(command, option)
    assert with_hosts_of(after.job, before.job) == before.job


@options("")
def test_each_exception_is_still_one(command: str, option: Option) -> None:
    key = (command, option.dest)
    if key in REFUSED:
        with pytest.raises(UnsupportedError, match=f"--{option.dest} runs many jobs"):
            given(command, option)
        return
    before, after = without_and_with(command, option)
    assert (after.job != before.job) == (key in IN_THE_JOB)
    assert after.node_rank == before.node_rank
