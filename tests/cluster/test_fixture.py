"""The hosts are what the other tests take them for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster, Host, Mpi, Slurm, find_mpi, standing


def test_hosts_reach_each_other_by_ssh(hosts: Cluster) -> None:
    for host in hosts:
        result = hosts[0].run(["ssh", host.name, "hostname; exit 7"])
        assert (result.stdout, result.stderr, result.returncode) == (f"{host}\n", "", 7)


def test_pdsh_starts_on_every_host(hosts: Cluster, pdsh: dict[str, str]) -> None:
    result = hosts[0].run(
        ["pdsh", "-S", "-f", "1024", "-w", ",".join(hosts.names), "echo %n"], env=pdsh, check=True
    )
    assert sorted(result.stdout.splitlines()) == [f"{host}: {host.index}" for host in hosts]


def test_our_package_is_on_every_host(hosts: Cluster, dsl_command: Path) -> None:
    for host in hosts:
        hosts[0].run(["ssh", host.name, f"{sys.executable} -c 'import dsl._core'"], check=True)
    result = hosts[1].run(
        [dsl_command, "--no_local_rank", "--no_python", "hostname"],
        env={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"},
    )
    assert (result.stdout, result.returncode) == ("node1\n", 0)


def test_environment_and_directory_of_a_command_are_those_that_are_given(
    hosts: Cluster, tmp_path: Path
) -> None:
    value = 'a "b" $c\n\xe9'
    program = "import os, sys; print(os.getcwd()); sys.stdout.write(os.environ['VALUE'])"
    result = hosts[2].run([sys.executable, "-c", program], env={"VALUE": value}, cwd=tmp_path, check=True)
    assert result.stdout == f"{tmp_path}\n{value}"
    assert hosts[2].run(["printenv", "DSL_TEST_TOKEN"]).returncode == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_reaches_the_process_itself(hosts: Cluster, signum: signal.Signals) -> None:
    process = hosts[1].start(["sleep", "60"])
    assert process.child != process.pid
    process.send_signal(signum)
    assert process.wait(10) == -signum


def test_a_signal_for_the_group_waits_for_the_process_to_end(hosts: Cluster) -> None:
    script = "trap 'echo heard; exit 5' INT; echo ready; while :; do sleep 1; done"
    process = hosts[1].start(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_group(signal.SIGINT)
        assert process.communicate(timeout=10)[0] == "heard\n"
    assert process.returncode == 5


def test_a_command_may_have_a_terminal(hosts: Cluster) -> None:
    outer, inner = os.openpty()
    process = hosts[0].start(
        ["sh", "-c", "exec </dev/tty; read line; exit ${line}"], stdin=inner, has_terminal=True
    )
    os.close(inner)
    with process:
        os.write(outer, b"9\n")
        assert process.wait(10) == 9
    os.close(outer)


def test_what_is_left_on_a_host_is_found(hosts: Cluster, wait_until: WaitUntil) -> None:
    hosts[0].run(["ssh", "node1", "setsid sleep 77 </dev/null >/dev/null 2>&1 &"], check=True)

    def found() -> list[tuple[Host, str]]:
        return [(host, text.split(" ", 1)[1]) for host, texts in hosts.leftovers().items() for text in texts]

    wait_until(lambda: found() == [(hosts[1], "sleep 77")])
    hosts[1].run(["pkill", "-x", "sleep"], check=True)


def test_a_crashed_host_closes_its_connections_and_boots_again(hosts: Cluster) -> None:
    process = hosts[0].start(["ssh", "node1", "echo up; sleep 60"], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        hosts[1].crash()
        assert process.wait(10) == 255
    assert hosts[0].run(["ssh", "-oConnectTimeout=1", "node1", "true"]).returncode == 255
    hosts[1].boot()
    assert hosts[0].run(["ssh", "node1", "hostname"], check=True).stdout == "node1\n"


def test_an_unplugged_host_is_silent_until_it_is_plugged_in(hosts: Cluster) -> None:
    process = hosts[0].start(
        ["ssh", "node1", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("one\n")
        process.stdin.flush()
        assert process.stdout.readline() == "one\n"
        hosts[1].unplug()
        assert hosts[0].run(["ssh", "-oConnectTimeout=1", "node1", "true"]).returncode == 255
        assert process.poll() is None
        hosts[1].plug()
        process.stdin.write("two\n")
        process.stdin.flush()
        assert process.stdout.readline() == "two\n"
        process.stdin.close()
        assert process.wait(10) == 0


def test_a_host_without_power_says_nothing(hosts: Cluster) -> None:
    process = hosts[0].start(["ssh", "-oServerAliveInterval=1", "-oServerAliveCountMax=1", "node1", "echo up; sleep 60"],
                             stdout=subprocess.PIPE, text=True)  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        hosts[1].poweroff()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert process.wait(20) == 255


def test_a_frozen_host_accepts_and_does_not_answer(hosts: Cluster) -> None:
    if hosts[1].cgroup is None:
        pytest.skip("needs a writable cgroup v2")
    hosts[1].freeze()
    result = hosts[0].run(["ssh", "-oConnectTimeout=1", "node1", "true"])
    assert (result.returncode, "banner exchange" in result.stderr) == (255, True)
    hosts[1].thaw()
    hosts[0].run(["ssh", "node1", "true"], check=True)


def test_programs_can_be_hidden(hosts: Cluster) -> None:
    with hosts[0].without("pdsh"):
        assert hosts[0].run(["sh", "-c", "command -v pdsh"]).returncode == 127
    assert hosts[0].run(["sh", "-c", "command -v pdsh"]).returncode == 0


def test_a_second_cluster_with_the_same_addresses_is_apart(hosts: Cluster) -> None:
    with Cluster(2) as other:
        assert other[0].address == hosts[0].address
        assert other.state != hosts.state
        other[0].run(["ssh", "node1", "touch ~/here"], check=True)
        assert (other.home / "here").exists()
        assert not (hosts.home / "here").exists()
        other[1].crash()
        assert hosts[0].run(["ssh", "node1", "hostname"], check=True).stdout == "node1\n"
        assert {*other.carriers()} <= standing()
    assert not other.state.exists()


def test_a_host_ends_with_whoever_started_it(hosts: Cluster, wait_until: WaitUntil) -> None:
    program = (
        "from tests.kit.cluster import Cluster; import time\n"
        "with Cluster(1) as one: print(one[0].pid, one.state, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        pid, state = process.stdout.readline().split()
        process.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    shutil.rmtree(state)
    if hosts[0].cgroup is not None:
        cgroup = hosts[0].cgroup.parent.parent / Path(state).name

        def removed() -> bool:
            hosts.remove_stale_cgroups()  # what carried the host may live for a moment longer
            return not cgroup.exists()

        wait_until(removed)


def test_an_mpi_library_starts_on_every_host(hosts: Cluster, mpi: Mpi) -> None:
    # Open MPI 5 sometimes waits for ever for the hosts of a program that ends in its first instants.
    program = ["sh", "-c", "hostname; sleep 1"]
    result = hosts[0].run([*mpi.command(hosts, 2), *program], env=mpi.env, check=True)
    assert sorted(result.stdout.split()) == sorted(hosts.names * 2)


def test_mpi4py_talks_over_all_hosts(hosts: Cluster, mpi: Mpi) -> None:
    program = "from mpi4py.MPI import COMM_WORLD as all; print(all.rank, all.allreduce(all.rank))"
    command = [*mpi.command(hosts, env=mpi.python), sys.executable, "-c", program]
    result = hosts[0].run(command, env=mpi.env, check=True)
    assert sorted(result.stdout.splitlines()) == ["0 3", "1 3", "2 3"]


def test_the_stand_in_for_mvapich_names_itself(hosts: Cluster) -> None:
    mpi = find_mpi(hosts, "mvapich-standin")
    assert mpi.launcher == "mvapich"
    assert hosts[0].run(["mpiname"], env=mpi.env).stdout.startswith("MVAPICH2-GDR")


def test_slurm_starts_on_every_host(hosts: Cluster, slurm: Slurm) -> None:
    command = ["srun", "-N3", "--ntasks-per-node=1", "--gpus-per-node=2", "printenv"]
    result = hosts[0].run([*command, "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES"], check=True)
    assert sorted(result.stdout.split()) == [*["0,1"] * 3, *hosts.names]


def test_slurm_comes_back_with_a_host(hosts: Cluster, slurm: Slurm) -> None:
    hosts[2].crash()
    hosts[2].boot()
    slurm.clear()
    result = hosts[0].run(["srun", "-N3", "hostname"], check=True)
    assert sorted(result.stdout.split()) == hosts.names


def test_a_job_of_slurm_ends_with_its_test(hosts: Cluster, slurm: Slurm, wait_until: WaitUntil) -> None:
    process = hosts[0].start(["srun", "-N3", "sleep", "60"])
    wait_until(lambda: len(hosts.leftovers()) == 3)
    process.kill()
    process.wait()
    slurm.clear()
    wait_until(lambda: not hosts.leftovers())
