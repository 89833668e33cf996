"""`--debug`: who runs under debugpy, on which port, and what an editor is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.machine import make_facts
from tests.support.outcome import assert_one_line, error_of
from tests.support.requests import make_request, plan_of

from dsl._record import replace
from dsl.errors import OptionError, PortError, UsageError
from dsl.model.job import NodePlan
from dsl.model.request import DebugRequest, Program
from dsl.plan.job import plan_job
from dsl.plan.starting import attach_notices, check_ports, debug_ranks, is_debugged

HOSTS = "here slots=2\nn1 slots=2\n"


def planned(count: int = 3, attempt: int = 0, **wishes: Any) -> NodePlan:
    facts = make_facts(taken=wishes.pop("taken", ()), environ={"HOME": "/me"})
    wishes.setdefault("ranks", "1")
    return plan_of(make_request("torch", "t.py", "a", nproc_per_node=str(count), **wishes), facts, attempt)


@pytest.mark.parametrize(
    "text, ranks", [("all", {0, 1, 2, 3}), ("1", {1}), ("0,2-3", {0, 2, 3}), (" 1 , 3", {1, 3})]
)
def test_ranks_are_written_as_other_lists_are(text: str, ranks: set[int]) -> None:
    assert {rank for rank in range(4) if is_debugged(DebugRequest(text), rank)} == ranks


@pytest.mark.parametrize("text", ["x", "1,", "3-1", "-1", "1-2-3", "1;2"])
def test_a_list_of_ranks_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="expected a rank or FIRST-LAST, or all"):
        debug_ranks(text)


def test_the_chosen_rank_alone_runs_under_debugpy_behind_its_interpreter() -> None:
    plan, plain = planned(), planned(ranks="")
    assert [one.debug_port for one in plan.workers] == [None, 5679, None]
    words = ("-X", "frozen_modules=off", "-m", "debugpy", "--listen", "127.0.0.1:5679")
    assert plan.workers[1].argv == ("/opt/python", "-u", *words, "t.py", "a")
    assert replace(plan.workers[1], argv=plain.workers[1].argv, debug_port=None) == plain.workers[1]
    assert (plan.workers[0], plan.workers[2]) == (plain.workers[0], plain.workers[2])


def test_a_module_an_address_a_port_and_the_wish_to_wait() -> None:
    plan = planned(
        ranks="all",
        debug_port=7000,
        debug_address="::",
        debug_wait=True,
        program=Program("module", "m"),
    )
    tail = ("--listen", "[::]:7002", "--wait-for-client", "-m", "m")
    assert plan.workers[2].argv[-5:] == tail
    assert [one.debug_port for one in plan.workers] == [7000, 7001, 7002]


@pytest.mark.parametrize(
    "wishes, said",
    [
        ({"ranks": "3"}, "the job has ranks 0 to 2"),
        ({"ranks": "0-3"}, "the job has ranks 0 to 2"),
        ({"count": 1}, "the job has rank 0 alone"),
        ({"debug_port": 0}, "--debug-port 0 is not a port"),
        ({"debug_port": 65536}, "--debug-port 65536 is not a port"),
        ({"debug_port": 65535}, "above 65535: lower --debug-port"),
        ({"debug_address": "a b"}, "--debug-address 'a b': expected an address"),
        ({"program": Program("program", "t")}, "leave out --debug or --no-python"),
    ],
)
def test_what_cannot_be_debugged_is_refused_in_one_line(wishes: dict[str, Any], said: str) -> None:
    text = error_of(UsageError, lambda: planned(**wishes))
    assert said in text
    assert_one_line(text)


def test_a_port_that_somebody_has_is_refused_before_the_first_start_alone() -> None:
    """Tasks of one rank each plan for the whole host, while those before them listen already."""
    plan = planned(taken=(5678, 5679))
    with pytest.raises(PortError, match=r"^port 5679, where rank 1 is to be debugged, is taken by pid 9 "):
        check_ports(plan, make_facts(taken=(5678, 5679)))
    check_ports(plan, make_facts(taken=(5678, 5680)))


@pytest.mark.parametrize("flavour", ["torch", "deepspeed"])
def test_options_without_the_ranks_have_no_effect_and_it_is_said(flavour: str) -> None:
    request = make_request(flavour, debug_wait=True)
    texts = [one.text for one in plan_job(request, make_facts()).notices]
    assert any("no effect without --debug" in text for text in texts)


def test_a_fork_server_forks_the_others() -> None:
    plan = planned(start_method="forkserver")
    assert [one.fork_server for one in plan.workers] == [0, None, 0]
    assert "rank 1 executed, not forked: --debug" in [one.text for one in plan.notices]
    plan = planned(start_method="forkserver", ranks="all")
    assert plan.fork_servers == ()
    assert "ranks 0-2 executed, not forked: --debug" in [one.text for one in plan.notices]


def told(plan: NodePlan, **wishes: Any) -> list[str]:
    job = plan_job(make_request("torch", **wishes), make_facts()).job
    return [one.line for one in attach_notices(replace(plan, job=job))]


def configurations(lines: list[str]) -> list[dict[str, Any]]:
    (line,) = [one for one in lines if one.startswith("VS Code")]
    found: list[dict[str, Any]] = json.loads(line.partition('"configurations": ')[2])
    return found


def test_the_editors_are_told_where_to_attach() -> None:
    lines = told(planned(), ranks="1")
    assert lines[0] == "rank 1 listens for a debugger at 127.0.0.1:5679"
    (one,) = configurations(lines)
    assert (one["type"], one["request"]) == ("debugpy", "attach")
    assert one["connect"] == {"host": "127.0.0.1", "port": 5679}
    assert 'host = "127.0.0.1", port = 5679' in lines[2]
    assert lines[3].endswith("host 127.0.0.1, port 5679")
    assert told(planned(ranks=""), ranks="1") == []


def test_neighbours_share_a_line() -> None:
    lines = told(planned(5, ranks="0-1,3"), ranks="0-1,3", debug_wait=True)
    assert lines[:2] == [
        "ranks 0-1 wait for a debugger at 127.0.0.1:5678-5679",
        "rank 3 waits for a debugger at 127.0.0.1:5681",
    ]
    assert [one["name"] for one in configurations(lines)] == ["rank 0", "rank 1", "rank 3"]


def everywhere(hosts: str, environ: dict[str, str] | None = None, **wishes: Any) -> list[str]:
    facts = make_facts(files={"/hosts": hosts}, environ=environ or {})
    planned = plan_job(make_request("deepspeed", hostfile="/hosts", **wishes), facts)
    return [one.line for one in planned.notices if one.level == "critical"]


def places(lines: list[str]) -> list[tuple[str, str, int]]:
    return [(one["name"], one["connect"]["host"], one["connect"]["port"]) for one in configurations(lines)]


def test_loopback_ports_of_other_hosts_come_through_ssh_each_to_a_port_of_its_own() -> None:
    lines = everywhere(HOSTS, ranks="1-3")
    assert lines[0] == "to reach n1: ssh -N -L 5680:127.0.0.1:5678 -L 5681:127.0.0.1:5679 n1"
    assert lines[1] == "ranks 1-3 listen for a debugger at 127.0.0.1:5679-5681"
    assert places(lines) == [(f"rank {one}", "127.0.0.1", 5678 + one) for one in (1, 2, 3)]


def test_they_stay_clear_of_the_ports_of_this_machine() -> None:
    lines = everywhere("n1 slots=2\nhere slots=2\n", ranks="all")
    assert lines[0] == "to reach n1: ssh -N -L 5682:127.0.0.1:5678 -L 5683:127.0.0.1:5679 n1"
    assert [port for _, _, port in places(lines)] == [5682, 5683, 5678, 5679]
    away = everywhere("n1 slots=1\nn2 slots=1\n", ranks="all")
    assert [port for _, _, port in places(away)] == [5678, 5679]


def test_ports_that_everybody_reaches_are_named_by_their_hosts() -> None:
    lines = everywhere(HOSTS, ranks="0,3", debug_address="0.0.0.0")
    assert places(lines) == [("rank 0", "here", 5678), ("rank 3", "n1", 5679)]
    assert not [one for one in lines if "ssh" in one]


def test_a_rank_that_no_host_has_is_refused_before_any_is_reached() -> None:
    with pytest.raises(OptionError, match="the job has ranks 0 to 3"):
        everywhere(HOSTS, ranks="4")


def test_the_line_for_ssh_reaches_the_hosts_as_the_launcher_does() -> None:
    own: dict[str, Any] = {"ssh_port": 2222, "launcher_args": "-i '/my keys/id' -o User=me"}
    (line, *_) = everywhere(HOSTS, ranks="2", launcher="ssh", **own)
    said = "ssh -i '/my keys/id' -o User=me -p 2222 -N -L 5680:127.0.0.1:5678 n1"
    assert line == f"to reach n1: {said}"
    (line, *_) = everywhere(HOSTS, ranks="2", launcher="pdsh", **own)
    assert line == "to reach n1: ssh -p 2222 -N -L 5680:127.0.0.1:5678 n1", (
        "the words are for pdsh, not for ssh"
    )


def test_the_line_for_ssh_has_the_words_that_pdsh_gives_to_its_ssh() -> None:
    """Those of the user come first, as with pdsh. pdsh knows no quotes: they are parts of its words."""
    environ = {"PDSH_SSH_ARGS_APPEND": " -i /key -o 'User=me' "}
    (line, *_) = everywhere(HOSTS, environ, ranks="2", launcher="pdsh", ssh_port=2222)
    said = """ssh -i /key -o ''"'"'User=me'"'"'' -p 2222 -N -L 5680:127.0.0.1:5678 n1"""
    assert line == f"to reach n1: {said}"
    (line, *_) = everywhere(HOSTS, environ, ranks="2", launcher="ssh")
    assert line == "to reach n1: ssh -N -L 5680:127.0.0.1:5678 n1"


def test_an_address_with_colons_stands_in_brackets_in_the_line_for_ssh() -> None:
    (line, *_) = everywhere(HOSTS, ranks="2", debug_address="::1")
    assert line == "to reach n1: ssh -N -L 5680:[::1]:5678 n1"


@pytest.mark.parametrize(
    "hosts, wishes, said",
    [
        (
            HOSTS,
            {"ranks": "0,2", "debug_address": "10.0.0.5"},
            "'10.0.0.5' is of one host, and ranks of 2 hosts",
        ),
        (HOSTS, {"ranks": "all", "debug_port": 65535}, "rank 1 would be debugged at port 65536, above 65535"),
        (
            "n1 slots=2\nn2 slots=2\n",
            {"ranks": "3", "debug_port": 65534},
            "reached at port 65537 of this machine",
        ),
    ],
)
def test_what_cannot_be_reached_from_here_is_refused_in_one_line(
    hosts: str, wishes: dict[str, Any], said: str
) -> None:
    text = error_of(UsageError, lambda: everywhere(hosts, **wishes))
    assert_one_line(text)
    assert said in text


def test_an_address_of_one_host_serves_the_ranks_of_that_host() -> None:
    assert places(everywhere(HOSTS, ranks="2-3", debug_address="10.0.0.5")) == [
        ("rank 2", "10.0.0.5", 5678),
        ("rank 3", "10.0.0.5", 5679),
    ]
