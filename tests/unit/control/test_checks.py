"""What stands in the way of a job on several hosts, in words."""

from __future__ import annotations

from typing import Any

import pytest

from dsl.control.checks import (
    MasterAddress,
    assignment_problem,
    compare,
    master_problem,
    meeting_problem,
    skew_notice,
    slot_problem,
    version_problem,
)
from dsl.control.messages import Assignment, Checked, Hello
from dsl.model.job import Host, Job, Meeting, MeetingPoint, Notice
from dsl.model.request import Program
from dsl.plan.flavours import DEEPSPEED

JOB = Job(
    DEEPSPEED,
    Program("script", "train.py"),
    MeetingPoint("static", "", None),
    hosts=(Host("a", (0, 1)), Host("b", (0,))),
)


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
    assert assignment_problem(Assignment("1", JOB, node_rank, task)) == problem


@pytest.mark.parametrize(
    "node_rank, sizes, host, problem",
    [
        (0, (2, 1), None, ""),
        (0, (1,), 1, ""),
        (2, (2, 1), None, "node 2 is none of 2"),
        (0, (), None, "node 0 is none of 0"),
        (2, (2, 1, 1), None, "the job has no host 2"),
        (0, (2,), 7, "the job has no host 7"),
        (0, (1, 2), None, "host a has 2 slots, not 1"),
        (0, (999_999_999,), None, "host a has 2 slots, not 999999999"),
    ],
)
def test_nodes_meet_as_their_job_has_them(
    node_rank: int, sizes: tuple[int, ...], host: int | None, problem: str
) -> None:
    assert meeting_problem(Meeting(0, node_rank, sizes, "", 1, host=host), JOB) == problem


@pytest.mark.parametrize(
    "slots, accelerator, count, expected",
    [
        ((0, 1, 2, 3), "cuda", 4, ""),
        ((0, 9), "cpu", 0, ""),
        (
            (0, 1),
            "cuda",
            0,
            "slots 0-1 were given to the job, but there is no cuda device, check its driver",
        ),
        (
            (0, 1, 2, 5, 4),
            "npu",
            2,
            "slots 2,4-5 do not exist, there are 2 npu devices (0-1): correct the hostfile",
        ),
        ((1,), "cuda", 1, "slot 1 does not exist, there is 1 cuda device (0): correct the hostfile"),
    ],
)
def test_slots_need_devices(slots: tuple[int, ...], accelerator: str, count: int, expected: str) -> None:
    assert slot_problem(slots, accelerator, count) == expected


def master(address: str, *resolved: str, **found: Any) -> MasterAddress:
    loopback = tuple([one for one in resolved if one.startswith("127.")])
    return MasterAddress(address, "--master_addr", "--no_ssh_check", resolved, loopback, **found)


@pytest.mark.parametrize(
    "found, is_first, expected",
    [
        (master("n0", "10.0.0.1", own=("10.0.0.1",)), True, ""),
        # As Debian's /etc/hosts has a machine's own name.
        (master("n0", "127.0.1.1"), True, ""),
        (master("n0", "10.0.0.1"), False, ""),
        (
            master("n0"),
            False,
            "master address n0 has no address here, check the name or give an address with --master_addr",
        ),
        (
            master("127.0.0.1", "127.0.0.1"),
            True,
            (
                "master address 127.0.0.1 is another machine on every host, "
                "give --master_addr one that all can reach"
            ),
        ),
        (
            master("localhost", "127.0.0.1"),
            False,
            (
                "master address localhost is another machine on every host, "
                "give --master_addr one that all can reach"
            ),
        ),
        (
            master("n7", "10.0.0.7", addresses=("10.0.0.1", "fd00::1", "fe80::1%eth0")),
            True,
            (
                "master address n7 is not one of this host, where rank 0 listens: it has 10.0.0.1, fd00::1; "
                "correct --master_addr, or give --no_ssh_check if packets to that address are passed on to it"
            ),
        ),
        (
            master("n0", "127.0.1.1"),
            False,
            "master address n0 is this machine itself here (127.0.1.1), correct /etc/hosts or give --master_addr",
        ),
        (
            master("n0", "10.0.0.1", blocked="network is unreachable"),
            False,
            (
                "there is no way to master address n0 (10.0.0.1): network is unreachable, "
                "give another with --master_addr"
            ),
        ),
        (
            master("10.0.0.1", "10.0.0.1", blocked="network is unreachable"),
            False,
            (
                "there is no way to master address 10.0.0.1: network is unreachable, "
                "give another with --master_addr"
            ),
        ),
    ],
)
def test_the_master_address_is_of_node_0_and_reachable(
    found: MasterAddress, *, is_first: bool, expected: str
) -> None:
    assert master_problem(found, is_first=is_first) == expected


def test_the_same_version_has_to_run_everywhere() -> None:
    hello = Hello("0.0.9", 1, "n1", 7, python="/opt/bin/python")
    assert version_problem(hello, "0.0.9") == ""
    assert version_problem(hello, "0.1.0") == (
        "it has dsl 0.0.9, this host has 0.1.0: install the same version for /opt/bin/python"
    )


def test_hosts_of_different_accelerators_are_worth_a_word() -> None:
    one, other = Checked(accelerator="cuda"), Checked(accelerator="cpu")
    assert compare([("n0", one), ("n1", one), ("n2", Checked())]) == ()
    assert compare([("n0", one), ("n1", other), ("n2", one)]) == (
        Notice(
            "warning",
            "the accelerators differ: cuda on hosts n0, n2; cpu on host n1; "
            "set DS_ACCELERATOR if that is not meant",
        ),
    )


def test_many_hosts_are_not_all_named() -> None:
    hosts = [(f"n{number}", Checked(machine="a")) for number in range(11)]
    (notice,) = compare(hosts)
    assert notice.text.startswith("hosts n0, n1, n2, n3, n4, n5, n6, n7, ... (11 in all) are one machine")


def test_a_machine_that_is_named_twice_is_worth_a_word() -> None:
    hosts = [("n0", Checked(machine="a")), ("n1", Checked(machine="b")), ("n0-ib", Checked(machine="a"))]
    assert compare(hosts[:2]) == ()
    assert compare([("n0", Checked()), ("n1", Checked())]) == ()
    assert compare(hosts) == (
        Notice("warning", "hosts n0, n0-ib are one machine: their workers share its devices and CPUs"),
    )


@pytest.mark.parametrize("offset_s, bound_s", [(0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (5.0, 4.5)])
def test_clocks_that_may_be_a_second_apart_are_not_worth_a_word(offset_s: float, bound_s: float) -> None:
    assert skew_notice("n1", int(offset_s * 1e9), int(bound_s * 1e9)) is None


def test_clocks_that_are_surely_more_than_a_second_apart_are() -> None:
    assert skew_notice("n1", 3_210_000_000, 1_500_000) == Notice(
        "warning",
        "the clock of host n1 is 3.2 s ahead of this one's (to within 1.5 ms): "
        "times in their logs do not compare, let NTP set both",
    )
    behind = skew_notice("n1", -3_210_000_000, 1_000)
    assert behind is not None
    assert "3.2 s behind this one's (to within 0.1 ms)" in behind.text
