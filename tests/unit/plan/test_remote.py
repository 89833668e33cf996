"""How other hosts are reached, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.machine import make_facts
from tests.support.requests import make_request

from dsl.cli import deepspeed, options_deepspeed
from dsl.errors import DslError, HostfileError, LauncherError, OptionError
from dsl.plan.job import JobPlan, plan_job
from dsl.plan.remote import LAUNCHERS, PROGRAMS, Remote
from dsl.plan.worker import inherited_environment

ALL = ("ssh", "pdsh", "mpirun", "mpiname", "srun")
FILES = {
    "H": "alpha slots=4\nbeta slots=2\n",
    "one": "alpha slots=4\n",
    "mine": "here slots=2\n",
    "zero": "alpha slots=2\nempty slots=0\nbeta slots=1\n",
    "first": "here slots=2\nempty slots=0\n",
    "pythons": "alpha slots=4 python=/a/python # python=/no\nbeta slots=2 max_slots=3\n",
    "same": "alpha slots=4 python=/a/python\nbeta slots=2 python=/a/python\n",
    "ours": "alpha slots=4 python=/opt/python\nbeta slots=2\n",
    "bad": "alpha slots=4 python=venv/bin/python\n",
    "nodes": "alpha\nbeta\n",
    "empty": "alpha slots=4\nbeta slots=4 python=\n",
}


def _plan(
    *, programs: tuple[str, ...] = ALL, environ: Mapping[str, str] | None = None, **wish: Any
) -> JobPlan:
    facts = make_facts(files=FILES, programs=programs, cuda=4, environ=environ or {})
    return plan_job(make_request("deepspeed", **wish), facts)


def _remote(**wish: Any) -> Remote:
    found = _plan(**wish).remote
    assert found is not None
    return found


@pytest.mark.parametrize(
    "wish, is_remote",
    [
        ({"hostfile": "H"}, True),
        ({"hostfile": "one"}, True),
        ({"hostfile": "mine"}, False),
        ({"hostfile": "mine", "force_multi": True}, True),
        ({"force_multi": True}, True),
        ({}, False),
        ({"hostfile": "H", "include": "beta"}, True),
        ({"hostfile": "first"}, False),
        ({"hostfile": "H", "no_ssh": True, "node_rank": 1, "master_addr": "m"}, False),
        ({"force_multi": True, "no_ssh": True, "node_rank": 0}, False),
    ],
)
def test_when_hosts_have_to_be_reached(wish: dict[str, Any], *, is_remote: bool) -> None:
    planned = _plan(**wish)
    assert (planned.remote is not None) is is_remote
    assert planned.node_rank == (wish.get("node_rank") or 0)


def test_hosts_keep_their_names_and_meet_where_the_head_finds_it_or_the_user_says() -> None:
    planned = _plan(hostfile="H")
    assert [(host.name, host.slots) for host in planned.job.hosts] == [
        ("alpha", (0, 1, 2, 3)),
        ("beta", (0, 1)),
    ]
    assert (planned.job.meeting.address, planned.job.node_count) == ("", 2)
    assert _plan(hostfile="H", master_addr="m").job.meeting.address == "m"
    assert _plan(force_multi=True).job.meeting.address == "127.0.0.1"


def test_hosts_without_slots_take_no_part() -> None:
    planned = _plan(hostfile="zero")
    assert [host.name for host in planned.job.hosts] == ["alpha", "beta"]
    assert [host.name for host in _plan(hostfile="zero", num_nodes=2).job.hosts] == ["alpha", "beta"]


@pytest.mark.parametrize(
    "programs, wish, launcher",
    [
        (ALL, {}, "pdsh"),
        (("ssh", "srun"), {}, "ssh"),
        (("pdsh",), {}, "pdsh"),
        (ALL, {"launcher": "SSH"}, "ssh"),
        (ALL, {"launcher": "OpenMPI"}, "openmpi"),
        (ALL, {"hostfile": "pythons"}, "pdsh"),
        (ALL, {"hostfile": "pythons", "launcher": "slurm"}, "slurm"),
    ],
)
def test_the_launcher(programs: tuple[str, ...], wish: dict[str, Any], launcher: str) -> None:
    assert _remote(**{"hostfile": "H", "programs": programs, **wish}).launcher == launcher


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_is_missing_is_named_with_its_program(launcher: Any) -> None:
    for program in PROGRAMS[launcher]:
        others = tuple(one for one in ALL if one != program)
        with pytest.raises(
            LauncherError, match=f"'{launcher}' not installed: {program} is not on PATH, install"
        ):
            _plan(hostfile="H", launcher=launcher, programs=others)
    assert _remote(hostfile="H", launcher=launcher, programs=PROGRAMS[launcher]).launcher == launcher


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "wish, kind, message",
    [
        ({"programs": ()}, LauncherError, "other hosts need ssh, which is not on PATH, install OpenSSH's client"),
        ({"launcher": "x"}, LauncherError, "unknown launcher 'x', expected one of pdsh, openmpi"),
        ({"launcher_args": "-a 'b"}, OptionError, "--launcher_args \"-a 'b\" are no words of a shell: no closing"),
        ({"ssh_program": "a 'b"}, OptionError, "--ssh-program \"a 'b\" are no words of a shell: no closing"),
        ({"ssh_program": "no x"}, LauncherError, "--ssh-program 'no' names no program that can be executed"),
        ({"ssh_program": "pdsh", "launcher": "pdsh"}, OptionError, "--ssh-program takes the place of ssh: leave"),
        ({"hostfile": "bad"}, HostfileError, "bad line 1: 'python=venv/bin/python' names no interpreter"),
        ({"hostfile": "empty"}, HostfileError, "empty line 2: 'python=' names no interpreter"),
    ],
)  # fmt: skip
def test_what_is_refused(wish: dict[str, Any], kind: type[DslError], message: str) -> None:
    with pytest.raises(kind) as caught:
        _plan(**{"hostfile": "H", **wish})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "num_gpus, accelerator, asked_for",
    [(None, "", ()), (1, "", (1, 1)), (1, "cuda", (1, 1)), (1, "cpu", ())],
)
def test_devices_that_a_scheduler_is_asked_for(
    num_gpus: int | None, accelerator: str, asked_for: tuple[int, ...]
) -> None:
    """Slurm refuses to give devices to CPUs."""
    environ = {"DS_ACCELERATOR": accelerator} if accelerator else {}
    assert _remote(hostfile="H", num_gpus=num_gpus, environ=environ).devices == asked_for


@pytest.mark.parametrize(
    "given, num_gpus, asked_for",
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, None, (4, 4)),
        ({"SLURM_GPUS_PER_NODE": "4"}, 3, (3, 3)),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "2,1"}, None, (4, 2)),
        ({"SLURM_TASKS_PER_NODE": "2,1"}, None, ()),
        ({"SLURM_TASKS_PER_NODE": "2,1"}, 1, ()),
    ],
)
def test_a_step_gets_the_devices_of_its_allocation(
    given: dict[str, str], num_gpus: int | None, asked_for: tuple[int, ...]
) -> None:
    """Slurm leaves some out where it was asked for devices per task, and a host has one task, the agent."""
    environ = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "3", **given}
    assert _remote(num_gpus=num_gpus, environ=environ).devices == asked_for


@pytest.mark.parametrize(
    "name, pythons",
    [
        ("H", ()),
        ("pythons", ("/a/python", "/opt/python")),
        ("same", ("/a/python", "/a/python")),
        ("ours", ()),
    ],
)
def test_interpreters_of_the_hosts(name: str, pythons: tuple[str, ...]) -> None:
    assert _remote(hostfile=name).pythons == pythons


def test_words_for_the_launcher_are_split_as_a_shell_does() -> None:
    assert _remote(hostfile="H", launcher_args=" -x 'a b' --c=\"d $e\" ").args == ("-x", "a b", "--c=d $e")
    assert _remote(hostfile="H", launcher_args="  ").args == ()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_of_ranks_start_one_agent_a_node_if_that_is_asked_for(launcher: str) -> None:
    assert _remote(hostfile="H", launcher=launcher).per_node == (launcher in ("ssh", "pdsh"))
    assert _remote(hostfile="H", launcher=launcher, per_node=True).per_node


# What each option says of the way to the hosts: words after it -> field of `Remote`, and its value.
TOLD: dict[str, tuple[str, str, Any]] = {
    "launcher": ("impi", "launcher", "impi"),
    "launcher_args": ("-a b", "args", ("-a", "b")),
    "ssh_port": ("6", "ssh_port", 6),
    "venv_script": ("v", "venv_script", "v"),
    "ssh_program": ("pdsh -i {host}", "program", ("pdsh", "-i", "{host}")),
    "wait_hosts": ("3", "hosts_wait_s", 3.0),
    "no_ssh_check": ("", "checks", False),
    "heartbeat": ("3", "heartbeat_s", 3.0),
    "one_agent_per_node": ("", "per_node", True),
}
# They decide whether there is such a way at all.
WHETHER = {"no_ssh", "node_rank", "force_multi"}


def test_no_option_for_several_hosts_is_lost() -> None:
    options = options_deepspeed.COMMAND_LINE.groups["several hosts"]
    assert {one.dest for one in options} - WHETHER == set(TOLD)
    for option in options:
        if option.dest in WHETHER:
            continue
        words, field, value = TOLD[option.dest]
        # With pdsh it is one agent a node already.
        base = ["-H", "H", *(["--launcher", "slurm"] if option.dest == "one_agent_per_node" else [])]
        request, _ = deepspeed.read([*base, option.names[0], *([words] if words else []), "t.py"], {})
        before, _ = deepspeed.read([*base, "t.py"], {})
        facts = make_facts(files=FILES)
        found, without = plan_job(request, facts).remote, plan_job(before, facts).remote
        assert getattr(found, field) == value
        assert getattr(without, field) != value


def test_where_the_agents_run() -> None:
    assert _remote(hostfile="H").cwd == "/data/dir"


def _variables(environ: dict[str, str], files: dict[str, str] | None = None, **facts: Any) -> dict[str, str]:
    machine = make_facts(environ=environ, files={**FILES, **(files or {})}, **facts)
    return dict(plan_job(make_request("deepspeed", hostfile="H"), machine).job.env)


HEAD = dict.fromkeys(("NCCL_DEBUG", "HCCL_X", "BKCL_X", "PATH", "LD_LIBRARY_PATH", "OTHER"), "1")


@pytest.mark.parametrize(
    "environ, machine, names",
    [
        ({}, {"cuda": 2}, {"NCCL_DEBUG"}),
        ({}, {"other_name": "npu", "other_count": lambda *_: 8}, {"HCCL_X", "PATH", "LD_LIBRARY_PATH"}),
        ({}, {}, {"NCCL_DEBUG", "HCCL_X", "BKCL_X"}),
        ({"DS_ACCELERATOR": "cuda"}, {}, {"NCCL_DEBUG"}),
        ({"DS_ACCELERATOR": "cpu"}, {"cuda": 2}, set()),
    ],
)
def test_variables_of_accelerators(environ: dict[str, str], machine: dict[str, Any], names: set[str]) -> None:
    """A login node that has none cannot know which the hosts have."""
    assert set(_variables({**HEAD, **environ}, **machine)) == {"PYTHONPATH", *names}


@pytest.mark.guarantee("G5")
def test_values_go_byte_for_byte() -> None:
    environ = {"UCX_A": " a\n'\"$;,\udcff ", "PYTHON_B": "", "AZUREML_RUN_TOKEN": "t", "MLFLOW": "é"}
    assert _variables(environ) == {**environ, "PYTHONPATH": "/data/dir"}


def test_an_env_file_wins_over_the_environment_and_that_of_the_directory_over_that_at_home() -> None:
    files = {"/home/me/.deepspeed_env": "UCX_A=home\nB=home\n", "/data/dir/.deepspeed_env": "B=dir\n"}
    found = _variables({"UCX_A": "shell", "B": "shell"}, files)
    assert found == {"UCX_A": "home", "PYTHONPATH": "/data/dir", "B": "dir"}


def _named(*words: str, **environ: str) -> tuple[dict[str, str], list[str]]:
    planned = plan_job(make_request("deepspeed", variables=words), make_facts(environ=environ))
    return dict(planned.job.env), [notice.text for notice in planned.notices if "-x" in notice.text]


@pytest.mark.guarantee("G5")
def test_variables_that_the_user_names_win_and_a_later_one_over_an_earlier_one() -> None:
    assert _named("A", "B=b = 'c'", "W_*", "W_B=", A="a", W_A="1", W_B="2", V="3") == (
        {"A": "a", "B": "b = 'c'", "W_A": "1", "W_B": ""},
        [],
    )


def test_a_name_that_no_variable_has_is_told() -> None:
    """It may be set on no machine; the job goes on, as a variable may well be optional."""
    text = "-x {} names no variable of this command: set it, or write NAME=VALUE"
    assert _named("A", "W_*", B="1") == ({}, [text.format("'A'"), text.format("'W_*'")])


def test_a_value_that_the_launcher_replaces_is_told() -> None:
    words: tuple[str, ...] = ("RANK=7", "MASTER_ADDR", "LOCAL*", "CUDA_VISIBLE_DEVICES=2,3", "A=1")
    _, told = _named(*words, MASTER_ADDR="a", LOCAL_RANK="1")
    text = "-x {} has no effect: {} gives it a value of its own"
    assert told == [text.format(name, "dsl") for name in ("RANK", "CUDA_VISIBLE_DEVICES")]
    words = ("CUDA_VISIBLE_DEVICES=2", "TORCHELASTIC_ERROR_FILE=e", "RANK=7")
    notices = plan_job(make_request("torch", variables=words), make_facts()).notices
    assert [one.text for one in notices] == [text.format("RANK", "dslrun")]


@pytest.mark.parametrize(
    "wish, who",
    [
        ({"launcher": "slurm", "programs": ("srun",)}, "--launcher slurm, which uses no ssh"),
        ({"training": True, "master_addr": "a"}, "--elastic_training, which has --elastic-wait"),
    ],
)
def test_where_nobody_waits_for_hosts_first(wish: dict[str, Any], who: str) -> None:
    planned = _plan(hostfile="H", wait_hosts_s=5.0, **wish)
    assert planned.remote is not None
    assert planned.remote.hosts_wait_s == 0
    assert f"--wait-hosts has no effect with {who}" in [notice.text for notice in planned.notices]


def test_a_program_in_place_of_ssh_gets_no_words_for_ssh() -> None:
    wish: dict[str, Any] = {"ssh_program": "pdsh", "ssh_port": 22, "launcher_args": "-v"}
    said = [one.text for one in _plan(hostfile="H", **wish).notices]
    assert said == [
        f"{option} has no effect with --ssh-program" for option in ("--ssh_port", "--launcher_args")
    ]


def test_commands_of_an_elastic_job_that_start_their_own_host_wait_for_no_other() -> None:
    wish: dict[str, Any] = {"training": True, "master_addr": "a", "no_ssh": True, "node_rank": 0}
    planned = _plan(hostfile="H", wait_hosts_s=5.0, **wish)
    assert planned.remote is None
    text = "--wait-hosts has no effect with --elastic_training, which has --elastic-wait"
    assert text in [notice.text for notice in planned.notices]


def test_a_job_of_this_machine_alone_reads_no_env_file() -> None:
    planned = plan_job(
        make_request("deepspeed"),
        make_facts(environ={"UCX_A": "a"}, files={"/data/dir/.deepspeed_env": "bad"}),
    )
    assert planned.job.env == ()


def test_what_is_said_of_env_files() -> None:
    files = {**FILES, "/data/dir/.deepspeed_env": "A=/x:$A\nB=1\nA=2\n"}
    planned = plan_job(make_request("deepspeed", hostfile="H"), make_facts(files=files))
    assert [(one.level, one.text) for one in planned.notices] == [
        ("info", "variables of /data/dir/.deepspeed_env go to all hosts: A, B"),
    ]
    facts = make_facts(files=FILES, environ={"DS_ENV_FILE": "my"})
    (notice,) = plan_job(make_request("deepspeed", hostfile="H"), facts).notices
    assert notice.line == "warning: there is no /home/me/my nor /data/dir/my, which DS_ENV_FILE names"


def test_the_workers_of_each_host_get_the_value_that_a_variable_has_there() -> None:
    lines = 'LD_LIBRARY_PATH=/efa:$LD_LIBRARY_PATH\nTOKEN=pa$$word\nPLUGIN="${EFA}/net"\nTWICE=$PLUGIN\n'
    request = make_request("deepspeed", hostfile="H")
    facts = make_facts(
        files={**FILES, "/data/dir/.deepspeed_env": lines},
        environ={"LD_LIBRARY_PATH": "/head", "EFA": "/head"},
    )
    job = plan_job(request, facts).job
    assert inherited_environment(job, {"LD_LIBRARY_PATH": "/host", "EFA": "/opt", "HOME": "/h"}) == {
        "HOME": "/h",
        "EFA": "/opt",
        "PYTHONPATH": "/data/dir",
        "LD_LIBRARY_PATH": "/efa:/host",
        "TOKEN": "pa$$word",
        "PLUGIN": "/opt/net",
        "TWICE": "/opt/net",
    }
    assert inherited_environment(job, {})["LD_LIBRARY_PATH"] == "/efa:"


SLURM = {"SLURM_JOB_NODELIST": "alpha,beta", "SLURM_JOB_ID": "12", "SLURM_GPUS_ON_NODE": "4"}


def _allocated(environ: dict[str, str], programs: tuple[str, ...] = ALL, **wish: Any) -> JobPlan:
    request = make_request("deepspeed", **{"hostfile": "/job/hostfile", **wish})
    return plan_job(request, make_facts(environ=environ, files=FILES, programs=programs, cuda=2))


def test_without_a_hostfile_the_hosts_are_those_of_the_scheduler() -> None:
    planned = _allocated(SLURM)
    assert [(host.name, len(host.slots)) for host in planned.job.hosts] == [("alpha", 4), ("beta", 4)]
    assert planned.remote is not None
    assert planned.remote.launcher == "slurm"
    assert (planned.job.accelerator, planned.job.meeting.address) == ("", "")
    (notice,) = [one for one in planned.notices if one.level == "info"]
    assert notice.text == "hosts of Slurm job 12: alpha, beta (2 with 8 slots)"


@pytest.mark.parametrize(
    "environ, wish, hosts",
    [
        (SLURM, {"include": "beta:1"}, ["beta"]),
        (SLURM, {"num_nodes": 1}, ["alpha"]),
        ({**SLURM, "SLURM_JOB_NODELIST": "alpha"}, {}, ["alpha"]),
        ({"PBS_NODEFILE": "nodes"}, {}, ["alpha", "beta"]),
        # As it would be without the scheduler.
        ({**SLURM, "SLURM_JOB_NODELIST": "here"}, {}, ["localhost"]),
        (SLURM, {"no_ssh": True, "node_rank": 0}, ["localhost"]),
        (SLURM, {"include": "localhost:1"}, ["localhost"]),
        (SLURM, {"hostfile": "missing"}, ["localhost"]),
        ({**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, {}, ["localhost"]),
        (SLURM, {"hostfile": "mine"}, ["here"]),
    ],
)
def test_when_a_scheduler_is_asked(environ: dict[str, str], wish: dict[str, Any], hosts: list[str]) -> None:
    planned = _allocated(environ, **wish)
    assert [host.name for host in planned.job.hosts] == hosts
    assert (planned.remote is not None) == (hosts[0] in ("alpha", "beta"))


@pytest.mark.parametrize(
    "environ, programs, launcher",
    [
        (SLURM, ("ssh", "pdsh"), "pdsh"),
        (SLURM, ("ssh", "srun"), "slurm"),
        ({"LSB_HOSTS": "alpha beta"}, ALL, "pdsh"),
    ],
)
def test_the_launcher_of_an_allocation(
    environ: dict[str, str], programs: tuple[str, ...], launcher: str
) -> None:
    remote = _allocated(environ, programs).remote
    assert remote is not None
    assert remote.launcher == launcher


STEP = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
HET = {**SLURM, "SLURM_HET_SIZE": "3"}


@pytest.mark.parametrize(
    "environ, wish, said",
    [
        ({**STEP, "SLURM_PROCID": "0"}, {}, ["srun has started this command 2 times, so 2 jobs run"]),
        ({**STEP, "SLURM_PROCID": "1"}, {}, []),
        ({**STEP, "SLURM_PROCID": "0", "DSL_JOB_ID": "x"}, {}, []),
        ({**STEP, "SLURM_PROCID": "0"}, {"no_ssh": True, "node_rank": 0}, []),
        ({**STEP, "SLURM_PROCID": "0"}, {"include": "localhost:1"}, []),
        (HET, {}, ["only component 0 of this heterogeneous Slurm job takes part, of 3"]),
        ({**HET, "SLURM_JOB_NODELIST": "here"}, {}, ["only component 0"]),
        ({"PBS_NODEFILE": "nodes", "PBS_JOBID": "7"}, {}, ["this host has 2 devices: --num_gpus 2 starts 2"]),
        ({"PBS_NODEFILE": "nodes"}, {"num_gpus": 2}, []),
        ({"PBS_NODEFILE": "nodes", "DS_ACCELERATOR": "npu"}, {}, []),
        ({"LSB_HOSTS": "alpha alpha beta"}, {}, []),
    ],
)
def test_what_is_most_likely_not_meant_in_an_allocation(
    environ: dict[str, str], wish: dict[str, Any], said: list[str]
) -> None:
    found = [one.text for one in _allocated(environ, **wish).notices if one.level == "warning"]
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_counted_devices_are_a_bound_and_tasks_are_none() -> None:
    planned = _allocated({"LSB_HOSTS": "alpha beta"}, num_gpus=3)
    assert [host.slots for host in planned.job.hosts] == [(0, 1, 2), (0, 1, 2)]
    with pytest.raises(DslError, match="--num_gpus 5 is too many: host 'alpha' has slots 0 to 3"):
        _allocated(SLURM, num_gpus=5)
    with pytest.raises(DslError, match="--num_nodes 3 is more than the hosts that Slurm job 12 leaves: 2"):
        _allocated(SLURM, num_nodes=3)
    with pytest.raises(DslError, match="hostname 'alpa' not found in Slurm job 12, did you mean 'alpha'"):
        _allocated(SLURM, include="alpa")


@pytest.mark.parametrize(
    "environ, wish, per_node",
    [
        (SLURM, {}, True),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2)"}, {}, False),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4,1"}, {}, True),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4,1"}, {"include": "alpha@beta:2"}, False),
        ({"SLURM_JOB_NODELIST": "alpha,beta", "SLURM_TASKS_PER_NODE": "2(x2)"}, {}, False),
        ({"SLURM_JOB_NODELIST": "alpha,beta", "SLURM_TASKS_PER_NODE": "2(x2)"}, {"num_gpus": 3}, True),
        ({"LSB_HOSTS": "alpha beta"}, {"num_gpus": 3, "launcher": "openmpi"}, False),
    ],
)
def test_an_allocation_without_a_task_for_each_rank_gets_one_a_node(
    environ: dict[str, str], wish: dict[str, Any], *, per_node: bool
) -> None:
    """As it is made for torchrun, with one task a node, Slurm would refuse more."""
    remote = _allocated(environ, **wish).remote
    assert remote is not None
    assert remote.per_node is per_node
