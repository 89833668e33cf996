"""Before it starts anything, dsl lists all problems of real hosts at once, and agents that do not start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster
from tests.support.fleet import gone_within

Launch = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], flush=True)\n"
# Each host has a directory of this name of its own, where the checkout and /tmp are shared.
PRIVATE = "/run/job"
LISTEN = "import socket; s = socket.create_server(('', 29500)); print('ready', flush=True); input()"


@pytest.fixture(params=["ssh", "pdsh"])
def launch(
    request: pytest.FixtureRequest, hosts: Cluster, pdsh: dict[str, str], dsl_command: Path, tmp_path: Path
) -> Launch:
    """Runs `dsl` on the first host, for a job of one worker on each."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.names))
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(
        *options: str, script: str = "train.py", cwd: str = str(tmp_path)
    ) -> subprocess.CompletedProcess[str]:
        words = [dsl_command, "-H", hostfile, "--launcher", request.param, *options, script]
        return hosts[0].run(words, env={**pdsh, "DS_ACCELERATOR": "cpu"}, cwd=cwd)

    return run


def told(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What `dsl` says, in the order of the alphabet."""
    lines = result.stderr.splitlines()
    return sorted([line.removeprefix("dsl: ") for line in lines if line.startswith("dsl: ")])


def test_the_address_of_the_first_host_is_found_and_its_port_is_free(hosts: Cluster, launch: Launch) -> None:
    result = launch()
    assert (result.returncode, told(result)) == (0, [])
    said = [line.rpartition("] ")[2] for line in result.stdout.splitlines()]
    assert said == [f"{hosts[0].address} 29500"] * 3


def test_a_port_that_is_taken_is_replaced_or_refused(hosts: Cluster, launch: Launch) -> None:
    holder = hosts[0].start(
        [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        other = launch()
        asked = launch("--master_port", "29500")
        holder.stdin.close()
    assert other.returncode == 0
    ports = {line.split()[-1] for line in other.stdout.splitlines()}
    assert len(ports) == 1
    assert told(other) == [f"master port 29500 is taken on host node0, using {ports.pop()}"]
    assert asked.returncode == 2
    (line,) = told(asked)
    assert line.startswith("error: host node0: master port 29500 is taken by pid ")
    assert line.endswith("choose another with --master_port")


def test_all_problems_of_all_hosts_are_told_at_once(hosts: Cluster, launch: Launch) -> None:
    for host in (hosts[0], hosts[1]):
        host.run(["mkdir", "-p", PRIVATE], check=True)
    hosts[0].run(["touch", f"{PRIVATE}/train.py"], check=True)
    hosts[1].run(["touch", f"{PRIVATE}/logs"], check=True)
    result = launch("--master_addr", "10.1.2.3", "--log-dir", "logs", cwd=PRIVATE)
    for host in (hosts[0], hosts[1]):
        host.run(["rm", "-r", PRIVATE], check=True)
    assert (result.returncode, result.stdout) == (2, "")
    first = (
        f"master address 10.1.2.3 is not one of this host, where rank 0 listens: it has {hosts[0].address}; "
        "correct --master_addr, or give --no_ssh_check if packets to that address are passed on to it"
    )
    others = (
        "there is no way to master address 10.1.2.3: network is unreachable, give another with --master_addr"
    )
    missing = "does not exist, start the command in one that every host has"
    assert told(result) == [
        f"error: host node0: {first}",
        "error: host node1: log directory 'logs' is a file, name a directory",
        "error: host node1: script 'train.py' does not exist, check the path and the working directory",
        f"error: host node2: working directory '{PRIVATE}' {missing}",
        f"error: hosts node1, node2: {others}",
    ]


def test_a_host_that_does_not_answer_does_not_hide_the_problems_of_others(
    hosts: Cluster, launch: Launch
) -> None:
    hosts[2].crash()
    result = launch(script="missing.py", cwd="/")
    assert result.returncode == 1
    lost, others = told(result)
    assert lost.startswith("error: host node2: cannot be reached: ssh: connect to host node2 port 22: ")
    assert others == (
        "error: hosts node0, node1: script 'missing.py' does not exist, "
        "check the path and the working directory"
    )


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
@pytest.mark.parametrize("code", [0, 3])
def test_an_agent_that_ends_at_once_is_noticed_at_once(
    hosts: Cluster, pdsh: dict[str, str], dsl_command: Path, tmp_path: Path, launcher: str, code: int
) -> None:
    """Also where the other agents wait for the start of the job, so that the launcher goes on."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"node0 slots=1\nnode1 slots=1 python={python}\nnode2 slots=1\n")
    words: list[str | Path] = [dsl_command, "-H", hostfile, "--launcher", launcher, "--no_python", "true"]
    begin_s = time.monotonic()
    result = hosts[0].run(words, env={**pdsh, "DS_ACCELERATOR": "cpu"})
    assert time.monotonic() - begin_s < 20
    assert result.returncode == 1
    assert told(result) == [
        f"error: host node1: its agent did not start: it printed nothing (exit code {code})"
    ]


@pytest.mark.guarantee("G1")
def test_an_agent_that_hangs_before_it_connects_ends_with_the_command(
    hosts: Cluster, pdsh: dict[str, str], dsl_command: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """The fixture finds whatever is left on the host."""
    begun, python = tmp_path / "begun", tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntrap '' TERM HUP INT PIPE\ntouch {begun}\nsleep 1000\n")
    python.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"node0 slots=1\nnode1 slots=1 python={python}\n")
    words: list[str | Path] = [dsl_command, "-H", hostfile, "--launcher", "pdsh", "--no_python", "true"]
    with hosts[0].start(words, env={**pdsh, "DS_ACCELERATOR": "cpu"}, stderr=subprocess.DEVNULL) as process:
        wait_until(begun.exists)
        process.terminate()
        assert process.wait(20) == 143
    gone_within(hosts)


Refused = Callable[..., list[str]]

# An interpreter whose dsl says that it is another version.
OTHER = f"""#!/bin/sh
exec {sys.executable} -c '
import sys, dsl.agent.node as node
node.__version__ = "9.9"
sys.exit(node.main(sys.argv[3:]))' "$@"
"""


@pytest.fixture(params=["ssh", "pdsh"], ids=["", "pdsh"])
def refused(
    hosts: Cluster, pdsh: dict[str, str], request: pytest.FixtureRequest, dsl_command: Path, tmp_path: Path
) -> Refused:
    """Start a job that must not begin: its errors, sorted. Nothing may be left on any host."""

    def run(code: int, hostfile: str, *options: str, program: str = "/bin/true") -> list[str]:
        path = tmp_path / "hostfile"
        path.write_text("".join(_with_slots(line) for line in hostfile.splitlines()), encoding="utf-8")
        words = ["-H", path, "--launcher", request.param, "--no_python", "--no_local_rank", *options, program]
        result = hosts[0].run([dsl_command, *words], env={"DS_ACCELERATOR": "cpu", **pdsh})
        assert (result.returncode, result.stdout) == (code, ""), result.stderr
        gone_within(hosts)
        lines = result.stderr.splitlines()
        assert all(line.startswith("dsl: error: ") for line in lines), lines
        return sorted(line.removeprefix("dsl: error: ") for line in lines)

    return run


def _with_slots(line: str) -> str:
    host, _, more = line.partition(" ")
    return f"{host} slots=1 {more}\n"


@pytest.mark.guarantee("G8")
def test_a_wrong_port_is_told_of_every_host(refused: Refused) -> None:
    lines = refused(1, "node0\nnode1\nnode2\n", "--ssh_port", "23")
    assert [line.partition(", check")[0] for line in lines] == [
        f"host node{index}: cannot be reached: ssh: connect to host node{index} port 23: Connection refused"
        for index in range(3)
    ]


@pytest.mark.guarantee("G8")
def test_an_unplugged_host_is_named(hosts: Cluster, refused: Refused) -> None:
    hosts[1].unplug()
    (line,) = refused(1, "node0\nnode1\nnode2\n")
    assert line.startswith("host node1: cannot be reached: ssh: connect to host node1 port 22: ")


@pytest.mark.guarantee("G8")
def test_problems_of_all_kinds_are_told_at_once(hosts: Cluster, refused: Refused) -> None:
    other = hosts[0].root / "run/other"
    other.write_text(OTHER)
    other.chmod(0o755)
    hostfile = "node0 python=/run/other\nnode1 python=/usr/bin/python3\nnode2 python=/nosuch/python\nnosuch\n"
    foreign, bare, absent, unknown = sorted(refused(1, hostfile))
    assert foreign.startswith("host node0: it has dsl 9.9, this host has ")
    assert bare.startswith("host node1: its agent did not start: ")
    assert bare.endswith(
        "No module named 'dsl_launcher') (exit code 1), install the same version of dsl there"
    )
    assert absent.startswith("host node2: its agent did not start: ")
    assert "/nosuch/python: " in absent  # in the words of a shell
    assert "(exit code 127), the same interpreter has to be there" in absent
    assert unknown.startswith("host nosuch: cannot be reached: ")


@pytest.mark.guarantee("G8")
def test_a_program_that_is_missing_on_one_host_is_told(hosts: Cluster, refused: Refused) -> None:
    # /run is of each host alone.
    for host in (hosts[0], hosts[2]):
        host.run(["cp", "/bin/true", "/run/not_everywhere"], check=True)
    try:
        lines = refused(2, "node0\nnode1\nnode2\n", program="/run/not_everywhere")
    finally:
        for host in (hosts[0], hosts[2]):
            host.run(["rm", "/run/not_everywhere"], check=True)
    assert lines == ["host node1: program '/run/not_everywhere' does not exist, check the path"]
