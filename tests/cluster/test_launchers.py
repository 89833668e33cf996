"""Each launcher starts the agents where it should: the commands of `dsl.launchers` on real hosts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.kit.cluster import MPI, find_mpi
from tests.support.launchers import starts

from dsl.launchers.base import ENDED, PLACE
from dsl.plan.remote import RANK_LAUNCHERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.conftest import WaitUntil
    from tests.kit.cluster import Cluster, Host

    from dsl.launchers.base import Start
    from dsl.plan.remote import LauncherName

SHOW = str(Path(__file__).parent.parent / "workers" / "show_rank.py")
UNEQUAL = {"node2": 2, "node0": 1, "node1": 3}
RANKS = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID"),
    **dict.fromkeys(("mpich", "impi", "mvapich"), ("PMI_RANK", "MPI_LOCALRANKID")),
}


class Transport(NamedTuple):
    """A launcher as it is installed on the first host."""

    launcher: LauncherName
    env: Mapping[str, str]
    before: tuple[str, ...] = ()
    """Words in front of its command."""


class Said(NamedTuple):
    """What an agent has said of itself."""

    host: str
    rank: int
    local_rank: int
    python: str
    env: Mapping[str, str]
    is_shown: bool
    cpus: int


@pytest.fixture(params=["ssh", "pdsh", *MPI, "slurm"])
def transport(hosts: Cluster, request: pytest.FixtureRequest) -> Transport:
    """Each of them in turn."""
    word = request.param
    if word in MPI:
        mpi = find_mpi(hosts, word)
        return Transport(mpi.launcher, {"PATH": mpi.env["PATH"]})  # type: ignore[arg-type]
    if word == "slurm":
        request.getfixturevalue("slurm")
    return Transport(word, {})


def launch(
    hosts: Cluster, tmp_path: Path, transport: Transport, slots: Mapping[str, int], **fields: Any
) -> list[Said]:
    """Start what the launcher says, and return what the agents say, in the order of their ranks."""
    fields = {"words": (SHOW,), "python": sys.executable, "folder": str(tmp_path), "is_root": True, **fields}
    found = []
    for start in starts(transport.launcher, slots, cwd=str(tmp_path), **fields):
        found += [read(transport.launcher, line) for line in output(hosts[0], start, transport)]
    return sorted(found, key=lambda said: said.rank)


def output(host: Host, start: Start, transport: Transport) -> list[str]:
    for path, text in start.files:
        Path(path).write_text(text, encoding="utf-8")
    env = {**transport.env, **dict(start.env)}
    result = host.run([*transport.before, *start.argv], env=env, check=True)
    return [line for line in result.stdout.splitlines() if ENDED not in line]


def read(launcher: str, line: str) -> Said:
    if launcher == "pdsh":
        line = line.partition(": ")[2]
    said = json.loads(line)
    if launcher in RANK_LAUNCHERS:
        rank, local_rank = (int(said["env"][name]) for name in RANKS[launcher])
        assert said["argv"] == []
    else:
        assert said["argv"][:-1] == [PLACE]
        rank, local_rank = int(said["argv"][-1]), 0
    env = said["env"]
    return Said(
        said["host"], rank, local_rank, env.get("TEST_PYTHON", ""), env, said["is_shown"], said["cpus"]
    )


def places(found: list[Said]) -> list[tuple[str, int, int]]:
    return [(said.host, said.rank, said.local_rank) for said in found]


def expected(transport: Transport, slots: Mapping[str, int], *, per_node: bool) -> list[tuple[str, int, int]]:
    one_each = per_node or transport.launcher not in RANK_LAUNCHERS
    pairs = [(name, i) for name, count in slots.items() for i in range(1 if one_each else count)]
    return [(name, rank, local_rank) for rank, (name, local_rank) in enumerate(pairs)]


@pytest.mark.parametrize("slots", [{"node0": 2, "node1": 2, "node2": 2}, {"node2": 2, "node1": 2}, UNEQUAL])
def test_tasks_stand_on_the_hosts_in_their_order(
    hosts: Cluster, tmp_path: Path, transport: Transport, slots: dict[str, int]
) -> None:
    """All slots of equal hosts; two hosts of three, without the one that launches; unequal ones in any order."""
    found = launch(hosts, tmp_path, transport, slots)
    assert places(found) == expected(transport, slots, per_node=False)
    assert {said.cpus for said in found} == {len(os.sched_getaffinity(0))}, "the launcher has bound them"


def test_one_agent_a_node_is_one_task_on_each_host(
    hosts: Cluster, tmp_path: Path, transport: Transport
) -> None:
    found = launch(hosts, tmp_path, transport, UNEQUAL, per_node=True)
    assert places(found) == expected(transport, UNEQUAL, per_node=True)


@pytest.mark.parametrize("transport", [*MPI, "slurm"], indirect=True)
def test_variables_arrive_and_no_command_line_of_any_host_shows_them(
    hosts: Cluster, tmp_path: Path, transport: Transport
) -> None:
    secret = "5f0b 'x\",$y"
    found = launch(hosts, tmp_path, transport, UNEQUAL, variables=(("TEST_SECRET", secret),))
    assert [said.env["TEST_SECRET"] for said in found] == [secret] * 6
    assert not any(said.is_shown for said in found)


def test_every_host_has_its_interpreter_behind_a_sourced_script(
    hosts: Cluster, tmp_path: Path, transport: Transport
) -> None:
    """The script prints, reads, and looks at its words: none of that reaches the agent, what it sets does."""
    check_odd_words(hosts, tmp_path, transport)


@pytest.mark.parametrize("shell", ["/bin/dash", "/usr/bin/tcsh", "/usr/bin/fish"])
@pytest.mark.parametrize("transport", ["ssh", "pdsh"], indirect=True)
def test_every_login_shell_reads_the_same_words(
    hosts: Cluster, tmp_path: Path, transport: Transport, shell: str
) -> None:
    for host in hosts:
        path = host.root / "etc/passwd"
        path.write_text(path.read_text(encoding="utf-8").replace("/bin/bash", shell, 1), encoding="utf-8")
    try:
        parent = "import os; print(os.readlink(f'/proc/{os.getppid()}/exe'))"
        shown = hosts[0].run(["ssh", "node1", f'{sys.executable} -c "{parent}"; true'], check=True)
        assert shown.stdout.strip().endswith(Path(shell).name)
        check_odd_words(hosts, tmp_path, transport)
    finally:
        for host in hosts:
            path = host.root / "etc/passwd"
            path.write_text(path.read_text(encoding="utf-8").replace(shell, "/bin/bash", 1), encoding="utf-8")


@pytest.mark.parametrize("transport", ["ssh", "pdsh"], indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        "ControlMaster auto\nControlPath /run/tmp/%C\nControlPersist yes",
        "LocalForward 127.0.0.1:7000 127.0.0.1:22\nExitOnForwardFailure yes",
        "RequestTTY force",
    ],
)
def test_what_people_want_of_their_own_logins_is_not_in_the_way(
    hosts: Cluster, tmp_path: Path, transport: Transport, settings: str
) -> None:
    """No connection for others is left behind, no port is taken twice, no terminal mangles bytes."""
    file = hosts[0].root / "etc/ssh/ssh_config"
    usual = file.read_text(encoding="utf-8")
    file.write_text(f"{usual}\n{settings}\n", encoding="utf-8")
    try:
        found = launch(hosts, tmp_path, transport, UNEQUAL)
    finally:
        file.write_text(usual, encoding="utf-8")
    assert places(found) == expected(transport, UNEQUAL, per_node=False)


def check_odd_words(hosts: Cluster, tmp_path: Path, transport: Transport) -> None:
    """A script with a blank in its name, and interpreters whose names mean something to every shell."""
    pythons = []
    for number, name in enumerate(("one!", "it's 50%n $HOME \\*`{~}")):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nTEST_PYTHON={number} exec {sys.executable} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
        pythons.append(str(path))
    script = tmp_path / "my env"
    script.write_text('echo noise; read -r line; export TEST_WORDS="$#"; false\n', encoding="utf-8")
    slots = {"node2": 1, "node0": 2, "node1": 1}
    each = (pythons[0], pythons[1], pythons[1])
    found = launch(hosts, tmp_path, transport, slots, venv_script=script.name, pythons=each)
    assert {said.host: said.python for said in found} == {"node2": "0", "node0": "1", "node1": "1"}
    assert {said.env["TEST_WORDS"] for said in found} == {"0"}
    assert len(found) == (4 if transport.launcher in RANK_LAUNCHERS else 3)


CLOSED = """
table inet closed {
    chain input {
        type filter hook input priority 0
        tcp dport 22 reject with tcp reset
    }
}
"""


@pytest.fixture
def other_port(hosts: Cluster) -> Iterator[int]:
    """Port of a second sshd on every host, where the usual one takes no connection."""
    with contextlib.ExitStack() as stack:
        for host in hosts:
            daemon = host.start(["/usr/sbin/sshd", "-D", "-p", "2222"])
            stack.callback(daemon.wait, 10)
            stack.callback(daemon.terminate)
            host.run(["nft", "-f", "-"], input=CLOSED, check=True)
            stack.callback(host.run, ["nft", "delete", "table", "inet", "closed"], check=True)
        yield 2222


def test_another_port_of_ssh(hosts: Cluster, tmp_path: Path, transport: Transport, other_port: int) -> None:
    slots = {"node1": 1, "node2": 1}
    found = launch(hosts, tmp_path, transport, slots, ssh_port=other_port)
    assert places(found) == expected(transport, slots, per_node=False)


@pytest.mark.usefixtures("slurm")
def test_an_allocation_changes_neither_order_nor_counts(
    hosts: Cluster, tmp_path: Path, transport: Transport
) -> None:
    """Inside of one, Hydra would start its proxies by srun, in the order of Slurm."""
    salloc = ("salloc", "--quiet", "-N3", "--ntasks-per-node=1", "--cpus-per-task=8")
    found = launch(hosts, tmp_path, transport._replace(before=salloc), UNEQUAL)
    assert places(found) == expected(transport, UNEQUAL, per_node=False)


HYDRA = [word for word in MPI if not word.startswith("openmpi")]


@pytest.mark.parametrize("transport", ["ssh", "pdsh", *HYDRA], indirect=True)
def test_a_host_may_be_named_with_its_user(hosts: Cluster, tmp_path: Path, transport: Transport) -> None:
    found = launch(hosts, tmp_path, transport, {"root@node2": 2, "node1": 2})
    assert places(found) == expected(transport, {"node2": 2, "node1": 2}, per_node=False)


@pytest.mark.parametrize("transport", ["openmpi4", "openmpi5"], indirect=True)
def test_open_mpi_reaches_hosts_that_are_named_with_one_user(
    hosts: Cluster, tmp_path: Path, transport: Transport
) -> None:
    slots = {"root@node2": 2, "node0": 1, "root@node1": 2}
    found = launch(hosts, tmp_path, transport, slots, own_name="node0")
    assert places(found) == expected(transport, {"node2": 2, "node0": 1, "node1": 2}, per_node=False)


@pytest.mark.parametrize("transport", ["ssh", "pdsh", *MPI], indirect=True)
def test_a_host_may_be_named_by_an_address(hosts: Cluster, tmp_path: Path, transport: Transport) -> None:
    found = launch(hosts, tmp_path, transport, {hosts[2].address: 2, hosts[1].address: 2})
    assert places(found) == expected(transport, {"node2": 2, "node1": 2}, per_node=False)


@pytest.mark.parametrize("transport", ["ssh", "pdsh"], indirect=True)
def test_a_host_may_be_named_by_an_ipv6_address(
    hosts: Cluster, tmp_path: Path, transport: Transport, wait_until: WaitUntil
) -> None:
    def addresses() -> list[str]:
        """Those of the kernel, once it has seen that nobody else has them."""
        ask = ["ip", "-6", "-o", "addr", "show", "dev", "eth0", "-tentative"]
        shown = [host.run(ask, check=True).stdout for host in hosts]
        return [text.split("inet6 ", 1)[1].partition("/")[0] for text in shown if "inet6 " in text]

    wait_until(lambda: len(addresses()) == len(hosts))
    address = addresses()[2]
    found = launch(hosts, tmp_path, transport, {f"[{address}%eth0]": 2, "node1": 2})
    assert places(found) == expected(transport, {"node2": 2, "node1": 2}, per_node=False)
