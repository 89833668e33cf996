"""Agents that cannot be started are told of before the job starts, a line for each host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster
from tests.support.fleet import gone_within

Refused = Callable[..., list[str]]

pytestmark = pytest.mark.guarantee("G8")

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


def test_a_host_of_an_unknown_name_is_named(refused: Refused) -> None:
    (line,) = refused(1, "node0\nnosuch\nnode2\n")
    assert line.startswith("host nosuch: cannot be reached: ssh: Could not resolve hostname nosuch: ")
    assert line.endswith(", check that `ssh nosuch true` works without a password")


def test_a_wrong_port_is_told_of_every_host(refused: Refused) -> None:
    lines = refused(1, "node0\nnode1\nnode2\n", "--ssh_port", "23")
    assert [line.partition(", check")[0] for line in lines] == [
        f"host node{index}: cannot be reached: ssh: connect to host node{index} port 23: Connection refused"
        for index in range(3)
    ]


def test_an_unplugged_host_is_named(hosts: Cluster, refused: Refused) -> None:
    hosts[1].unplug()
    (line,) = refused(1, "node0\nnode1\nnode2\n")
    assert line.startswith("host node1: cannot be reached: ssh: connect to host node1 port 22: ")


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
