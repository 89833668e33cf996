"""The command line of `dsl-ssh`, and what it plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.events import an_exit
from tests.support.machine import make_facts

from dsl.agent.hosts import failure_lines, plan_hosts, wait_for_hosts
from dsl.agent.planner import launch_spec
from dsl.cli.ssh import SSH, choose_hosts
from dsl.errors import HostfileError, HostNameError
from dsl.launchers.base import Start
from dsl.launchers.ssh import ssh_command
from dsl.plan.remote import Remote

if TYPE_CHECKING:
    from dsl.model.job import NodePlan

HOSTS = "# hosts\nn1 slots=2\nn2 slots=0\n\nn3 slots=4\n"


@pytest.mark.parametrize(
    "argv, own, command",
    [
        ("ls", "", "ls"),
        ("-f hosts ls -f x", "-f hosts", "ls -f x"),
        ("--hostfile=hosts ls", "--hostfile=hosts", "ls"),
        ("-fhosts ls", "-fhosts", "ls"),
        ("-f hosts -- -x ls", "-f hosts", "-x ls"),
        ("-- -- x", "", "-- x"),
        ("--max-at-once 3 --ssh_port 22 -i a -e b ls", "--max-at-once 3 --ssh_port 22 -i a -e b", "ls"),
        ("-f", "-f", ""),
        ("-", "", "-"),
        ("", "", ""),
    ],
)
def test_the_command_begins_behind_our_options(argv: str, own: str, command: str) -> None:
    assert SSH.make_parser().split(argv.split(), 0) == (own.split(), command.split())


@pytest.mark.parametrize(
    "options, expected",
    [
        ("", "n1 n2 n3"),
        ("-i n3@n2", "n2 n3"),
        ("-e n1", "n2 n3"),
        ("-e n3:0", "n1 n2 n3"),
        ("-e n2:0", "n1 n3"),
    ],
)
def test_filters_choose_hosts_and_a_host_without_slots_is_one(options: str, expected: str) -> None:
    facts = make_facts(files={"hosts": HOSTS})
    assert choose_hosts(SSH.make_parser().parse_args(["-f", "hosts", *options.split()]), facts) == tuple(
        expected.split()
    )


def test_without_a_hostfile_the_hosts_are_those_of_the_scheduler() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-5]"}
    parse = SSH.make_parser().parse_args
    assert choose_hosts(parse(["-e", "n4"]), make_facts(environ=environ)) == ("n3", "n5")
    files = {"/job/hostfile": HOSTS}
    assert choose_hosts(parse([]), make_facts(environ=environ, files=files)) == ("n1", "n2", "n3")
    with pytest.raises(HostfileError, match=r"^hostfile hosts does not exist, name one with -f$"):
        choose_hosts(parse(["-f", "hosts"]), make_facts(environ=environ))
    with pytest.raises(HostfileError, match=r"^hostfile /job/hostfile does not exist"):
        choose_hosts(parse([]), make_facts())


@pytest.mark.parametrize("path", ["/dev/null", "/"])
def test_what_is_no_file_names_no_hosts(path: str) -> None:
    message = rf"^hostfile {path} names no hosts, it is no regular file: name one with -f$"
    with pytest.raises(HostfileError, match=message):
        choose_hosts(SSH.make_parser().parse_args(["-H", path]), make_facts())


def planned(hosts: str, at_once: int, fd: int = 0) -> NodePlan:
    starts = [Start(ssh_command(host, ("ls",), 22), node_rank=number) for number, host in enumerate(hosts)]
    return plan_hosts(starts, tuple(hosts), fd, at_once, make_facts())


def test_at_most_so_many_hosts_are_reached_at_once() -> None:
    plan = planned("abc", 2)
    assert [str(worker.label) for worker in plan.workers] == ["host a", "host b", "host c"]
    assert plan.group.at_once == 2


def test_a_host_that_fails_ends_no_other() -> None:
    plan = planned("ab", 8, fd=7)
    spec = launch_spec(plan, stdin_is_terminal=False)
    assert spec.on_failure == "report"
    assert [worker.prefix for worker in spec.workers] == ["a: ", "b: "]
    assert [
        (worker.stdin.descriptor, worker.stdout.console, worker.stderr.console) for worker in spec.workers
    ] == [(7, 1, 2)] * 2


def test_hosts_that_failed_alike_are_one_line_the_first_failure_first() -> None:
    plan = planned("abcde", 8)
    exits = [
        an_exit(3, code=3),
        an_exit(2, code=255),
        an_exit(0, code=3),
        an_exit(1, code=0),
        an_exit(4, signal=15, by_us=True),
    ]
    assert failure_lines(plan, exits) == [
        "hosts a,d: exit code 3",
        "host c: ssh has failed, the host cannot be reached",
    ]


@pytest.mark.parametrize("program", [(), ("way", "{host}")])
@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a;b", "a b"])
def test_a_name_that_ssh_would_misread_is_not_even_tried(name: str, program: tuple[str, ...]) -> None:
    remote = Remote("ssh", program=program, hosts_wait_s=5.0)
    with pytest.raises(HostNameError, match="cannot be given to ssh"):
        wait_for_hosts([name], remote, make_facts(), lambda *_: None)
