"""`--doctor` on this machine: faults that are really there are found, and a healthy set-up has none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.command import ran
from tests.support.namespaces import unshared

from dsl.machine.crowd import MOST_CLIENTS
from dsl.machine.kernel import Room, room_left
from dsl.model.health import Holder, Target, Way
from dsl.view.doctor import BULK, Porch, knock, on_devices, try_ways
from dsl.view.doctor import command_of as read_command

SCRIPT = "raise SystemExit('the doctor has started the script')\n"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces")
ENV = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
FIRST = 'while [ "$1" != -- ]; do sh -c "$1" || exit 99; shift; done; shift; exec "$@"'


class Machine:
    """Runs the doctor with a fault that was seeded."""

    def __init__(self, dsl_command: Path, folder: Path) -> None:
        self.command, self.folder = dsl_command, folder
        self.run_env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        (folder / "train.py").write_text(SCRIPT)

    def doctor(
        self,
        *options: str,
        before: Sequence[str] = (),
        program: str = "dslrun",
        script: str = "train.py",
        **env: str,
    ) -> tuple[int, str]:
        """The exit code and the page. ``before``: words of a command that runs it in another surrounding."""
        code, out, said = self.ran("--doctor", *options, script, before=before, program=program, **env)
        assert said == ""
        return code, out

    def first(self, *options: str, program: str = "dslrun", **env: str) -> tuple[int, str, str]:
        """The same for a job behind ``--doctor-first``: exit code, stdout, stderr."""
        return self.ran("--doctor-first", *options, "train.py", program=program, **env)

    def ran(self, *words: str, before: Sequence[str] = (), program: str, **env: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command."""
        result = subprocess.run(
            [*before, str(self.command.with_name(program)), *words], cwd=self.folder, env={**self.run_env, **ENV, **env},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return result.returncode, result.stdout, result.stderr

    def in_namespace(self, *steps: str, kinds: Sequence[str] = ("--mount",)) -> list[str]:
        """Words that run a command behind these steps, in namespaces of its own."""
        return [*unshared(*kinds), "--", "sh", "-c", FIRST, "sh", *steps, "--"]


@pytest.fixture
def machine(dsl_command: Path, tmp_path: Path) -> Machine:
    """This machine, with a script in a directory of its own."""
    return Machine(dsl_command, tmp_path)


@pytest.mark.parametrize("program", ["dsl", "dslrun"])
def test_a_healthy_machine_has_no_finding_and_nothing_is_started(machine: Machine, program: str) -> None:
    before = sorted(os.listdir(machine.folder))
    code, text = machine.doctor(program=program)
    assert text.startswith("doctor: this host, 1 worker: all is well"), text
    assert (code, len(text.splitlines())) == (0, 1)
    assert sorted(os.listdir(machine.folder)) == before


def test_no_number_of_workers_is_told_of_a_job_that_cannot_be_planned(machine: Machine) -> None:
    code, text = machine.doctor("--nproc-per-node=2", "--nnodes=2", "--node-rank=5", program="dslrun")
    assert (code, text.splitlines()[0]) == (2, "doctor: this host: 1 error")


ONCE = """\
import os, sys
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
print("attempt", attempt, flush=True)
sys.exit(attempt == "0")
"""


@pytest.mark.parametrize("program, restarts", [("dsl", ()), ("dslrun", ("--max-restarts", "1"))])
def test_warnings_of_a_look_before_the_job_are_said_once(
    machine: Machine, program: str, restarts: Sequence[str]
) -> None:
    (machine.folder / "train.py").write_text(ONCE)
    code, out, said = machine.first(*restarts, program=program, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert (code, out.split("\n")[0]) == (0 if restarts else 1, "attempt 0")
    assert ("attempt 1" in out) == bool(restarts)
    warning = "warning: TORCH_DISTRIBUTED_DEBUG=DETAIL makes training slower: unset it after debugging [slow-settings]"
    assert said.count(f"{program}: {warning}\n") == 1


@pytest.mark.parametrize("program", ["dsl", "dslrun"])
@pytest.mark.parametrize("options", [(), ("--detach",)])
def test_errors_of_a_look_before_the_job_keep_the_script_from_its_start(
    machine: Machine, program: str, options: Sequence[str]
) -> None:
    code, out, said = machine.first(
        *options, program=program, GLOO_SOCKET_IFNAME="none0", TP_SOCKET_IFNAME="none1"
    )
    assert (code, out) == (2, "")
    assert "GLOO_SOCKET_IFNAME=none0 is no interface with an address here: correct or unset it" in said
    assert "TP_SOCKET_IFNAME=none1 is no interface" in said
    assert "error: --doctor-first has found 2 errors here: nothing was started" in said
    assert "the doctor has started the script" not in said


def test_a_healthy_machine_adds_no_word_to_the_job(machine: Machine) -> None:
    code, _, said = machine.first()
    assert (code, "the doctor has started the script" in said) == (1, True)
    assert "doctor-first" not in said
    assert "warning" not in said


def test_a_ring_belongs_to_the_doctor(machine: Machine) -> None:
    code, out, said = machine.ran("--ring", "train.py", program="dslrun")
    assert (code, out, said) == (2, "", "dslrun: error: --ring starts no script: give it with --doctor\n")
    options = ["--max-restarts=3", "--give-up-on=2", "--hang-timeout=3", "--hang-action=stop"]
    code, _, said = machine.ran("--doctor", "--ring", "--dry-run", *options, "train.py", program="dslrun")
    assert (code, said) == (0, "")


@ROOT
@pytest.mark.needs_program("ip")
def test_a_container_of_its_own_is_healthy(machine: Machine) -> None:
    """Namespaces of mounts, network and host name, as a container has them."""
    steps = ("ip link set lo up", "hostname box", "mount -t tmpfs -o size=1g none /dev/shm")
    code, text = machine.doctor(before=machine.in_namespace(*steps, kinds=("--mount", "--net", "--uts")))
    assert (code, len(text.splitlines())) == (0, 1), text


def test_a_virtual_environment_with_torch_is_healthy(machine: Machine) -> None:
    (machine.folder / "train.py").write_text(f"import torch\n{SCRIPT}")
    code, text = machine.doctor("--nproc-per-node", "2", "--log-dir", "logs", "-r", "3")
    assert (code, len(text.splitlines())) == (0, 1), text
    assert not (machine.folder / "logs").exists()


LIMITS = [
    ("--nofile=1024:1024", "open-files", "ulimit -n 65536", 1),
    ("--as=30000000000", "address-space", "ulimit -v unlimited", 1),
]
VARIABLES = [
    ({"OMP_NUM_THREADS": "4096"}, "threads", "OMP_NUM_THREADS=4096, but there", 1),
    ({"GLOO_SOCKET_IFNAME": "ib7"}, "socket-interface", "correct or unset it, there is", 2),
    ({"NCCL_SOCKET_IFNAME": "=ib"}, "socket-interface", "correct or unset it, there is", 2),
    ({"TMPDIR": "/no/such/folder"}, "tmpdir", "make it on every host, or unset it", 1),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "slow-settings", "unset it after debugging", 1),
    ({"DSL_ENGINE_DISABLE": "clone3"}, "kernel", "let the container's seccomp profile pass it", 1),
    ({"DS_ACCELERATOR": "gpu"}, "launch", "DS_ACCELERATOR must be one of", 2),
]


@pytest.mark.parametrize("limit, check, mend, expected", LIMITS)
def test_a_limit_is_found(machine: Machine, limit: str, check: str, mend: str, expected: int) -> None:
    code, text = machine.doctor(before=["prlimit", limit, "--"])
    assert f"[{check}]" in text
    assert mend in text
    assert code == expected


@pytest.mark.parametrize("variables, check, mend, expected", VARIABLES)
def test_a_variable_is_found(
    machine: Machine, variables: dict[str, str], check: str, mend: str, expected: int
) -> None:
    program = "dsl" if "DS_ACCELERATOR" in variables else "dslrun"
    code, text = machine.doctor(program=program, **variables)
    assert f"[{check}]" in text
    assert mend in text
    assert (code, len(text.splitlines())) == (expected, 2)


MOUNTS = [
    ("mount -t tmpfs -o size=64m none /dev/shm", "shared-memory", "has 64 MB, too little", 1),
    ("mount -t tmpfs -o size=32m none /mnt", "disk", "/mnt (temporary files) is full, 32 MB left", 2),
    ("mount -t tmpfs -o size=2g,nr_inodes=50 none /mnt", "disk", "more files (inodes)", 2),
    ("mount -t tmpfs -o size=2g,noexec none /mnt", "noexec", "set TMPDIR and TRITON_CACHE_DIR", 1),
]


@ROOT
@pytest.mark.parametrize("step, check, mend, expected", MOUNTS)
def test_a_file_system_is_found(machine: Machine, step: str, check: str, mend: str, expected: int) -> None:
    env = {"TMPDIR": "/mnt"} if "/mnt" in step else {}
    code, text = machine.doctor(before=machine.in_namespace(step), **env)
    assert f"[{check}]" in text
    assert mend in text
    assert (code, len(text.splitlines())) == (expected, 2)


@ROOT
def test_a_network_without_loopback_is_found(machine: Machine) -> None:
    code, text = machine.doctor(before=machine.in_namespace(kinds=("--net",)))
    assert "ip link set lo up (as root) [loopback]" in text
    assert code == 2


def test_faults_of_the_script_and_its_interpreter_are_found(machine: Machine, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    (machine.folder / "random.py").touch()
    (machine.folder / "train.py").write_text("import torch\n")
    code, text = machine.doctor(PYTHON_EXEC=f"{bare}/bin/python")
    assert code == 2
    assert f"which {bare}/bin/python does not have: install torch there" in text
    assert "random.py hides the module that torch imports by this name: rename the file" in text
    code, text = machine.doctor(PYTHON_EXEC="/no/python")
    assert "interpreter /no/python does not run" in text
    code, text = machine.doctor(script="missing.py")
    assert (code, "script 'missing.py' does not exist, check the path" in text) == (2, True)


def test_a_lock_without_an_owner_is_found_and_one_with_an_owner_is_not(machine: Machine) -> None:
    cache = machine.folder / "extensions"
    lock = cache / "py312_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    code, text = machine.doctor(TORCH_EXTENSIONS_DIR=str(cache))
    assert (code, f"{lock} is a lock whose owner is gone" in text) == (2, True)
    with lock.open("w"):
        assert machine.doctor(TORCH_EXTENSIONS_DIR=str(cache))[0] == 0


@ROOT
def test_a_process_that_an_earlier_job_has_left_is_named(machine: Machine) -> None:
    """In a process table of its own, so that pid 1 adopts it."""
    sleeper = "DSL_JOB_ID=0123456789abcdef sh -c 'sleep 50 & sleep 0.2'"
    text = (
        f"{sleeper}; cd {machine.folder} && {machine.command.with_name('dslrun')} --doctor train.py; exit $?"
    )
    words = [*unshared("--pid", "--fork", "--kill-child", "--mount-proc"), "sh", "-c", text]
    result = ran(words, env={**machine.run_env, **ENV})
    assert result.returncode == 1, result
    assert "(sleep 50) is left over from an earlier job: end it (kill " in result.stdout


def test_a_port_that_is_held_is_named_with_its_holder(machine: Machine) -> None:
    with closing(socket.create_server(("", 0))) as door:
        port = str(door.getsockname()[1])
        code, text = machine.doctor("--master_port", port, program="dsl")
        assert code == 2
        assert f"master port {port} is taken by pid {os.getpid()} (" in text
        words = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "10.99.0.1", "--master-port", port)
        code, text = machine.doctor(*words)
    assert code == 2
    assert "10.99.0.1 (10.99.0.1) is not this machine, where node 0 listens: correct --master-addr" in text


def test_a_process_on_a_device_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's answers, of which a monitor's small share is left out."""
    own, parent = SimpleNamespace(pid=os.getppid(), usedGpuMemory=30 << 30), read_command(os.getppid())
    monitor = SimpleNamespace(pid=1, usedGpuMemory=9 << 20)
    driver = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetComputeRunningProcesses=lambda number: [own, monitor] if number else [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert on_devices(2) == (Holder(os.getppid(), parent, "GPU 1 (30720 MB)"),)


def test_control_groups_of_both_versions_are_read(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    put("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/\n0::/a/b\n")
    mount = "30 25 0:26 {} /sys/fs/cgroup{} rw - {} cgroup rw{}\n"
    mounts = (("/", "", "cgroup2", ""), ("/docker/abc", "/memory", "cgroup", ",memory"))
    others = [("/", f"/{number}", "tmpfs", "") for number in range(2000)]
    put(
        "proc/self/mountinfo",
        "".join(mount.format(*one) for one in (*others, *mounts, ("/", "/cpu", "cgroup", ",cpu,cpuacct"))),
    )
    root = "sys/fs/cgroup"
    put(f"{root}/a/pids.max", "100\n")
    put(f"{root}/a/pids.current", "40\n")
    put(f"{root}/a/b/pids.max", "max\n")
    put(f"{root}/a/b/cpu.max", "150000 100000\n")
    put(f"{root}/memory/memory.limit_in_bytes", f"{1 << 30}\n")
    put(f"{root}/memory/memory.usage_in_bytes", f"{1 << 29}\n")
    put(f"{root}/memory/memory.stat", f"cache 5\ntotal_inactive_file {1 << 20}\n")
    put(f"{root}/cpu/cpu.cfs_quota_us", "-1\n")
    found = room_left(str(tmp_path))
    assert found == Room(
        (1 << 29) + (1 << 20),
        f"{tmp_path}/{root}/memory/memory.limit_in_bytes (1024 MB)",
        60,
        f"{tmp_path}/{root}/a/pids.max (100)",
        1.5,
    )
    assert room_left(str(tmp_path / "nothing")) == Room()


def _target(port: int, token: str) -> Target:
    return Target(3, "n3", ("127.0.0.1",), port, token)


def test_a_way_is_free_only_if_large_packets_go_both_ways_to_the_right_host() -> None:
    with Porch((0,)) as porch:
        assert porch.port > 0
        free = _target(porch.port, porch.token)
        other = _target(porch.port, "f" * 16)
        ways = try_ways([free, other, _target(1, "f" * 16)])
        assert [way.answer for way in ways] == ["", "stranger", "refuses"]
        assert ways[0] == Way(3, "127.0.0.1", "")
        assert knock(("127.0.0.1",), porch.port) == "listens"
    assert knock(("127.0.0.1",), 1) == "refuses"
    assert try_ways([Target(0, "x", ("256.0.0.1.x",), 1, "")])[0].answer == "unreachable"


def test_silent_callers_keep_no_host_from_its_answer() -> None:
    with Porch((0,)) as porch, ExitStack() as silent:
        threads = threading.active_count()
        for _ in range(2 * MOST_CLIENTS):
            silent.enter_context(socket.create_connection(("127.0.0.1", porch.port)))
        (way,) = try_ways([_target(porch.port, porch.token)])
        assert way.answer == ""
        assert threading.active_count() == threads


def test_a_host_that_takes_a_greeting_and_loses_what_follows_shows_as_small() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as door:

        def greet() -> None:
            caller, _ = door.accept()
            held.append(caller)
            caller.sendall(b"0" * 16)

        held: list[socket.socket] = []
        thread = threading.Thread(target=greet)
        thread.start()
        (way,) = try_ways([_target(door.getsockname()[1], "0" * 16)], 0.3)
        thread.join()
        assert way.answer == "small"
        for one in held:
            one.close()


def test_a_stranger_at_the_port_gets_bytes_without_a_meaning_and_no_more() -> None:
    with Porch((0,)) as porch, socket.create_connection(("127.0.0.1", porch.port)) as caller:
        caller.sendall(bytes(BULK))
        said = b""
        while data := caller.recv(1 << 16):
            said += data
    assert said == porch.token.encode() + bytes(BULK)
