"""The order of decisions, and the plan of a node. What DeepSpeed decides itself is in the contract tests."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.machine import FREE_PORT, UNASKED, make_facts
from tests.support.requests import make_request

from dsl.agent.planner import Planner
from dsl.errors import (
    DslError,
    FilterError,
    HostfileError,
    LauncherError,
    OptionError,
    PlacementError,
    PortError,
    UnsupportedError,
)
from dsl.model.job import NodePlan, Notice
from dsl.plan.job import JobPlan, plan_job
from dsl.plan.worker import POD_ENVIRONMENT_PATH

TWO_HOSTS = {"H": "alpha slots=4\nbeta slots=2\n"}
MACHINE = ("cuda", "taken", "gpus", "other_count")
NO_SSH: dict[str, Any] = {"hostfile": "H", "no_ssh": True, "master_addr": "10.0.0.1"}


def _request(wish: dict[str, Any], *args: str) -> Any:
    wish = dict(wish)
    if wish.pop("no_local_rank", False):
        wish["local_rank_option"] = ""
    return make_request("deepspeed", "t.py", *args, **wish)


def _job(
    environ: dict[str, str] | None = None, *, files: dict[str, str] | None = None, **wish: Any
) -> JobPlan:
    given = {name: wish.pop(name) for name in MACHINE if name in wish}
    return plan_job(_request(wish), make_facts(environ=environ or {}, files=files, **given))


class Planned:
    """The plan of a node, and all that is said of it and of its job."""

    def __init__(self, plan: NodePlan, notices: tuple[Notice, ...]) -> None:
        self.plan = plan
        self.notices = notices

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)


def _node(environ: dict[str, str] | None = None, *, files: dict[str, str] | None = None, **wish: Any) -> Any:
    given = {name: wish.pop(name) for name in (*MACHINE, "count_run") if name in wish}
    facts = make_facts(environ=environ or {}, files=files, **given)
    planned = plan_job(_request(wish, "a b", ""), facts)
    plan = Planner(planned, facts).plan(0)
    return Planned(plan, (*planned.notices, *plan.notices))


def _notices(plan: Any, *levels: str) -> list[str]:
    return [notice.text for notice in plan.notices if notice.level in levels]


def test_a_machine_without_a_gpu_runs_one_worker_and_says_nothing() -> None:
    plan = _node()
    (worker,) = plan.workers
    assert worker.argv == ("/opt/python", "-u", "t.py", "--local_rank=0", "a b", "")
    assert (plan.host, plan.meeting.world_size) == ("localhost", 1)
    assert (plan.meeting.address, plan.meeting.port) == ("127.0.0.1", 29500)
    assert _notices(plan, "info", "warning") == [ON_THE_CPU]


ON_THE_CPU = "no accelerator was found, 1 worker runs on the CPU: set DS_ACCELERATOR=cpu if that is meant"


@pytest.mark.parametrize(
    "environ, wish, level",
    [
        ({}, {}, "warning"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {}, "warning"),
        ({"DS_ACCELERATOR": ""}, {}, "warning"),
        ({}, {"num_gpus": 1}, "debug"),
        ({}, {"include": "localhost:0"}, "debug"),
        ({"DS_ACCELERATOR": "cpu"}, {}, ""),
        ({"LOCAL_SIZE": "1"}, {}, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}, ""),
    ],
)
def test_that_a_job_runs_on_the_cpu_is_said_unless_somebody_has_asked_for_it(
    environ: dict[str, str], wish: dict[str, Any], level: str
) -> None:
    notices = [one for one in _node(environ, cuda=0, **wish).notices if "accelerator" in one.text]
    assert [(one.level, one.text, one.is_fallback) for one in notices] == [(level, ON_THE_CPU, True)] * bool(
        level
    )


FALLBACKS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {"hostfile": "mine"}, "hostfile mine does not exist, correct --hostfile"),
    ({}, {"cuda": 0}, "no accelerator was found, 1 worker runs on the CPU"),
    ({}, {"cuda": 0, "num_gpus": 3}, "no accelerator was found, 3 workers run on the CPU"),
    ({}, {"master_addr": "m"}, "--master_addr m is not used"),
    ({}, {"node_rank": 1}, "--node_rank has no effect"),
    ({}, {"bind_core_list": "0"}, "--bind_core_list has no effect"),
    ({}, {"preload": ("torch",)}, "--preload has no effect"),
    ({}, {"max_bytes": 1 << 20}, "--log-max-size has no effect"),
    ({}, {"strict": True}, "--bind-strict has no effect"),
]


@pytest.mark.parametrize("environ, wish, text", FALLBACKS, ids=[text for _, _, text in FALLBACKS])
def test_a_fallback_is_an_error_if_the_user_is_strict(
    environ: dict[str, str], wish: dict[str, Any], text: str
) -> None:
    wish = {"cuda": 4, **wish}
    _node(environ, **wish)
    with pytest.raises((OptionError, HostfileError), match=rf"^{text}.* \(--strict makes this an error\)$"):
        _node(environ, is_strict=True, **wish)


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
def test_a_job_that_gets_what_it_asks_for_runs_under_strict(environ: dict[str, str]) -> None:
    assert _node(environ, is_strict=True, cuda=4, taken=[29500]).workers


@pytest.mark.parametrize("cuda, wish, count", [(4, {}, 4), (4, {"num_gpus": 2}, 2), (0, {"num_gpus": 9}, 9)])
def test_the_number_of_workers(cuda: int, wish: dict[str, Any], count: int) -> None:
    assert len(_node({}, cuda=cuda, **wish).workers) == count


@pytest.mark.parametrize(
    "value, wish, slots, variable",
    [
        ("2,3", {}, (2, 3), "2,3"),
        ("3,1", {}, (3, 1), "3,1"),
        ("2,3", {"num_nodes": 1}, (2, 3), "2,3"),
        ("2,3", {"num_gpus": 1}, (2,), "2"),
        ("3,1,2", {"num_gpus": 2}, (3, 1), "3,1"),
        ("1,2", {"num_nodes": 1, "num_gpus": 1}, (1,), "1"),
        ("0,1,8", {"num_gpus": 2}, (0, 1), "0,1"),
        ("GPU-00000003,GPU-00000001", {"num_gpus": 1}, (0,), "GPU-00000003"),
        ("2,3", {"cuda": 0, "num_gpus": 1}, (0,), "2"),
        ("2,3", {"cuda": 0, "num_gpus": 4}, (0, 1, 2, 3), "2,3"),
        ("2,3", {"include": "localhost:1"}, (1,), "1"),
        ("GPU-00000003,GPU-00000001", {}, (0, 1), "GPU-00000003,GPU-00000001"),
        ("", {}, (0,), ""),
        ("-1", {"num_gpus": 2}, (0, 1), "-1"),
    ],
)
def test_visible_devices(value: str, wish: dict[str, Any], slots: tuple[int, ...], variable: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": value}
    assert _job(environ, **{"cuda": 4, **wish}).job.hosts[0].slots == slots
    assert _node(environ, **{"cuda": 4, **wish}).env["CUDA_VISIBLE_DEVICES"] == variable


@pytest.mark.parametrize(
    "name, variable, value, shown",
    [
        ("npu", "ASCEND_RT_VISIBLE_DEVICES", "5,4,1", "5,4"),
        ("xpu", "ZE_AFFINITY_MASK", "2,6,7", "2,6"),
        ("xpu", "ZE_AFFINITY_MASK", "1.0,1.1,3.0,4.1", "1.0,1.1,3.0,4.1"),
        ("mlu", "MLU_VISIBLE_DEVICES", "7,3,2", "7,3"),
        ("hpu", "CUDA_VISIBLE_DEVICES", "4,5,6", "4,5"),
    ],
)
def test_num_gpus_takes_the_first_devices_of_each_accelerators_mask(
    name: str, variable: str, value: str, shown: str
) -> None:
    environ = {"DS_ACCELERATOR": name, variable: value}
    machine: dict[str, Any] = {"other_count": lambda *_: 8}
    plan = _node(environ, num_gpus=2, **machine)
    assert (len(plan.workers), plan.env[variable]) == (2, shown)
    with pytest.raises(FilterError, match=f"--num_gpus 5 is too many: {variable}={value} shows "):
        _node(environ, num_gpus=5, **machine)


@pytest.mark.parametrize("cuda_mask", [None, "4,5,6,7", "1"])
def test_a_mask_of_hip_is_the_only_one_that_counts(cuda_mask: str | None) -> None:
    """HIP ignores CUDA's variable then, and the devices are counted by its own."""
    environ = {"HIP_VISIBLE_DEVICES": "4,5,6,7"}
    if cuda_mask is not None:
        environ["CUDA_VISIBLE_DEVICES"] = cuda_mask
    plan = _node(environ, cuda=4, gpus=(), num_gpus=2)
    assert (len(plan.workers), plan.env["CUDA_VISIBLE_DEVICES"]) == (2, "0,1")


@pytest.mark.parametrize(
    "value, words",
    [
        ("GPU-0000000f,GPU-00000001", "'GPU-0000000f' is no device of this machine, so it hides itself and"),
        ("GPU-00000001,GPU-ffff", "'GPU-ffff' is no device of this machine"),
        ("GPU-0000,GPU-00000001", "'GPU-0000' begins several names of devices"),
        ("GPU-00000001,GPU-00000000,GPU-00000001 ,GPU-00000002", None),
        ("GPU-00000002,MIG-b", "'MIG-b' cannot stand behind 'GPU-00000002'"),
    ],
)
def test_names_that_hide_devices_are_refused(value: str, words: str | None) -> None:
    """torch sees none of the devices from such a name on, so their workers would have none."""
    if words is None:  # a name that is repeated counts once, as DeepSpeed counts it
        assert _job({"CUDA_VISIBLE_DEVICES": value}, cuda=4).job.hosts[0].slots == (0, 1, 2)
        return
    with pytest.raises(FilterError) as refused:
        _job({"CUDA_VISIBLE_DEVICES": value}, cuda=4)
    assert str(refused.value).startswith(f"CUDA_VISIBLE_DEVICES={value}: {words}")


def test_names_are_not_looked_up_where_an_option_picks_the_devices() -> None:
    planned = plan_job(
        make_request("deepspeed", "t.py", include="localhost:0,1"),
        make_facts(environ={"CUDA_VISIBLE_DEVICES": "GPU-x"}, cuda=4, gpus=UNASKED, survey=UNASKED),
    )
    assert planned.job.hosts[0].slots == (0, 1)


MASKED = {
    ("2", None): "2 and using only those devices",
    ("2,3,1", 2): "2,3,1 and using only the first 2 of those devices",
    ("MIG-a,MIG-b", 1): "MIG-a,MIG-b and using only the first of those devices",
}
LOST = "unable to find hostfile mine, will proceed with training with local resources only"
IGNORED = "detected CUDA_VISIBLE_DEVICES=2 but ignoring it because --exclude was given"
THREE = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "3"}


@pytest.mark.parametrize("mask, count", MASKED)
def test_the_user_is_told_of_a_mask(mask: str, count: int | None) -> None:
    told = _notices(
        _node({"CUDA_VISIBLE_DEVICES": mask}, cuda=4, num_gpus=count), "detail", "info", "warning"
    )
    assert told == [f"detected CUDA_VISIBLE_DEVICES={MASKED[mask, count]}"]


@pytest.mark.parametrize(
    "environ, wish, notice",
    [
        ({"CUDA_VISIBLE_DEVICES": "2"}, {"exclude": "localhost:0"}, IGNORED),
        (THREE, {}, "LOCAL_SIZE=3 sets the number of workers"),
        (THREE, {"num_gpus": 2}, None),
        ({}, {"taken": [29500]}, f"master port 29500 is taken, using {FREE_PORT}"),
        ({}, {"master_addr": "m"}, "--master_addr m is not used: without a hostfile it is 127.0.0.1"),
        ({}, {"master_addr": "localhost"}, None),
        ({}, {"node_rank": 1}, "--node_rank has no effect without --no_ssh"),
        (
            {},
            {"force_multi": True, "no_ssh": True, "node_rank": 0},
            "--force_multi has no effect with --no_ssh",
        ),
        ({}, {"bind_core_list": "0"}, "--bind_core_list has no effect without --bind_cores_to_rank"),
        ({}, {"hostfile": "mine"}, LOST),
        ({}, {"restart_on": (1,)}, "--restart-on has no effect without --max-restarts"),
        ({}, {"give_up_on": (1,), "max_restarts": 0}, "--give-up-on has no effect without --max-restarts"),
        ({}, {"give_up_on": (1,), "restart_on": (2,), "max_restarts": 1}, None),
        ({}, {"detaches": True, "stdin": "0"}, "--stdin has no effect with --detach"),
        ({}, {"detaches": True, "stdin": "none"}, None),
        ({}, {"bind_cores_to_rank": True, "num_gpus": 2}, "cores bound to each worker: 4"),
    ],
)
def test_what_the_user_is_told(environ: dict[str, str], wish: dict[str, Any], notice: str | None) -> None:
    told = _notices(_node(environ, **{"cuda": 4, **wish}), "detail", "info", "warning")
    assert told == ([] if notice is None else [notice])


ELASTIC = {"elastic_training": True, "master_addr": "m"}
OF_TWO_HOSTS = {"hostfile": "H"}
OVER = {"environ": {"CUDA_VISIBLE_DEVICES": "3,0"}}
BOUND = {"bind_cores_to_rank": True}
UNKNOWN = "unknown launcher 'x', expected one of pdsh, openmpi, mvapich"
HIDDEN = "--num_gpus 3 is too many: CUDA_VISIBLE_DEVICES=3,0 shows 2 devices, give fewer, or correct"
BETA = "--num_gpus 3 is too many: host 'beta' has slots 0 to 1"
REFUSED: dict[type[DslError], list[tuple[dict[str, Any], str]]] = {
    OptionError: [
        ({"elastic_training": True}, "master addr is required when elastic training is enabled"),
        ({**ELASTIC, "no_local_rank": True}, "--no_local_rank"),
        ({**ELASTIC, "num_nodes": 3, "max_nodes": 2}, "--num_nodes 3:2: MIN"),
        ({"heartbeat_s": 0.5}, "--heartbeat 0.5: it must be 1 to 999999999 seconds"),
        ({**OF_TWO_HOSTS, "no_ssh": True, "node_rank": 0}, "--no_ssh needs --master_addr"),
        ({**NO_SSH, "node_rank": None}, "launching training without ssh, but --node_rank is not set"),
    ],
    UnsupportedError: [({"autotuning": "tune"}, "--autotuning runs many jobs")],
    HostfileError: [({"hostfile": "bad"}, "bad line 1: ")],
    FilterError: [
        ({"num_gpus": 5}, "--num_gpus 5 is too many: host 'localhost' has slots 0 to 3"),
        ({**OVER, "num_gpus": 3}, HIDDEN),
        ({"include": "localhost:4"}, "no slot '4' specified on host 'localhost'"),
        ({"exclude": "localhost"}, "nothing is left to start: --exclude localhost leaves no slot"),
        ({"hostfile": "none"}, "nothing is left to start: hostfile none leaves no slot"),
        ({"num_gpus": 65537}, "--num_gpus 65537 is too many: a host can have 65536 at most"),
        ({**OF_TWO_HOSTS, "num_nodes": 3}, "--num_nodes 3 is more than the hosts that H leaves: 2"),
        ({**OF_TWO_HOSTS, "num_gpus": 3}, BETA),
        ({**OF_TWO_HOSTS, "num_gpus": 3, "cuda": 0}, BETA),
        ({**NO_SSH, "hostfile": "some", "node_rank": 1}, "host 'b' has no slots in some"),
    ],
    PortError: [
        ({"master_port": 29501}, "master port 29501 is taken by pid 9 (python old.py); choose another"),
        ({"master_port": 65536}, "--master_port 65536 is not a port, expected 1 to 65535, or 0 for"),
        ({"ssh_port": 0}, "--ssh_port 0 is not a port, expected 1 to 65535"),
        ({**NO_SSH, "node_rank": 0, "master_port": 29501}, "master port 29501 is taken"),
        ({**NO_SSH, "node_rank": 0, "taken": [29500]}, "master port 29500 is taken"),
    ],
    LauncherError: [({"force_multi": True, "launcher": "x"}, UNKNOWN), ({"launcher": "x"}, UNKNOWN)],
    PlacementError: [({**BOUND, "bind_core_list": "0-8"}, "core list '0-8': this process may not")],
}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "kind, wish, message", [(kind, *row) for kind, rows in REFUSED.items() for row in rows]
)
def test_what_is_refused(kind: type[DslError], wish: dict[str, Any], message: str) -> None:
    """One line, before anything is started."""
    files = {**TWO_HOSTS, "bad": "x", "none": "here slots=0\n", "some": "a slots=1\nb slots=0\n"}
    with pytest.raises(kind) as caught:
        _node(files=files, **{"cuda": 4, "taken": [29501], **wish})
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_hostfile_with_this_machine_alone_starts_here() -> None:
    planned = _job(files={"H": "here slots=2\nthere slots=2\n"}, hostfile="H", include="here")
    (host,) = planned.job.hosts
    assert (planned.node_rank, planned.job.meeting.address, host.name) == (0, "127.0.0.1", "here")


WAYS: dict[str, dict[str, Any]] = {
    "--launcher": {"launcher": "pdsh"},
    "--launcher_args": {"launcher_args": "-v"},
    "--ssh-program": {"ssh_program": "docker exec -i {host} sh -c"},
    "--ssh_port": {"ssh_port": 22},
    "--no_ssh_check": {"no_ssh_check": True},
    "--venv_script": {"venv_script": "v"},
    "--one-agent-per-node": {"per_node": True},
    "--wait-hosts": {"wait_hosts_s": 5.0},
    "--heartbeat": {"heartbeat_s": 3.0},
}


@pytest.mark.parametrize("option", WAYS)
def test_an_option_about_other_hosts_is_told_where_none_is_reached(option: str) -> None:
    assert f"{option} has no effect in a job on this machine alone" in _notices(
        _job(**WAYS[option]), "warning"
    )
    by_hand = {"files": TWO_HOSTS, "node_rank": 0, **NO_SSH, **WAYS[option]}
    is_one_job = option == "--wait-hosts"
    said = _notices(_job(**by_hand), "warning")
    assert (f"{option} has no effect with --no_ssh" in said) != is_one_job
    said = _notices(_job(**by_hand | {"wait_hosts_s": 5.0}), "warning")
    assert (f"{option} has no effect with --no_ssh" in said) != (is_one_job or option == "--heartbeat")


@pytest.mark.parametrize(
    "words, wish, is_told",
    [
        ("", {}, False),
        ("python=/opt/python", {}, False),
        ("python=/venv/python", {}, True),
        ("python=/venv/python", {"force_multi": True}, False),
        ("python=/venv/python", NO_SSH | {"node_rank": 0}, True),
    ],
)
def test_an_interpreter_that_starts_no_worker_of_this_machine_is_told(
    words: str, wish: dict[str, Any], *, is_told: bool
) -> None:
    planned = _job(files={"H": f"here slots=2 {words}\n"}, **{"hostfile": "H", **wish})
    why = "this command starts the workers of this machine itself, start it with that interpreter"
    text = f"python=/venv/python of host 'here' has no effect: {why}"
    assert [one for one in _notices(planned, "warning") if "python=" in one] == [text] * is_told
    assert planned.remote is None or planned.remote.pythons == ("/venv/python",)


def test_one_node_of_several_starts_its_own_part() -> None:
    plan = _node({}, files=TWO_HOSTS, cuda=4, taken=[29500], node_rank=1, **NO_SSH)
    assert [(worker.rank, worker.local_rank) for worker in plan.workers] == [(4, 0), (5, 1)]
    assert (plan.host, plan.meeting.node_rank, plan.meeting.world_size) == ("beta", 1, 6)
    expected = {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2", "WORLD_SIZE": "6"}
    assert expected.items() <= plan.env.items()
    assert plan.env["MASTER_ADDR"] == "10.0.0.1"


def test_files_for_the_pid_and_the_output_of_each_rank() -> None:
    plan = _node(save_pid=True, each_rank_log="logs", num_gpus=2)
    assert plan.pid_file == "/tmp/77.deepspeed"  # where others look, whatever TMPDIR says
    assert [worker.log_path for worker in plan.workers] == [
        f"logs/20260102030405_rank{rank}.log" for rank in (0, 1)
    ]


def test_log_files_lie_in_a_directory_of_this_run() -> None:
    plan = _node(log_dir="logs", max_bytes=1 << 20, num_gpus=2)
    run = "logs/20260102030405_77"
    assert (plan.log_dir, plan.run_dirs[0], plan.group.log_max_bytes) == ("logs", run, 1 << 20)
    assert plan.workers[1].log_path == f"{run}/attempt_0/1/stderr.log"
    assert _notices(plan, "info", "warning") == [f"log files are in {run}"]


def test_nodes_that_share_a_log_directory_have_runs_of_their_own() -> None:
    plan = _node(files=TWO_HOSTS, log_dir="logs", node_rank=1, **NO_SSH)
    assert plan.run_dirs[0] == "logs/20260102030405_77_node1"
    assert plan.workers[0].log_path == f"{plan.run_dirs[0]}/attempt_0/0/stderr.log"


@pytest.mark.parametrize("earlier, name", [(0, "20260102030405_77"), (1, "20260102030405_77_2")])
def test_two_runs_that_a_program_launches_in_one_second_have_directories_of_their_own(
    earlier: int, name: str
) -> None:
    plan = _node(count_run=lambda: earlier, log_dir="logs", redirects="1")
    assert plan.run_dirs[0] == f"logs/{name}"


def test_log_files_without_a_directory_lie_in_that_for_temporary_ones_which_is_said() -> None:
    plan = _node(redirects="1")
    run = "/var/folder/dsl_20260102030405_77"
    assert (plan.log_dir, plan.run_dirs[0]) == (None, run)
    assert plan.workers[0].stdout.path == f"{run}/attempt_0/0/stdout.log"
    assert _notices(plan, "info") == [f"log files are in {run}"]


def test_a_map_that_names_no_stream_makes_no_directory() -> None:
    plan = _node(redirects="0", tee="0")
    assert (plan.run_dirs, plan.has_log_files, _notices(plan, "info")) == ((), False, [])


@pytest.mark.parametrize(
    "asked, option",
    [
        ({"log_dir": "logs"}, "--log-dir"),
        ({"redirects": "3"}, "--redirects"),
        ({"stdout_words": "x"}, "--duplicate-stdout-filters"),
        ({"stderr_words": "x"}, "--duplicate-stderr-filters"),
    ],
)
def test_joined_files_exclude_files_of_single_streams(asked: dict[str, Any], option: str) -> None:
    with pytest.raises(OptionError, match=f"--enable_each_rank_log cannot be used with {option}, leave one"):
        _node(each_rank_log="old", **asked)


@pytest.mark.parametrize(
    "wish, warned",
    [
        ({}, True),
        ({"tee": "0"}, True),
        ({"log_dir": "a"}, False),
        ({"stdout_words": "x"}, False),
        ({"tee": "3"}, False),
    ],
)
def test_a_cap_without_files_is_a_slip(wish: dict[str, Any], *, warned: bool) -> None:
    plan = _node(max_bytes=1 << 20, **wish)
    texts = [text for text in _notices(plan, "warning") if text.startswith("--log-max-size has no effect")]
    assert bool(texts) is warned
    assert _notices(_node(cuda=1, each_rank_log="old", max_bytes=1 << 20), "warning") == []


def test_bound_workers_get_cores_memory_and_as_many_threads() -> None:
    plan = _node({"OMP_NUM_THREADS": "99"}, bind_cores_to_rank=True, num_gpus=2)
    assert [worker.cpus for worker in plan.workers] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {worker.mempolicy for worker in plan.workers} == {("bind", (0,))}
    assert plan.env["OMP_NUM_THREADS"] == "4"
    assert "rank 1: cores 4-7, memory bound to numa node 0" in _notices(plan, "debug")


def test_the_pod_file_of_a_cluster_is_read_and_may_be_unreadable() -> None:
    assert _node(files={POD_ENVIRONMENT_PATH: "export FC_TASK_INDEX=3\n"}).env["FC_TASK_INDEX"] == "3"

    def read(path: str) -> str | None:
        if path == POD_ENVIRONMENT_PATH:
            raise PermissionError(13, "Permission denied")
        return None

    facts = make_facts(read_text=read)
    assert "FC_TASK_INDEX" not in Planner(plan_job(_request({}), facts), facts).plan(0).env


def test_a_hostfile_that_cannot_be_read_is_an_error_and_not_a_local_job() -> None:
    def refuse(_path: str) -> str:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(HostfileError, match="/job/hostfile: hostfile cannot be read: permission denied"):
        plan_job(_request({}), make_facts(read_input=refuse))


def test_a_memory_policy_goes_over_the_commands_own_binding_and_its_threads_stay() -> None:
    plan = _node(bind_cores_to_rank=True, num_gpus=2, mem_policy="interleave")
    assert [worker.mempolicy for worker in plan.workers] == [("interleave", (0,))] * 2
    assert plan.env["OMP_NUM_THREADS"] == "4"
    assert all("OMP_NUM_THREADS" not in worker.env for worker in plan.workers)


def test_no_device_is_looked_up_unless_it_is_asked_for() -> None:
    plan = _node(num_gpus=2, cuda=2, mem_policy="bind")
    assert [worker.device for worker in plan.workers] == [None, None]
    plan = _node(num_gpus=2, cuda=2, names_devices=True)
    assert [worker.device and worker.device.pci_address for worker in plan.workers] == [
        "0000:00:00.0",
        "0000:01:00.0",
    ]


def test_a_host_that_starts_nothing_itself_needs_no_device_of_its_own() -> None:
    """A login node without accelerators plans a job for hosts that have some."""
    environ = {"DS_ACCELERATOR": "cuda"}
    assert _job(environ, files=TWO_HOSTS, hostfile="H").remote is not None
    with pytest.raises(DslError, match="no NVIDIA or AMD device"):
        _job(environ)


def test_a_hostfile_leaves_it_to_each_node_what_its_devices_are() -> None:
    planned = _job({}, files=TWO_HOSTS, node_rank=1, **NO_SSH)
    assert (planned.job.accelerator, planned.job.visible_devices) == ("", None)
    assert _node({}, files=TWO_HOSTS, cuda=2, node_rank=1, **NO_SSH).env["CUDA_VISIBLE_DEVICES"] == "0,1"


PODS = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "job-0"}
STEP = {"SLURM_STEP_ID": "0"}
BATCH = {"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "4294967291"}


@pytest.mark.parametrize(
    "environ, wish, name",
    [
        (PODS, {}, "WORLD_SIZE=4"),
        (BATCH, {}, "SLURM_JOB_NUM_NODES=2"),
        ({"SLURM_NNODES": "3"}, {}, "SLURM_NNODES=3"),
        ({**PODS, "WORLD_SIZE": "1"}, {}, ""),
        ({**PODS, "WORLD_SIZE": "many"}, {}, ""),
        ({"WORLD_SIZE": "4"}, {}, ""),
        ({**PODS, "LOCAL_RANK": "1"}, {}, ""),
        ({**BATCH, **STEP}, {}, ""),
        (PODS, {"min_nodes": 1}, ""),
        (PODS, {"min_nodes": 1, "max_nodes": 1}, ""),
        (PODS, {"standalone": True}, ""),
        (PODS, {"include": "localhost:0"}, ""),
    ],
)
def test_a_job_of_one_node_where_a_scheduler_counts_more(
    environ: dict[str, str], wish: dict[str, Any], name: str
) -> None:
    """Nobody sees otherwise that each node trains a model of its own."""
    for flavour, mend in (("torch", "--nnodes 1"), ("deepspeed", "--num_nodes 1")):
        asked = dict(wish)
        if flavour == "deepspeed" and (asked.pop("standalone", False) or asked.pop("max_nodes", None)):
            continue
        if flavour == "torch" and asked.pop("include", ""):
            continue
        request = make_request(flavour, **asked)
        facts = make_facts(environ={"DS_ACCELERATOR": "cpu", **environ})
        notices = _notices(plan_job(request, facts), "warning")
        text = f"{name}, but this job runs on this node alone: "
        assert [one.startswith(text) and one.endswith(f"{mend} if that is meant") for one in notices] == [
            True
        ] * bool(name)
