"""A group of `dslrun`, and the plan of each of its attempts. What torchrun decides itself is in the contract tests."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.machine import FREE_PORT, make_facts, numa_table
from tests.support.outcome import error_of
from tests.support.requests import make_request

from dsl.agent.planner import Planner
from dsl.errors import PortError
from dsl.machine import Console
from dsl.model.job import NodePlan
from dsl.model.request import Program
from dsl.plan.job import plan_job
from dsl.plan.worker import DEEPSPEED, TORCH, worker_commands

ARGS = ("--device=cuda:${local_rank}", "$local_rank", "$$")


def planner(environ: dict[str, str] | None = None, facts: Any = None, **wish: Any) -> Planner:
    facts = facts or make_facts(environ=environ or {})
    request = make_request("torch", "t.py", *ARGS, **{"nproc_per_node": "2", "rdzv_id": "none", **wish})
    return Planner(plan_job(request, facts), facts)


def attempt(
    number: int = 0, facts: Any = None, environ: dict[str, str] | None = None, **wish: Any
) -> NodePlan:
    return planner(environ, facts, **wish).plan(number)


def test_each_attempt_has_a_port_a_count_and_files_of_its_own() -> None:
    ports = iter((5, 6))
    facts = make_facts(pick=lambda: next(ports))
    job = planner(facts=facts, max_restarts=1)
    first, second = (job.plan(number) for number in (0, 1))
    assert [plan.env["MASTER_PORT"] for plan in (first, second)] == ["5", "6"]
    assert [plan.env["TORCHELASTIC_RESTART_COUNT"] for plan in (first, second)] == ["0", "1"]
    assert [plan.workers[1].error_file for plan in (first, second)] == [
        f"{job.run_dir}/attempt_{number}_1_error.json" for number in (0, 1)
    ]
    assert [plan.run_dirs for plan in (first, second)] == [(job.run_dir,)] * 2
    assert first.env["TORCHELASTIC_RUN_ID"] == second.env["TORCHELASTIC_RUN_ID"]
    assert second.notices == ()


def test_a_port_that_was_asked_for_stays_as_long_as_it_is_free() -> None:
    """A job that runs does not end because somebody else has taken its port, if nobody else has to know it."""
    taken = make_facts(taken=(7,))
    assert [attempt(number, master_port=7).meeting.port for number in (0, 1)] == [7, 7]
    assert error_of(PortError, lambda: attempt(0, taken, master_port=7))
    assert attempt(1, taken, master_port=7).meeting.port == FREE_PORT
    shared: dict[str, Any] = {"master_port": 7, "min_nodes": 2, "max_nodes": 2}
    assert error_of(PortError, lambda: attempt(1, taken, **shared))
    assert attempt(1, taken, **shared, node_rank=1).meeting.port == 7


@pytest.mark.guarantee("G5")
def test_the_macro_becomes_the_local_rank_and_nothing_else_is_touched() -> None:
    """Torchrun would also fill in ``$local_rank``, and make one dollar of two."""
    plan = attempt(min_nodes=2, max_nodes=2, node_rank=1)
    assert [worker.argv for worker in plan.workers] == [
        ("/opt/python", "-u", "t.py", f"--device=cuda:{local_rank}", "$local_rank", "$$")
        for local_rank in (0, 1)
    ]
    assert [(worker.rank, worker.local_rank) for worker in plan.workers] == [(2, 0), (3, 1)]


@pytest.mark.parametrize(
    "wish, words",
    [
        ({}, ["python", "-u", "t.py", "a"]),
        ({"script": "-t.py"}, ["python", "-u", "./-t.py", "a"]),
        ({"kind": "module"}, ["python", "-u", "-m", "t.py", "a"]),
        ({"kind": "program"}, ["t.py", "a"]),
        ({"local_rank_option": "--local-rank"}, ["python", "-u", "t.py", "--local-rank=0", "a"]),
        ({"local_rank_option": "--local_rank"}, ["python", "-u", "t.py", "--local_rank=0", "a"]),
        (
            {"kind": "call"},
            ["t.py", "a", "/run/call.pickle", "/run/attempt_1/0/result.pickle", "0"],
        ),
    ],
)
def test_the_words_of_a_worker(wish: dict[str, Any], words: list[str]) -> None:
    program = Program(**{"kind": "script", "script": "t.py", "args": ("a",), **wish})
    folders = ["/run/attempt_1/0"]
    assert [list(argv) for argv in worker_commands(program, TORCH, {}, "python", folders)] == [words]


def test_workers_share_what_is_the_same_for_all_or_the_same_number() -> None:
    """Thousands of workers cost little memory; the text of a single digit is one object anyway."""
    first, *_, last = attempt(nproc_per_node="12").workers
    assert first.argv != last.argv
    first, *_, last = attempt(nproc_per_node="12", args=()).workers
    assert first.argv is last.argv is last.command
    assert last.env["RANK"] is last.env["LOCAL_RANK"] is last.env["ROLE_RANK"]


def test_another_interpreter_can_be_named_and_an_empty_name_is_none() -> None:
    program = Program("script", "t.py")
    for value, interpreter in (("/p", "/p"), ("", "python")):
        ((first, *_),) = worker_commands(program, TORCH, {"PYTHON_EXEC": value}, "python", ["/r/attempt_0/0"])
        assert first == interpreter


@pytest.mark.guarantee("G5")
def test_words_of_deepspeeds_users_are_never_filled_in() -> None:
    program = Program("script", "t.py", ("${local_rank}",))
    ((*_, last),) = worker_commands(program, DEEPSPEED, {}, "python", ["/r/attempt_0/0"])
    assert last == "${local_rank}"


def test_files_lie_in_a_directory_of_the_run_below_the_one_that_was_named() -> None:
    """torchrun's layout, LOG_DIR/RUN_ID_RANDOM/attempt_N/LOCAL_RANK, with the time in the name."""
    job = planner(log_dir="/logs", redirects="3", rdzv_backend="c10d", rdzv_id="a/b")
    run = "/logs/a_b_20260102030405_01234567"
    assert job.run_dir == run
    plan = job.plan(2)
    assert plan.log_dir == "/logs"
    assert plan.workers[1].stdout.path == f"{run}/attempt_2/1/stdout.log"
    assert plan.workers[1].stderr is not None
    assert plan.workers[1].stderr.path == f"{run}/attempt_2/1/stderr.log"
    assert [notice.text for notice in job.plan(0).notices if "log files" in notice.text] == [
        f"log files are in {run}"
    ]


def test_runs_without_a_name_of_their_own_are_in_the_order_of_their_times() -> None:
    assert planner(log_dir="/logs").run_dir == "/logs/20260102030405_01234567"


def test_the_users_name_of_a_job_is_in_the_directory_also_where_the_run_id_is_another() -> None:
    """A lone node has a run id of its own, as with torchrun."""
    for wish in ({"rdzv_id": "job7"}, {"rdzv_id": "job7", "standalone": True}):
        job = planner(log_dir="/logs", **wish)
        assert job.run_dir == "/logs/job7_20260102030405_01234567"
        assert job.plan(0).env["TORCHELASTIC_RUN_ID"] != "job7"
    name = "01234567-89ab-cdef-0123-456789abcdef"
    job = planner(log_dir="/logs", rdzv_backend="c10d", rdzv_id=name)
    assert job.run_dir == f"/logs/{name}_20260102030405_01234567"


def test_a_name_of_the_job_that_is_too_long_for_a_file_is_cut_there_only() -> None:
    job = planner(log_dir="/logs", rdzv_backend="c10d", rdzv_id="x" * 1000)
    assert job.run_dir is not None
    assert len(job.run_dir) < 200
    assert job.plan(0).env["TORCHELASTIC_RUN_ID"] == "x" * 1000


def test_a_log_directory_alone_keeps_what_the_console_shows_and_says_where() -> None:
    plan = attempt(log_dir="/logs")
    assert plan.has_log_files
    for worker in plan.workers:
        assert (worker.stdout.console, worker.prefix) == (1, "")
    assert sum("log files are in /logs/" in notice.text for notice in plan.notices) == 1
    assert attempt(tee="0:3").has_log_files
    plan = attempt(log_dir="/logs", redirects="0")
    assert not plan.has_log_files
    assert not any("log files" in notice.text for notice in plan.notices)


def test_without_a_log_directory_the_run_has_one_for_its_time() -> None:
    job = planner()
    assert job.run_dir == "/var/folder/dslrun_0123456789abcdef"


@pytest.mark.parametrize(
    "wish",
    [{"log_dir": "/logs"}, {"redirects": "1"}, {"tee": "0:3"}, {"stdout_words": "a"}, {"kind": "call"}],
)
def test_workers_have_directories_only_where_other_files_lie_in_them(wish: dict[str, Any]) -> None:
    job = planner(**wish)
    first, second = (job.plan(number) for number in (0, 1))
    assert second.run_dirs == tuple([f"{job.run_dir}/attempt_1{own}" for own in ("", "/0", "/1")])
    assert first.run_dirs[:2] == (job.run_dir, f"{job.run_dir}/attempt_0")
    assert first.workers[1].error_file == f"{job.run_dir}/attempt_0/1/error.json"


@pytest.mark.parametrize(
    "environ, count, threads, said",
    [({}, "2", "1", True), ({}, "1", None, False), ({"OMP_NUM_THREADS": "4"}, "2", "4", False)],
)
def test_several_workers_have_one_thread_each_unless_the_user_has_chosen(
    environ: dict[str, str], count: str, threads: str | None, *, said: bool
) -> None:
    plan = planner(environ, nproc_per_node=count).plan(0)
    assert plan.env.get("OMP_NUM_THREADS") == threads
    assert any("OMP_NUM_THREADS" in notice.text for notice in plan.notices) == said


def test_the_devices_of_rocm_are_told_twice() -> None:
    plan = planner({"HIP_VISIBLE_DEVICES": "4,5"}, virtual_local_rank=True).plan(0)
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in plan.workers] == ["4", "5"]
    assert [worker.env["HIP_VISIBLE_DEVICES"] for worker in plan.workers] == ["4", "5"]
    assert [worker.env["LOCAL_RANK"] for worker in plan.workers] == ["0", "0"]


def test_the_table_of_signals() -> None:
    plan = attempt(stop_signals=(15, 40), forward_signals=(12,), preempt_signal=10, preempt_grace_s=60.0)
    assert plan.job.signals.meanings == {15: "stop", 40: "stop", 12: "forward", 10: "preempt"}
    assert plan.env["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,40"


@pytest.mark.parametrize(
    "wish, environ, scope",
    [
        ({}, {}, "rank"),
        ({"program": Program("module", "pkg.train")}, {}, "rank"),
        ({"program": Program("call", "/opt/python", ("-u", "worker.py"))}, {}, "rank"),
        ({"program": Program("program", "/opt/python", ("-u", "t.py"))}, {}, "rank"),
        ({"program": Program("program", "nsys", ("profile", "python", "t.py"))}, {}, "group"),
        ({"program": Program("program", "nsys"), "signal_scope": "rank"}, {}, "rank"),
        ({"signal_scope": "group"}, {}, "group"),
        # It may be a script of a shell.
        ({}, {"PYTHON_EXEC": "/opt/traced"}, "group"),
    ],
)
def test_a_program_that_may_be_a_wrapper_does_not_hear_signals_alone(
    wish: dict[str, Any], environ: dict[str, str], scope: str
) -> None:
    assert attempt(environ=environ, **wish).group.signal_scope == scope


def test_a_prefix_has_the_name_of_the_node_where_the_template_asks_for_it() -> None:
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${hostname}:${role_name}:${rank}: "}
    plan = planner(environ, role="r").plan(0)
    assert [worker.prefix for worker in plan.workers] == ["machine:r:0: ", "machine:r:1: "]
    assert plan.env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "${hostname}:${role_name}:${rank}: "


def test_a_node_that_is_alone_has_no_rank_among_nodes() -> None:
    plan = attempt(node_rank=3)
    assert (plan.meeting.node_rank, plan.env["GROUP_RANK"], plan.workers[0].rank) == (0, "0", 0)


@pytest.mark.parametrize(
    "wish, said",
    [
        ({"max_bytes": 1 << 20}, "--log-max-size has no effect without log files"),
        ({"preempt_grace_s": 3.0}, "--preempt-grace has no effect without --preempt-signal"),
        (
            {"global_ranks": "2-5"},
            "no output is shown: the filter names no rank of this job, which has 0 to 1",
        ),
        ({"local_ranks": "2"}, "no output is shown"),
    ],
)
def test_an_option_that_needs_another_is_said_to_have_no_effect(wish: dict[str, Any], said: str) -> None:
    facts = make_facts()
    request = make_request("torch", "t.py", nproc_per_node="2", **wish)
    planned = plan_job(request, facts)
    notices = (*planned.notices, *Planner(planned, facts).plan(0).notices)
    (notice,) = [one for one in notices if one.level == "warning"]
    assert notice.text.startswith(said)


def test_the_plan_has_what_the_engine_and_the_report_need() -> None:
    plan = attempt(grace_s=3.0, facts=make_facts(console=Console("terminal", "terminal")))
    assert (plan.command, plan.host, plan.group.grace_s) == ("dslrun", "machine", 3.0)
    assert (plan.meeting.address, plan.meeting.port, plan.meeting.world_size) == ("127.0.0.1", FREE_PORT, 2)
    assert all(worker.stdout.terminal for worker in plan.workers)


def test_workers_are_bound_only_if_that_is_asked_for() -> None:
    facts = make_facts(numa_nodes=lambda: numa_table(range(4), range(4, 8)))
    assert [worker.cpus for worker in attempt(facts=facts).workers] == [None, None]


@pytest.mark.parametrize(
    "environ, path",
    [
        ({}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "true"}, None),
        ({"TORCHELASTIC_TIMER_FILE": "/mine"}, None),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "/mine"}, "/mine"),
    ],
)
def test_timers_are_for_who_asks_and_lie_where_it_says(environ: dict[str, str], path: str | None) -> None:
    plan = attempt(environ=environ)
    assert plan.timer_file == path
    assert plan.env.get("TORCHELASTIC_TIMER_FILE") == environ.get("TORCHELASTIC_TIMER_FILE")


def test_timers_without_a_place_have_one_that_is_the_same_in_each_attempt() -> None:
    job = planner({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, max_restarts=1)
    first, second = (job.plan(number) for number in (0, 1))
    assert first.timer_file == second.timer_file == second.env["TORCHELASTIC_TIMER_FILE"]
    assert first.timer_file is not None
    assert "/watchdog_timer_" in first.timer_file


def test_the_record_of_the_root_cause_is_handed_to_who_names_a_file_for_it() -> None:
    """Not to a worker's own, and not by functions, whose caller has the error itself."""
    environ = {"TORCHELASTIC_ERROR_FILE": "/handed"}
    plan = attempt(environ=environ)
    assert plan.handed_file == "/handed"
    assert "/handed" not in {worker.env["TORCHELASTIC_ERROR_FILE"] for worker in plan.workers}
    assert attempt(environ={"TORCHELASTIC_ERROR_FILE": ""}).handed_file is None
