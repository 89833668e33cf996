"""`--wrap`: which workers another command executes, and what that changes for them and the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.machine import make_facts
from tests.support.outcome import assert_one_line, error_of
from tests.support.requests import make_request, plan_of

from dsl._record import replace
from dsl.agent.planner import launch_spec
from dsl.errors import UsageError
from dsl.model.job import Meeting, NodePlan
from dsl.plan.job import plan_job
from dsl.plan.node import AttemptFiles, account, plan_node
from dsl.plan.worker import ELASTIC
from dsl.plan.wraps import parse_wrap
from dsl.report.plan import plan_json, plan_text

HOSTS = "here slots=2\nn1 slots=2\n"
NSYS = ("nsys", "profile", "-o", "out 1")


def planned(*wraps: str, count: int = 4, **wishes: Any) -> NodePlan:
    request = make_request("torch", "t.py", "a", nproc_per_node=str(count), wraps=wraps, **wishes)
    return plan_of(request, make_facts(environ={"HOME": "/me"}))


def test_the_chosen_ranks_alone_are_executed_by_the_command() -> None:
    plan, plain = planned("0,2-3:nsys profile -o 'out 1'"), planned()
    assert [one.wrap for one in plan.workers] == [NSYS, (), NSYS, NSYS]
    assert plan.workers[2].command == (*NSYS, "/opt/python", "-u", "t.py", "a")
    assert tuple(replace(one, wrap=()) for one in plan.workers) == plain.workers
    specs = launch_spec(plan, stdin_is_terminal=False).workers
    assert [spec.argv for spec in specs] == [one.command for one in plan.workers]


def test_of_several_commands_the_first_executes_the_next() -> None:
    plan = planned("all:numactl -l", "1:nsys profile", "1:nice")
    assert [one.wrap for one in plan.workers[:2]] == [
        ("numactl", "-l"),
        ("numactl", "-l", "nsys", "profile", "nice"),
    ]


def test_no_shell_reads_the_command() -> None:
    assert parse_wrap("0:a:b $X '; rm' \"c d\"") == (((0, 0),), ("a:b", "$X", "; rm", "c d"))


@pytest.mark.parametrize(
    "wrap, said",
    [
        ("", "--wrap '': bad range ''"),
        ("nsys profile", "bad range 'nsys profile'"),
        ("0-:nsys", "bad range '0-'"),
        ("3-1:nsys", "bad range '3-1'"),
        (":nsys", "bad range ''"),
        ("0", "--wrap '0': there is no command, give RANKS:COMMAND"),
        ("0: ", "there is no command"),
        ("0:'' a", "there is no command"),
        ("0:nsys 'x", '--wrap "nsys \'x" are no words of a shell: no closing quotation'),
        ("0,4:nsys", "--wrap '0,4': the job has ranks 0 to 3"),
    ],
)
def test_what_cannot_wrap_is_refused_in_one_line(wrap: str, said: str) -> None:
    text = error_of(UsageError, lambda: planned(wrap))
    assert said in text
    assert_one_line(text)


@pytest.mark.parametrize("wrap, scope", [("3:nsys", "group"), ("all:nsys", "group")])
def test_workers_that_may_not_hear_a_signal_hear_it_in_their_groups(wrap: str, scope: str) -> None:
    assert planned(wrap).group.signal_scope == scope
    assert planned(wrap, signal_scope="rank").group.signal_scope == "rank"


def test_a_node_without_such_a_rank_is_as_it_would_be() -> None:
    request = make_request(
        "torch", nproc_per_node="2", wraps=("2:nsys",), min_nodes=2, max_nodes=2, master_addr="n"
    )
    plan = plan_of(request, make_facts())
    assert plan.group.signal_scope == "rank"
    assert [one.wrap for one in plan.workers] == [(), ()]


def test_a_fork_server_forks_the_others() -> None:
    plan = planned("1:nsys", start_method="forkserver")
    assert [one.fork_server for one in plan.workers] == [0, None, 0, 0]
    assert [one.text for one in plan.notices if "executed" in one.text] == [
        "rank 1 executed, not forked: --wrap"
    ]
    assert plan.fork_servers == planned(start_method="forkserver").fork_servers
    plan = planned("all:nsys", start_method="forkserver")
    assert plan.fork_servers == ()


def test_a_debugger_runs_inside_of_the_command() -> None:
    plan = planned("0-1:nsys", start_method="forkserver", ranks="1")
    words = plan.workers[1].command
    assert words[:3] == ("nsys", "/opt/python", "-u")
    assert words[words.index("debugpy") + 3 :] == ("t.py", "a")
    said = [one.text for one in plan.notices if "executed" in one.text]
    assert said == ["rank 1 executed, not forked: --debug", "rank 0 executed, not forked: --wrap"]


def test_a_shown_plan_has_the_whole_command() -> None:
    plan = planned("1:nsys profile")
    assert "  command: nsys profile /opt/python -u t.py a" in plan_text(plan, {})
    found = [one["command"] for one in json.loads(plan_json(plan, {}))["workers"]]
    assert found == [list(one.command) for one in plan.workers]
    assert "rank 1 runs nsys profile /opt/python -u t.py a" in [one.text for one in account(plan, {})]


def test_ranks_that_no_host_has_are_refused_where_the_job_is_planned() -> None:
    request = make_request("deepspeed", hostfile="/hosts", wraps=("4:nsys",))
    text = error_of(UsageError, lambda: plan_job(request, make_facts(cuda=4, files={"/hosts": HOSTS})))
    assert text == "--wrap '4': the job has ranks 0 to 3"


@pytest.mark.parametrize("wishes", [{"wraps": ("3:nsys",)}, {"ranks": "3"}], ids=["wrap", "debug"])
def test_an_elastic_job_may_have_had_the_rank_before_or_get_it_yet(wishes: dict[str, Any]) -> None:
    """A host that is lost takes the last ranks away, and the others go on."""
    request = make_request(
        "deepspeed", hostfile="/hosts", elastic_training=True, master_addr="10.0.0.1", **wishes
    )
    facts = make_facts(cuda=4, files={"/hosts": HOSTS})
    job = plan_job(request, facts).job
    assert job.flavour == ELASTIC
    for host, sizes in ((0, (2,)), (1, (2, 2))):
        meeting = Meeting(host, len(sizes) - 1, sizes, "10.0.0.1", 29500)
        workers = plan_node(job, meeting, AttemptFiles(None), facts, place=host).workers
        assert [bool(one.wrap) or one.debug_port is not None for one in workers] == [False, len(sizes) == 2]
