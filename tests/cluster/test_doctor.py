"""`--doctor` on several hosts: faults that only comparison and trying show, and silence where all is well."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster import Cluster
from tests.kit.cluster.host import Host
from tests.support.fleet import Ways

import dsl

Doctor = Callable[..., tuple[int, str]]

SCRIPT = "raise SystemExit('the doctor has started the script')\n"
ENV = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
every_way = pytest.mark.parametrize("ways", ["ssh", "pdsh", "slurm", "openmpi5"], indirect=True)


@pytest.fixture(params=["ssh", "pdsh", "slurm"])
def launcher(request: pytest.FixtureRequest) -> str:
    """A way to the hosts."""
    if request.param == "slurm":
        request.getfixturevalue("slurm")
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
        words: list[str | Path] = [dsl_command, "--doctor", "-H", hostfile, "--launcher", launcher, *options]
        words += [script]
        result = hosts[0].run(words, env={**pdsh, **ENV, **(env or {})}, cwd=cwd)
        assert result.stderr == ""
        return result.returncode, result.stdout

    return run


def test_healthy_hosts_have_no_finding_and_nothing_is_started(doctor: Doctor, launcher: str) -> None:
    code, text = doctor(launcher=launcher)
    assert text.startswith("doctor: 3 hosts, 3 workers: all is well, ")
    assert (code, len(text.splitlines())) == (0, 1)


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


@pytest.fixture
def first(hosts: Cluster, ways: Ways, dsl_command: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a job behind `--doctor-first` on the three hosts: exit code, stdout, stderr."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.names))

    def run(*options: str, cwd: Path | str = tmp_path, **env: str) -> Any:
        reached = f"--doctor-first -H {hostfile} --launcher {ways.launcher}".split()
        words = [str(dsl_command), *reached, *options]
        return hosts[0].run([*words, "train.py"], env={**ways.env, **ENV, **env}, cwd=str(cwd))

    return run


@every_way
def test_a_job_starts_behind_a_look_at_all_hosts(first: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')\n")
    ran = first()
    assert (ran.returncode, ran.stdout.count("started"), ran.stderr) == (0, 3, "")
    ran = first("-x", "TORCH_DISTRIBUTED_DEBUG=DETAIL")
    assert (ran.returncode, ran.stdout.count("started")) == (0, 3)
    assert ran.stderr == (
        "dsl: warning: node0, node1, node2: TORCH_DISTRIBUTED_DEBUG=DETAIL makes training slower: unset it after "
        "debugging [slow-settings]\n"
    )


@every_way
def test_an_error_on_one_host_keeps_the_script_from_its_start_on_all(
    hosts: Cluster, first: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hosts[1].run(["ip", "link", "set", "lo", "down"], check=True)
    try:
        ran = first()
    finally:
        hosts[1].run(["ip", "link", "set", "lo", "up"], check=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "host node1: the interface lo is down" in ran.stderr
    assert "[loopback]" in ran.stderr
    assert "has started the script" not in ran.stderr


def test_an_elastic_job_leaves_a_host_with_errors_out(
    hosts: Cluster, first: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('started')\n")
    hosts[1].run(["ip", "link", "set", "lo", "down"], check=True)
    try:
        ran = first("--elastic_training", "--num_nodes", "1:3", "--master_addr", hosts[0].address)
    finally:
        hosts[1].run(["ip", "link", "set", "lo", "up"], check=True)
    assert (ran.returncode, ran.stdout.count("started")) == (0, 2), ran.stderr
    assert "host node1" in ran.stderr
    assert "[loopback]" in ran.stderr


@every_way
def test_an_error_between_hosts_keeps_the_script_from_its_start(
    hosts: Cluster, first: Callable[..., Any]
) -> None:
    folder = "/run/job"
    for number, host in enumerate(hosts):
        host.run(["mkdir", "-p", folder], check=True)
        text = SCRIPT if number else SCRIPT + "# an older copy\n"
        host.run(["tee", f"{folder}/train.py"], input=text, check=True)
    ran = first(cwd=folder)
    for host in hosts:
        host.run(["rm", "-r", folder], check=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "dsl: error: node0: the script is another one than on node1, node2: copy it" in ran.stderr
    assert "has started the script" not in ran.stderr


SLOW = "root tbf rate 300mbit burst 64kb latency 400ms"


@pytest.mark.torch
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "ways, fault",
    [
        ("ssh", "none"),
        ("ssh", "host"),
        ("ssh", "link"),
        ("pdsh", "none"),
        ("slurm", "none"),
        ("openmpi5", "none"),
    ],
    indirect=["ways"],
)
def test_the_ring_names_the_slow_host_or_link(
    hosts: Cluster, dsl_command: Path, tmp_path: Path, ways: Ways, fault: str
) -> None:
    """The kernel slows all that a host sends, or what two hosts send each other, on a way of its own."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.names))
    (tmp_path / "train.py").write_text(SCRIPT)
    steps = {"none": [], "host": [(2, f"tc qdisc add dev FACE {SLOW}")]}.get(fault) or [
        (one, step)
        for one, other in ((1, 2), (2, 1))
        for step in (
            "ip link add link FACE name slow0 type macvlan mode bridge",
            "ip link set slow0 up",
            f"tc qdisc add dev slow0 {SLOW}",
            f"ip route add {hosts[other].address}/32 dev slow0 src {hosts[one].address}",
        )
    ]
    words = f"{dsl_command} --doctor --ring -H {hostfile} --launcher {ways.launcher} train.py".split()
    try:
        for place, step in steps if fault != "none" else ():
            hosts[place].run(step.replace("FACE", interface_of(hosts[place])).split(), check=True)
        ran = hosts[0].run(words, env={**ways.env, **ENV}, cwd=str(tmp_path))
    finally:
        for host in hosts:
            host.run(["tc", "qdisc", "del", "dev", interface_of(host), "root"])
            host.run(["ip", "link", "del", "slow0"])
            host.run(["ip", "neigh", "flush", "all"])  # others may know it as the way to its host
    lines = ran.stdout.splitlines()
    assert lines[:1] == ["ring: 3 hosts, 3 ranks, gloo on the CPU"], ran.stderr
    assert "pairs of hosts, the median of 3: 4 MB in " in ran.stdout
    found = [line.partition(" passes ")[0] for line in lines if line.endswith("[slow-link]")]
    said = {
        "none": [],
        "host": ["warning  node2: the fastest link from here"],
        "link": ["warning  node1, node2: the link between them"],
    }
    assert {*found} >= {*said[fault]}, ran.stdout  # a busy machine may add others
    assert ran.returncode == (1 if "[slow-" in ran.stdout else 0), ran.stderr


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
