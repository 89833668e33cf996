"""What is looked for on a host before anything is started there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.machine import FREE_PORT, OWN_ADDRESSES, UNASKED, make_facts

from dsl._record import replace
from dsl.agent.preflight import assignment_problem, look, meeting_problem
from dsl.control.messages import TO_HEAD, Assignment, Checked
from dsl.errors import OptionError, PortError
from dsl.machine import programs
from dsl.model.codec import from_line, to_line
from dsl.model.job import Host, Job, Meeting, MeetingPoint
from dsl.model.request import DebugRequest, OutputRequest, Program, StartRequest
from dsl.plan.worker import DEEPSPEED, TORCH

PARTS = Job(
    DEEPSPEED,
    Program("script", "train.py"),
    MeetingPoint("static", "", None),
    hosts=(Host("a", (0, 1)), Host("b", (0,))),
)
SSH = {"SSH_CONNECTION": "10.0.0.9 50000 fd00::1 22"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a script."""
    (tmp_path / "train.py").touch()
    return tmp_path


def assign(folder: Path | str, node_rank: int = 0, **fields: Any) -> Assignment:
    """The part of one of two hosts, with a script that is there; ``fields`` are of the job."""
    job = Job(
        **{
            "flavour": DEEPSPEED,
            "program": Program("script", "train.py"),
            "meeting": MeetingPoint("static", "", None),
            "hosts": (Host("n0", (0, 1)), Host("n1", (0, 3))),
            "node_count": 2,
            **fields,
        }
    )
    return Assignment("0.1.0", job, node_rank, cwd=str(folder))


def test_a_host_in_order_has_no_problem(folder: Path) -> None:
    """Also with all that the user may name: a program, a log directory, an interpreter, an address, a port."""
    facts = make_facts(cuda=2)
    assert look(assign(folder), facts) == Checked(
        addresses=OWN_ADDRESSES, accelerator="cuda", machine="boot 4026531840 machine"
    )
    (folder / "python").touch()
    (folder / "python").chmod(0o755)
    named = assign(
        folder,
        meeting=MeetingPoint("static", "10.0.0.1", 1234),
        output=OutputRequest(log_dir="logs/of/today"),
        env=(("PYTHON_EXEC", f"{folder}/python"), ("PATH", str(folder))),
    )
    named = replace(named, job=replace(named.job, flavour=TORCH))
    checked = look(named, facts)
    assert checked.problems == ()
    assert from_line(to_line(checked), TO_HEAD) == checked


def test_all_problems_come_at_once_and_nothing_is_made(folder: Path) -> None:
    (folder / "taken").touch()
    assignment = assign(
        folder,
        program=Program("script", "other.py"),
        meeting=MeetingPoint("static", "10.0.0.7", 1234),
        output=OutputRequest(log_dir="taken"),
    )
    before = sorted(os.listdir(folder))
    checked = look(assignment, make_facts(cuda=1, taken=(1234,)))
    assert checked.problems == (
        "script 'other.py' does not exist, check the path and the working directory",
        "log directory 'taken' is a file, name a directory",
        "slot 1 does not exist, there is 1 cuda device (0): correct the hostfile",
        (
            "master address 10.0.0.7 is not one of this host, where rank 0 listens: it has 10.0.0.1, fd00::1; "
            "correct --master_addr, or give --no_ssh_check if packets to that address are passed on to it"
        ),
        "master port 1234 is taken by pid 9 (python old.py), choose another with --master_port",
    )
    assert sorted(os.listdir(folder)) == before


def test_a_missing_working_directory_hides_what_would_lie_in_it(folder: Path) -> None:
    missing = str(folder / "gone")
    relative = assign(missing, program=Program("script", "train.py"), output=OutputRequest(log_dir="logs"))
    text = f"working directory {missing!r} does not exist, start the command in one that every host has"
    assert look(relative, make_facts()).problems == (text,)
    log_dir = f"{folder}/train.py/logs"
    absolute = assign(
        missing, program=Program("script", "/no/pe.py"), output=OutputRequest(each_rank_log=log_dir)
    )
    assert look(absolute, make_facts()).problems == (
        text,
        "script '/no/pe.py' does not exist, check the path",
        (
            f"log directory {log_dir!r} cannot be made in {str(folder / 'train.py')!r}, "
            "check the path and the permissions"
        ),
    )


def test_a_working_directory_may_be_none_or_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(folder / "train.py")
    checked = look(assign(script, program=Program("script", script)), make_facts())
    assert checked.problems == (
        f"working directory {script!r} is no directory, start the command in one that every host has",
    )
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(folder) and allowed(path, mode))
    assert look(assign(folder, program=Program("module", "m")), make_facts()).problems == (
        f"working directory {str(folder)!r} cannot be entered by this user, check its permissions",
    )


def test_a_working_directory_may_be_out_of_reach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody can tell whether it exists."""

    def refuse(path: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    script = assign(folder, program=Program("module", "m"))
    monkeypatch.setattr("dsl.machine.check.os.stat", refuse)
    problems = look(script, make_facts()).problems
    monkeypatch.undo()
    assert problems == (
        f"working directory {str(folder)!r} cannot be reached by this user, check the permissions of its directories",
    )


def test_the_path_and_the_interpreter_are_those_of_the_workers(folder: Path) -> None:
    (folder / "tool").touch()
    (folder / "tool").chmod(0o755)
    path = (("PATH", str(folder)),)
    program = Program("program", "tool")
    assert look(assign(folder, program=program, env=path), make_facts()).problems == ()
    assert look(assign(folder, program=program), make_facts()).problems == (
        "program 'tool' is not on PATH, did you mean ./tool?",
    )
    env = (*path, ("PYTHON_EXEC", "python9"))
    assert look(assign(folder, flavour=TORCH, env=env), make_facts()).problems == (
        "PYTHON_EXEC=python9 names no program that can be executed, correct or unset it",
    )
    assert look(assign(folder, flavour=TORCH, program=program, env=env), make_facts()).problems == ()


def test_a_log_directory_must_be_writable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "logs").mkdir()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != f"{folder}/logs" and allowed(path, mode))
    assert look(assign(folder, output=OutputRequest(log_dir="logs")), make_facts()).problems == (
        "log directory 'logs' cannot be written by this user, check its permissions",
    )


def test_slots_are_compared_with_the_devices_of_this_host(folder: Path) -> None:
    """Not on a CPU, not where devices are named, and not where hosts are not named at all."""
    second = assign(folder, 1)
    checked = look(second, make_facts(cuda=2))
    assert checked.problems == (
        "slot 3 does not exist, there are 2 cuda devices (0-1): correct the hostfile",
    )
    assert look(second, make_facts(cuda=4)).problems == ()
    on_cpu = look(second, make_facts())
    assert (on_cpu.problems, on_cpu.accelerator) == ((), "cpu")
    named = assign(folder, 1, visible_devices="GPU-1,GPU-2")
    assert look(named, make_facts(cuda=1)).problems == ()
    several = assign(folder, hosts=(Host("n0", (0, 1, 2, 5, 4)),))
    assert look(several, make_facts(cuda=2)).problems == (
        "slots 2,4-5 do not exist, there are 2 cuda devices (0-1): correct the hostfile",
    )
    unnamed = assign(folder, 1, hosts=(), workers="2")
    assert look(unnamed, make_facts(cuda_count=UNASKED, other_name=UNASKED)).accelerator == ""


def test_a_job_for_devices_that_a_host_lacks_is_a_problem(folder: Path) -> None:
    assert look(assign(folder, accelerator="cuda"), make_facts()).problems == (
        "slots 0-1 were given to the job, but there is no cuda device, check its driver",
    )
    wrong = make_facts(environ={"DS_ACCELERATOR": "abacus"})
    assert look(assign(folder), wrong).problems[0].startswith("DS_ACCELERATOR must be one of")
    npu = assign(folder, accelerator="npu")
    assert look(npu, make_facts(other_count=lambda _name, _environ: 1)).problems == (
        "slot 1 does not exist, there is 1 npu device (0): correct the hostfile",
    )


def test_the_usual_port_is_replaced_without_a_word(folder: Path) -> None:
    checked = look(assign(folder), make_facts(taken=(29500,)))
    assert (checked.problems, checked.is_port_free, checked.free_port) == ((), False, FREE_PORT)
    free = look(assign(folder), make_facts())
    assert (free.is_port_free, free.free_port) == (True, 0)


def test_port_0_is_any_free_one(folder: Path) -> None:
    assignment = assign(folder, meeting=MeetingPoint("static", "", 0))
    checked = look(assignment, make_facts(is_free=UNASKED))
    assert (checked.problems, checked.is_port_free, checked.free_port) == ((), True, FREE_PORT)


def test_a_port_that_may_not_be_used_is_a_problem(folder: Path) -> None:
    def refuse(_port: int) -> bool:
        raise PortError("cannot listen on master port 80: permission denied, choose one above 1023")

    checked = look(assign(folder, meeting=MeetingPoint("static", "", 80)), make_facts(is_free=refuse))
    assert checked.problems == ("cannot listen on master port 80: permission denied, choose one above 1023",)
    assert not checked.is_port_free


def test_ports_and_interfaces_are_those_of_node_0_alone(folder: Path) -> None:
    facts = make_facts(cuda=4, is_free=UNASKED, pick=UNASKED, addresses=UNASKED, environ=SSH)
    assignment = assign(folder, 1, meeting=MeetingPoint("static", "10.0.0.1", 1234))
    assert look(assignment, facts) == Checked(
        addresses=("fd00::1",), accelerator="cuda", machine="boot 4026531840 machine"
    )


@pytest.mark.parametrize(
    "environ, reached, expected",
    [
        ({}, "", OWN_ADDRESSES),
        (SSH, "", ("fd00::1", "10.0.0.1")),
        (SSH, "10.0.0.2", ("10.0.0.2", *OWN_ADDRESSES)),
        # Of a session on another host, which MPI brings along.
        ({"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.7 22"}, "", OWN_ADDRESSES),
        ({"SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 22"}, "", OWN_ADDRESSES),
        ({"SSH_CONNECTION": "what is this"}, "", OWN_ADDRESSES),
    ],
)
def test_the_address_that_the_head_reached_comes_first(
    folder: Path, environ: dict[str, str], reached: str, expected: tuple[str, ...]
) -> None:
    assert look(assign(folder), make_facts(environ=environ), reached).addresses == expected


def test_a_host_needs_a_way_to_the_master_address(folder: Path) -> None:
    assignment = assign(folder, 1, meeting=MeetingPoint("static", "n0", 1234))

    def facts(*resolved: str) -> Any:
        def why(address: str) -> str:
            return "network is unreachable" if address != "10.0.0.1" else ""

        return make_facts(
            cuda=4, resolve=lambda _name: resolved, why_unreachable=why, is_free=UNASKED, is_own=UNASKED
        )

    assert look(assignment, facts("2001:db8::1", "10.0.0.1")).problems == ()
    assert look(assignment, facts("2001:db8::1")).problems == (
        (
            "there is no way to master address n0 (2001:db8::1): network is unreachable, "
            "give another with --master_addr"
        ),
    )
    assert look(assignment, facts()).problems == (
        "master address n0 has no address here, check the name or give an address with --master_addr",
    )
    assert look(assignment, facts("127.0.1.1")).problems == (
        "master address n0 is this machine itself here (127.0.1.1), correct /etc/hosts or give --master_addr",
    )
    number = assign(folder, 1, meeting=MeetingPoint("static", "2001:db8::1", 1234))
    assert look(number, facts("2001:db8::1")).problems == (
        (
            "there is no way to master address 2001:db8::1: network is unreachable, "
            "give another with --master_addr"
        ),
    )
    alone = assign(folder, node_count=1, meeting=MeetingPoint("static", "127.0.0.1", None))
    assert look(alone, make_facts(resolve=UNASKED)).problems == ()


def test_without_checks_only_addresses_and_ports_are_looked_for(folder: Path) -> None:
    assignment = assign(folder / "gone", meeting=MeetingPoint("static", "10.0.0.7", 1234))
    facts = make_facts(cuda_count=UNASKED, resolve=UNASKED, taken=(1234,))
    assert look(replace(assignment, checks=False), facts) == Checked(
        addresses=OWN_ADDRESSES, is_port_free=False, free_port=FREE_PORT, machine="boot 4026531840 machine"
    )


def test_of_several_tasks_on_a_host_the_first_looks(folder: Path) -> None:
    facts = make_facts(cuda=2)
    assignment = assign(folder / "gone")
    assert look(replace(assignment, task=0), facts).problems
    assert look(replace(assignment, task=1), facts) == Checked()


def test_any_host_of_an_elastic_job_may_be_the_first_so_each_tells_of_its_addresses_and_its_port(
    folder: Path,
) -> None:
    assignment = replace(assign(folder, 1, meeting=MeetingPoint("static", "", 1234)), is_elastic=True)
    checked = look(assignment, make_facts(cuda=4, taken=(1234,)))
    assert checked.problems == ()
    assert (checked.addresses, checked.is_port_free, checked.free_port) == (OWN_ADDRESSES, False, FREE_PORT)


def test_a_named_address_comes_first_on_the_host_that_it_is_one_of(folder: Path) -> None:
    for address, expected in (
        (OWN_ADDRESSES[1], (OWN_ADDRESSES[1], *OWN_ADDRESSES)),
        ("10.0.0.77", OWN_ADDRESSES),
    ):
        assignment = replace(
            assign(folder, 1, meeting=MeetingPoint("static", address, 1234)), is_elastic=True
        )
        checked = look(assignment, make_facts(cuda=4))
        assert (checked.problems, checked.addresses) == ((), expected)


@pytest.mark.parametrize("ranks, asked", [("", 0), ("0", 0), ("2", 1), ("all", 1)])
def test_debugpy_is_looked_for_where_a_rank_is_debugged(
    ranks: str, asked: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []
    monkeypatch.setattr(programs, "check_debugger", lambda python, _environ: questions.append(python))
    assignment = assign(folder, node_rank=1, debug=DebugRequest(ranks))
    assert look(assignment, make_facts(cuda=4)).problems == ()
    assert questions == ["/opt/python"] * asked


@pytest.mark.parametrize(
    "wrap, is_elastic, said",
    [
        ("2:./nsys", False, "--wrap: program './nsys' does not exist, check the path"),
        ("all:no-such-program", False, "--wrap: program 'no-such-program' is not on PATH"),
        ("0:no-such-program", True, "--wrap: program 'no-such-program' is not on PATH"),
        ("3:./train.py", False, "/train.py' is not executable, mark it with chmod +x or leave out --wrap"),
        ("0-1:no-such-program", False, ""),
        ("3:sh -c", False, ""),
    ],
)
def test_a_command_is_looked_for_where_it_wraps_a_rank(
    wrap: str, said: str, folder: Path, *, is_elastic: bool
) -> None:
    assignment = assign(folder, node_rank=1, start=StartRequest(wraps=(wrap,)))
    problems = look(replace(assignment, is_elastic=is_elastic), make_facts(cuda=4)).problems
    assert len(problems) == bool(said)
    assert said in "".join(problems)


def test_a_host_without_debugpy_or_with_a_taken_port_has_a_problem(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(_python: str, _environ: object) -> None:
        raise OptionError("--debug needs debugpy")

    monkeypatch.setattr(programs, "check_debugger", lambda _python, _environ: None)
    assignment = assign(folder, node_rank=1, debug=DebugRequest("3"))
    (problem,) = look(assignment, make_facts(cuda=4, taken=(5679,))).problems
    assert "port 5679, where rank 3 is to be debugged, is taken" in problem
    monkeypatch.setattr(programs, "check_debugger", lacks)
    assert look(assignment, make_facts(cuda=4)).problems == ("--debug needs debugpy",)


@pytest.mark.parametrize(
    "node_rank, task, problem",
    [
        (0, None, ""),
        (1, 0, ""),
        (2, None, "the job has no host 2"),
        (1, 1, "host b has no local rank 1"),
    ],
)
def test_a_part_of_a_job_is_one_that_the_job_has(node_rank: int, task: int | None, problem: str) -> None:
    assert assignment_problem(Assignment("1", PARTS, node_rank, task)) == problem


@pytest.mark.parametrize(
    "node_rank, sizes, problem",
    [
        (0, (2, 1), ""),
        (1, (1, 2), ""),
        (2, (2, 1), "node 2 is none of 2"),
        (0, (), "node 0 is none of 0"),
        (0, (1, 2), "host a has 2 slots, not 1"),
        (0, (999_999_999,), "host a has 2 slots, not 999999999"),
    ],
)
def test_nodes_meet_as_their_job_has_them(node_rank: int, sizes: tuple[int, ...], problem: str) -> None:
    assert meeting_problem(Meeting(0, node_rank, sizes, "", 1), PARTS.hosts[0]) == problem


@pytest.mark.parametrize("node_rank", [0, 1])
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_loopback_address_is_another_machine_on_every_host(
    folder: Path, address: str, node_rank: int
) -> None:
    facts = make_facts(cuda=4, resolve=lambda _name: ("127.0.0.1",))
    assert look(assign(folder, node_rank, meeting=MeetingPoint("static", address, 1)), facts).problems == (
        f"master address {address} is another machine on every host, give --master_addr one that all can reach",
    )


def test_node_0_may_know_its_own_name_as_a_loopback_address(folder: Path) -> None:
    """As Debian's /etc/hosts has it."""
    facts = make_facts(cuda=2, resolve=lambda _name: ("127.0.1.1",))
    assert look(assign(folder, meeting=MeetingPoint("static", "n0", 1234)), facts).problems == ()
