"""What a command takes along to other hosts, where it takes the hosts from, and how they find back to it."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.kit.cluster import Cluster

pytestmark = pytest.mark.cluster

CPU = {"DS_ACCELERATOR": "cpu"}
ODD = " a\n'\"$HOME;,\\ é\udcff "
SHOW = """
import os, sys
names = ("PWD", "UCX_ODD", "PYTHONPATH", "HIDDEN", "NCCL_X", "FROM_HOME", "BOTH", "FILLED")
found = {name: os.environb.get(name.encode()) for name in names}
line = repr((int(os.environ["RANK"]), os.uname().nodename, sys.executable, os.getcwd(), found))
os.write(1, line.encode() + b"\\n")
"""


def _told(result: CompletedProcess[str]) -> list[tuple[int, str, str, str, dict[str, bytes | None]]]:
    """What each worker has said of itself, by rank."""
    assert result.returncode == 0, result.stderr
    lines = [line[line.index("(") :] for line in result.stdout.splitlines() if "(" in line]
    return sorted(ast.literal_eval(line) for line in lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory that all hosts see, with a script in it."""
    (tmp_path / "show.py").write_text(SHOW, encoding="utf-8")
    return tmp_path


@pytest.mark.guarantee("G5")
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "slurm"])
def test_variables_travel_byte_for_byte(
    launcher: str, hosts: Cluster, pdsh: dict[str, str], dsl_command: Path, folder: Path
) -> None:
    (folder / "hosts").write_text("node0 slots=1\nnode1 slots=1\nnode2 slots=1\n", encoding="utf-8")
    (hosts.home / ".deepspeed_env").write_text("FROM_HOME=1\nBOTH=home\n", encoding="utf-8")
    text = "# a note\n\nexport BOTH='here'\nFILLED=\"/x:$HIDDEN\"\n"
    (folder / ".deepspeed_env").write_text(text, encoding="utf-8")
    env = {**CPU, **pdsh, "UCX_ODD": ODD, "NCCL_X": "n", "PYTHONPATH": "/p", "HIDDEN": "h"}
    del env["DS_ACCELERATOR"]  # with it the variables of other accelerators stay here
    try:
        result = hosts[0].run(
            [dsl_command, "-H", "hosts", "--launcher", launcher, "show.py"], env=env, cwd=folder
        )
    finally:
        (hosts.home / ".deepspeed_env").unlink()
    told = _told(result)
    assert [(rank, host) for rank, host, *_ in told] == [(0, "node0"), (1, "node1"), (2, "node2")]
    for *_, cwd, found in told:
        assert cwd == str(folder)
        hidden = found.pop("HIDDEN")
        assert hidden is None or launcher == "slurm"  # which passes the whole environment on
        assert found == {
            "PWD": os.fsencode(folder),
            "UCX_ODD": os.fsencode(ODD),
            "PYTHONPATH": f"{folder}:/p".encode(),
            "NCCL_X": b"n",
            "FROM_HOME": b"1",
            "BOTH": b"here",
            "FILLED": b"/x:h" if launcher == "slurm" else b"/x:",  # by the variables of the host
        }
    assert f"variables of {folder}/.deepspeed_env go to all hosts: BOTH, FILLED" in result.stderr


def test_hosts_may_have_interpreters_of_their_own(hosts: Cluster, dsl_command: Path, folder: Path) -> None:
    ours = Path(sys.executable)
    python = ours.with_name("python" if ours.name == "python3" else "python3")  # of the same environment
    text = f"node0 slots=1\nnode1 slots=1 python={python}\n"
    (folder / "hosts").write_text(text, encoding="utf-8")
    result = hosts[0].run([dsl_command, "-H", "hosts", "show.py"], env=CPU, cwd=folder)
    assert [(host, executable) for _, host, executable, *_ in _told(result)] == [
        ("node0", sys.executable),
        ("node1", str(python)),
    ]


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("asked", [["--gpus-per-node=2"], ["--ntasks-per-node=2"]])
def test_inside_an_allocation_the_hosts_are_its_own(
    asked: list[str], hosts: Cluster, dsl_command: Path, folder: Path
) -> None:
    """With one task a node, as for torchrun, or one a rank, as for MPI."""
    salloc = ["salloc", "-Q", "-N2", "-w", "node1,node2", *asked]
    result = hosts[0].run([*salloc, dsl_command, "show.py"], env=CPU, cwd=folder)
    told = _told(result)
    expected = [(0, "node1"), (1, "node1"), (2, "node2"), (3, "node2")]
    assert [(rank, host) for rank, host, *_ in told] == expected
    assert "node1, node2 (2 with 4 slots)" in result.stderr


@pytest.mark.usefixtures("slurm")
def test_devices_are_those_that_slurm_has_given(hosts: Cluster, dsl_command: Path, folder: Path) -> None:
    """Another job has the first two of node1."""
    script = "import os; print('seen', os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'])"
    (folder / "seen.py").write_text(script, encoding="utf-8")
    salloc = ["salloc", "-Q", "--gpus-per-node=2", "-w"]
    inner = [*salloc, "node1,node2", "-N2", str(dsl_command), "seen.py"]
    result = hosts[0].run([*salloc, "node1", *inner], env=CPU, cwd=folder)
    assert result.returncode == 0, result.stderr
    lines = sorted(line[line.index("seen") :] for line in result.stdout.splitlines())
    assert lines == ["seen 0 2,3", "seen 1 2,3", "seen 2 0,1", "seen 3 0,1"]


@pytest.mark.usefixtures("slurm")
def test_a_task_of_a_step_runs_where_it_is(hosts: Cluster, dsl_command: Path, folder: Path) -> None:
    result = hosts[0].run(["srun", "-Q", "-N2", "-n2", dsl_command, "show.py"], env=CPU, cwd=folder)
    assert sorted((rank, host) for rank, host, *_ in _told(result)) == [(0, "node0"), (0, "node1")]


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_a_host_may_have_a_name_that_only_ssh_knows(
    launcher: str, hosts: Cluster, pdsh: dict[str, str], dsl_command: Path, folder: Path
) -> None:
    config = hosts[0].root / "etc/ssh/ssh_config"
    before = config.read_text(encoding="utf-8")
    (folder / "hosts").write_text("alias slots=1\n", encoding="utf-8")
    alias = f"Host alias\n  HostName {hosts[2].address}\n"
    config.write_text(f"{alias}Host *\n{before}", encoding="utf-8")
    try:
        result = hosts[0].run(
            [dsl_command, "-H", "hosts", "--launcher", launcher, "show.py"], env={**CPU, **pdsh}, cwd=folder
        )
    finally:
        config.write_text(before, encoding="utf-8")
    assert [host for _, host, *_ in _told(result)] == ["node2"]
