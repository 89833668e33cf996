"""Where each option counts: in the job, which travels, on this node alone, or on the host that launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from tests.support.machine import make_facts

from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.cli import deepspeed, options_deepspeed, options_torch, torchrun
from dsl.errors import UnsupportedError
from dsl.facts import Facts
from dsl.model.codec import from_plain, to_plain
from dsl.model.job import Job
from dsl.model.options import CommandLine, Option
from dsl.plan.job import JobPlan, plan_job

FRONT_ENDS = {"dsl": deepspeed, "dslrun": torchrun}
LINES: dict[str, CommandLine] = {
    "dsl": options_deepspeed.COMMAND_LINE,
    "dslrun": options_torch.COMMAND_LINE,
}
TWO_HOSTS = "here slots=2\nthere slots=2\n"
ELASTIC = "--elastic_training --master_addr 10.0.0.1"
HOSTS = "--hostfile /hosts --no_ssh --master_addr 10.0.0.1"


class Case(NamedTuple):
    """One option: a value that fits, and what else has to be said, or is said in its place."""

    value: str = ""
    with_: str = ""
    instead_of: str = ""


BOTH = {
    "grace": Case("7"),
    "preempt_signal": Case("USR2"),
    "preempt_grace": Case("9"),
    "signal_scope": Case("group"),
    "log_dir": Case("d"),
    "redirects": Case("0:1"),
    "tee": Case("3"),
    "local_ranks_filter": Case("0"),
    "duplicate_stdout_filters": Case("a"),
    "duplicate_stderr_filters": Case("b"),
    "tag_output": Case("never"),
    "collapse": Case(),
    "partial_after": Case("never"),
    "stdin": Case("none"),
    "log_max_size": Case("64K"),
    "bind": Case("auto"),
    "bind_strict": Case(),
    "mem_policy": Case("local"),
    "start_method": Case("forkserver"),
    "preload": Case("torch"),
    "warm_for": Case("60", with_="--start-method warm"),
    "warm_memory": Case("2G", with_="--start-method warm"),
    "fork_server_per": Case("node"),
    "debug": Case("1"),
    "debug_port": Case("7000"),
    "debug_address": Case("0.0.0.0"),
    "debug_wait": Case(),
    "strict": Case(),
    "report_bindings": Case(),
    "doctor": Case(),
    "dry_run": Case(),
    "dry_run_json": Case(),
    "events": Case("e"),
    "metrics": Case("9100"),
    "detach": Case(),
    "stacks_on_failure": Case(),
    "hang_timeout": Case("600"),
    "hang_action": Case("stop", with_="--hang-timeout 600"),
    "log_level": Case("debug"),
    "module": Case(),
    "no_python": Case(),
}
DEEPSPEED = {
    "hostfile": Case("/hosts", with_="--num_nodes 1"),
    "include": Case("localhost:1,3"),
    "exclude": Case("localhost:0"),
    "num_nodes": Case("1", with_=f"{HOSTS} --node_rank 0"),
    "num_gpus": Case("3"),
    "master_port": Case("29501"),
    "master_addr": Case("10.0.0.2", with_=f"{HOSTS} --node_rank 1"),
    "min_elastic_nodes": Case("2", with_=f"{ELASTIC} --max_elastic_nodes 3"),
    "max_elastic_nodes": Case("2", with_=ELASTIC),
    "elastic_training": Case(with_="--master_addr 10.0.0.1"),
    "elastic_wait": Case("7"),
    "max_restarts": Case("3"),
    "autotuning": Case("run"),
    "no_ssh": Case(with_="--node_rank 0"),
    "node_rank": Case("1", with_=HOSTS, instead_of="--node_rank 0"),
    "no_ssh_check": Case(),
    "force_multi": Case(),
    "one_agent_per_node": Case(),
    "heartbeat": Case("3"),
    "launcher": Case("slurm"),
    "launcher_args": Case("x y"),
    "ssh_port": Case("6"),
    "venv_script": Case("v"),
    "no_local_rank": Case(),
    "bind_cores_to_rank": Case(),
    "bind_core_list": Case("0-3"),
    "enable_each_rank_log": Case("logs"),
    "save_pid": Case(),
    "quiet": Case(),
}
TORCH = {
    "nnodes": Case("2"),
    "nproc_per_node": Case("2"),
    "node_rank": Case("1", with_="--nnodes 2"),
    "role": Case("r"),
    "max_restarts": Case("3"),
    "monitor_interval": Case("5"),
    "exit_barrier_timeout": Case("600"),
    "print_completion": Case("zsh"),
    "master_addr": Case("10.0.0.1", with_="--nnodes 2"),
    "master_port": Case("29501"),
    "local_addr": Case("10.0.0.1"),
    "standalone": Case(with_="--nnodes 2"),
    "rdzv_backend": Case("c10d"),
    "rdzv_endpoint": Case("10.0.0.1:29501"),
    "rdzv_id": Case("mine", with_="--nnodes 2"),
    "rdzv_conf": Case("a=1"),
    "run_path": Case(with_="--module"),
    "virtual_local_rank": Case(),
    "numa_binding": Case("node"),
    "logs_specs": Case("mine"),
    "log_line_prefix_template": Case("${rank}:"),
    "event_log_handler": Case("mine"),
    "local_rank_arg": Case("dash"),
    "use_env": Case(with_="--local-rank-arg dash"),
    "signals_to_handle": Case("TERM"),
    "forward_signals": Case("USR1"),
}
CASES = {"dsl": {**BOTH, **DEEPSPEED}, "dslrun": {**BOTH, **TORCH}}

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
    ("dslrun", "launcher"): {"doctor", "dry_run", "dry_run_json", "detach", "events"},
    ("dsl", "launcher"): {
        *("doctor", "dry_run", "dry_run_json", "detach", "events", "hostfile", "include", "exclude"),
        *("num_nodes", "num_gpus"),
        *("no_ssh", "no_ssh_check", "force_multi", "launcher", "launcher_args", "ssh_port"),
        *("venv_script", "one_agent_per_node", "heartbeat", "autotuning", "elastic_wait"),
    },
}
"""Options that count on this node alone, or only on the host that launches; all others travel in the job."""
SCOPES = {(command, dest): scope for (command, scope), names in NOT_IN_THE_JOB.items() for dest in names}

OPTIONS = [(command, option) for command, line in LINES.items() for option in line.options]


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
    front_end: Any = FRONT_ENDS[command]
    request, _ = front_end.read([*words, "t.py", "--x"], {})
    return plan_job(request, machine())


def given(command: str, option: Option) -> JobPlan:
    """What is planned with the option."""
    case = CASES[command][option.dest]
    assert option.is_flag == (not case.value)
    name, value = option.names[0], case.value
    own = [f"{name}={value}"] if option.bare else [name, value] if value else [name]
    return planned(command, [*case.with_.split(), *own])


def without_and_with(command: str, option: Option) -> tuple[JobPlan, JobPlan]:
    """What is planned without the option and with it."""
    case = CASES[command][option.dest]
    return planned(command, f"{case.with_} {case.instead_of}".split()), given(command, option)


def with_hosts_of(job: Job, other: Job) -> Job:
    """A job on the hosts and slots of another one, which meets where that one meets."""
    return replace(
        job,
        hosts=other.hosts,
        node_count=other.node_count,
        accelerator=other.accelerator,
        visible_devices=other.visible_devices,
        meeting=replace(job.meeting, address=other.meeting.address),
    )


def test_every_row_of_this_file_is_an_option() -> None:
    for command, line in LINES.items():
        assert set(CASES[command]) == {option.dest for option in line.options}
    assert set(EXCEPTIONS) <= {(command, option.dest) for command, option in OPTIONS}


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
