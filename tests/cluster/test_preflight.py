"""What stands in the way on real hosts is told before anything is started, all of it at once."""

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
