"""`--doctor` on several hosts: faults that only comparison and trying show, and silence where all is well."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster, Slurm
from tests.kit.cluster.host import Host

import dsl

Doctor = Callable[..., tuple[int, str]]

SCRIPT = "raise SystemExit('the doctor has started the script')\n"
FEW_S = 5.0
ENV = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(params=["ssh", "pdsh"])
def launcher(request: pytest.FixtureRequest) -> str:
    """A way to the hosts."""
    return str(request.param)


@pytest.fixture
def doctor(hosts: Cluster, pdsh: dict[str, str], dsl_command: Path, tmp_path: Path) -> Doctor:
    """Runs `dsl --doctor` on the first host for a job of one worker on each: exit code and page."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.names))
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(
        *options: str,
        env: dict[str, str] | None = None,
        launcher: str = "ssh",
        cwd: str = str(tmp_path),
        script: str = "train.py",
        hostfile: str | Path = hostfile,
    ) -> tuple[int, str]:
        words: list[str | Path] = [
            dsl_command,
            "--doctor",
            "-H",
            hostfile,
            "--launcher",
            launcher,
            *options,
            script,
        ]
        result = hosts[0].run(words, env={**pdsh, **ENV, **(env or {})}, cwd=cwd)
        assert result.stderr == ""
        return result.returncode, result.stdout

    return run


def test_healthy_hosts_have_no_finding_and_nothing_is_started(doctor: Doctor, launcher: str) -> None:
    code, text = doctor(launcher=launcher)
    assert text.startswith("doctor: 3 hosts, 3 workers: all is well, ")
    assert (code, len(text.splitlines())) == (0, 1)


def test_the_doctor_answers_soon(doctor: Doctor) -> None:
    begin_s = time.monotonic()
    doctor()
    assert time.monotonic() - begin_s < FEW_S


def test_a_host_without_a_way_to_another_is_found_from_both_sides(hosts: Cluster, doctor: Doctor) -> None:
    for host, other in ((1, 2), (2, 1)):
        hosts[host].run(["ip", "route", "add", "unreachable", f"{hosts[other].address}/32"], check=True)
    try:
        code, text = doctor()
    finally:
        for host, other in ((1, 2), (2, 1)):
            hosts[host].run(["ip", "route", "del", "unreachable", f"{hosts[other].address}/32"], check=True)
    assert code == 2
    assert f"node1: from here node2 at {hosts[2].address} (no route to host) cannot be reached" in text
    assert f"node2: from here node1 at {hosts[1].address} (no route to host) cannot be reached" in text
    assert "correct the route" in text


def test_a_firewall_that_says_nothing_is_found(hosts: Cluster, doctor: Doctor) -> None:
    hosts[1].run(["ip", "route", "add", "blackhole", f"{hosts[2].address}/32"], check=True)
    try:
        code, text = doctor()
    finally:
        hosts[1].run(["ip", "route", "del", "blackhole", f"{hosts[2].address}/32"], check=True)
    assert code == 2
    assert f"node2: from here node1 at {hosts[1].address} does not answer: open the firewalls" in text


def interface_of(host: Host) -> str:
    """The name of a host's interface."""
    lines = host.run(["ip", "-o", "-4", "addr"], check=True).stdout.splitlines()
    return next(line.split()[1] for line in lines if host.address in line)


def test_a_network_that_loses_large_packets_is_found(hosts: Cluster, doctor: Doctor) -> None:
    """Two hosts send packets that their switch drops; the first host, and ssh from it, is spared."""
    for host in (hosts[1], hosts[2]):
        large = ["mtu", "9000", "gso_max_segs", "1"]
        host.run(["ip", "link", "set", interface_of(host), *large], check=True)
    try:
        code, text = doctor()
    finally:
        for host in (hosts[1], hosts[2]):
            usual = ["mtu", "1500", "gso_max_segs", "65535"]
            host.run(["ip", "link", "set", interface_of(host), *usual], check=True)
    assert code == 2
    for one, other in ((1, 2), (2, 1)):
        assert (
            f"node{one}: from here node{other} at {hosts[other].address} gets small packets but loses" in text
        )
    assert "set the MTU of the interface to what the network carries" in text
    assert "the MTU differs: 1500 on node0; 9000 on node1, node2" in text


def test_another_mtu_is_found(hosts: Cluster, doctor: Doctor) -> None:
    name = interface_of(hosts[2])
    hosts[2].run(["ip", "link", "set", name, "mtu", "1400"], check=True)
    try:
        code, text = doctor()
    finally:
        hosts[2].run(["ip", "link", "set", name, "mtu", "1500"], check=True)
    assert code == 1
    assert "the MTU differs: 1500 on node0, node1; 1400 on node2; set the same on every host" in text


@pytest.mark.parametrize(
    "line, level, said",
    [
        ("::1 node1", 1, "node1: its own name node1 is ::1"),
        ("127.0.1.1 node1", 1, "node1: its own name node1 is 127.0.1.1"),
        ("10.77.0.12 node1", 2, "node1: its own name node1 is the address of another machine"),
    ],
)
def test_a_host_whose_own_name_is_another_is_found(
    hosts: Cluster, doctor: Doctor, line: str, level: int, said: str
) -> None:
    path = hosts[1].root / "etc/hosts"
    before = path.read_text()
    path.write_text(
        "".join(one for one in before.splitlines(keepends=True) if "node1" not in one) + line + "\n"
    )
    try:
        code, text = doctor()
    finally:
        path.write_text(before)
    assert code == level
    assert said in text
    assert "correct /etc/hosts" in text


def test_a_home_that_is_not_shared_is_found(hosts: Cluster, doctor: Doctor) -> None:
    folder = "/run/job"
    for number, host in enumerate(hosts):
        host.run(["mkdir", "-p", folder], check=True)
        text = SCRIPT if number else SCRIPT + "# an older copy\n"
        if number < 2:
            host.run(["tee", f"{folder}/train.py"], input=text, check=True)
    code, text = doctor(cwd=folder)
    for host in hosts:
        host.run(["rm", "-r", folder], check=True)
    assert code == 2
    assert "node2: script 'train.py' does not exist" in text
    assert "the script is another one than on node" in text


def test_another_interpreter_without_torch_is_found(hosts: Cluster, doctor: Doctor, tmp_path: Path) -> None:
    """Also one that has another torch, without an import of it."""
    (tmp_path / "train.py").write_text("import torch\n")
    own = Path(dsl.__file__).parent.parent
    pythons = {}
    for name in ("bare", "other"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / name], check=True)
        (site,) = (tmp_path / name).glob("lib/python*/site-packages")
        for package in ("dsl", "dsl_launcher", "psutil"):
            (site / package).symlink_to(own / package)
        pythons[name] = tmp_path / name / "bin" / "python"
    fake = site / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (fake / "version.py").write_text("__version__ = '1.0.0'\ncuda = None\n")
    named = tmp_path / "named"
    named.write_text(f"node0 slots=1\nnode1 slots=1\nnode2 slots=1 python={pythons['bare']}\n")
    code, text = doctor(hostfile=named)
    assert code == 2
    assert f"node2: the script imports torch, which {pythons['bare']} does not have: install torch" in text
    named.write_text(f"node0 slots=1\nnode1 slots=1\nnode2 slots=1 python={pythons['other']}\n")
    code, text = doctor(hostfile=named)
    assert code == 2
    assert "1.0.0 on node2; install the same version on every host" in text


def test_settings_that_name_no_interface_or_a_proxy_are_found(doctor: Doctor, tmp_path: Path) -> None:
    variables = tmp_path / ".deepspeed_env"
    variables.write_text("NCCL_SOCKET_IFNAME=ib7\nhttp_proxy=http://secret:word@proxy:3128\n")
    code, text = doctor()
    assert code == 2
    assert "http_proxy is set, and no_proxy leaves out node" in text
    assert "node0, node1, node2: NCCL_SOCKET_IFNAME=ib7 is no interface with an address here" in text
    assert "word" not in text


def test_two_names_of_one_machine_are_found(hosts: Cluster, doctor: Doctor, tmp_path: Path) -> None:
    twice = tmp_path / "twice"
    twice.write_text(f"node0 slots=1\nnode1 slots=1\n{hosts[1].address} slots=1\n")
    code, text = doctor(hostfile=twice)
    assert code == 1
    assert f"hosts node1, {hosts[1].address} are one machine" in text


def test_a_port_that_is_held_is_named_with_its_holder(hosts: Cluster, doctor: Doctor) -> None:
    listen = "import socket; s = socket.create_server(('', 29555)); print('ready', flush=True); input()"
    holder = hosts[0].start(
        [sys.executable, "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        code, text = doctor("--master_port", "29555")
        holder.stdin.close()
    assert code == 2
    assert "node0: master port 29555 is taken by pid " in text
    assert "choose another with --master_port" in text


def test_the_clocks_of_all_hosts_are_compared(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, pdsh: dict[str, str], launcher: str
) -> None:
    """All hosts here have one clock, so the doctor is told to mind no difference at all."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in hosts.names))
    strict = "import sys; from dsl.doctor import job_checks; job_checks.MOST_SKEW_NS = -10**12; "
    code = f"{strict} from dsl.cli.deepspeed import main; sys.exit(main(sys.argv[1:]))"
    words = ["--doctor", "-H", "hosts", "--launcher", launcher, "train.py"]
    result = hosts[0].run([sys.executable, "-c", code, *words], env={**pdsh, **ENV}, cwd=str(tmp_path))
    assert result.returncode == 1
    for name in hosts.names:
        assert f"the clock of host {name} is 0.0 s " in result.stdout
    assert "let NTP set both [clocks]" in result.stdout


def test_a_host_that_is_down_does_not_hide_what_others_say(hosts: Cluster, doctor: Doctor) -> None:
    hosts[2].crash()
    code, text = doctor(script="missing.py")
    assert code == 2
    assert "node2: cannot be reached: " in text
    assert "node0, node1: script 'missing.py' does not exist" in text


def test_a_node_finds_that_the_meeting_point_is_silent(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--doctor", "--nnodes", "2", "--node-rank", "1", "--master-addr", "node1", "train.py"]
    command: list[str | Path] = [dsl_command.with_name("dslrun"), *words]
    well = hosts[0].run(command, env=ENV, cwd=str(tmp_path))
    assert (well.returncode, well.stderr) == (0, ""), well.stdout
    hosts[1].unplug()
    ill = hosts[0].run(command, env=ENV, cwd=str(tmp_path))
    assert ill.returncode == 2
    assert "check the address, the route and the firewall of node 0 [meeting-point]" in ill.stdout


def test_slurm_hosts_are_examined_by_srun(
    hosts: Cluster, slurm: Slurm, dsl_command: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.names))
    words: list[str | Path] = [dsl_command, "--doctor", "-H", hostfile, "--launcher", "slurm", "train.py"]
    result = hosts[0].run(words, env=ENV, cwd=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert result.stdout.startswith("doctor: 3 hosts, 3 workers: all is well")


def test_an_interrupt_ends_the_examination(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, pdsh: dict[str, str]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec cat\n")
    python.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"node0 slots=1\nnode1 slots=1 python={python}\n")
    words: list[str | Path] = [dsl_command, "--doctor", "-H", hostfile, "--launcher", "ssh", "train.py"]
    with hosts[0].start(words, env={**pdsh, **ENV}, cwd=str(tmp_path), text=True) as process:
        end_s = time.monotonic() + 20
        while not os.path.exists(tmp_path / "begun"):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        process.terminate()
        assert process.wait(20) == 128 + 15
