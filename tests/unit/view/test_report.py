"""What `dsl-report` finds on a machine, as data and as text."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.machine import OWN_ADDRESSES, make_facts, numa_table

from dsl.devices.nvidia import Device, MigInstance, Survey
from dsl.errors import PortError
from dsl.machine.programs import QUESTIONS
from dsl.view import report as module
from dsl.view.report import driver_version, human, machine_lines, survey

NVRM = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version:\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"
GPU = Device("0000:07:00.0", "GPU-1", "H200", 1, 0, 150 << 30)
SLICED = Device(
    "0000:08:00.0", "GPU-2", mig=(MigInstance("MIG-1", "GPU-2", 1, 0), MigInstance("MIG-2", "GPU-2", 2, 0))
)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages, programs, kernel and limits of no machine."""
    torch = {"version": "2.9.0+cu128", "path": "/site/torch", "cuda": "12.8", "hip": None}

    def package(name: str, *_: object) -> dict[str, str | None] | None:
        return torch if name == "torch" else None

    def programs(_environ: object) -> dict[str, dict[str, str] | None]:
        return {
            **dict.fromkeys(QUESTIONS),
            "ssh": {"path": "/bin/ssh", "kind": "", "version": "9.2p1"},
            "mpirun": {"path": "/bin/mpirun", "kind": "mpich", "version": ""},
        }

    monkeypatch.setattr(module, "find_package", package)
    monkeypatch.setattr(module, "find_programs", programs)
    shm(monkeypatch, 2 << 30)


def shm(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make this the size of the shared memory."""
    found = SimpleNamespace(f_frsize=4096, f_blocks=size // 4096, f_bavail=1)
    monkeypatch.setattr(os, "statvfs", lambda _path: found)


def look(**facts: Any) -> dict[str, Any]:
    """The survey of such a machine; it is data that JSON keeps."""
    found = survey("hosts", make_facts(**facts))
    assert json.loads(json.dumps(found)) == found
    return found


def value(found: dict[str, Any], name: str) -> str:
    """What the text says behind a name."""
    (line,) = [line for line in machine_lines(found) if line.startswith(f"{name} .")]
    return line[35:]


def test_the_keys_are_those_that_are_documented() -> None:
    found = look()
    path = os.path.join(os.path.dirname(__file__), "../../../docs/tools.md")
    with open(path, encoding="utf-8") as file:
        section = file.read().partition("## dsl-report")[2].partition("\n### ")[0]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows == list(found)


def test_the_names_of_values_end_in_one_column() -> None:
    lines = machine_lines(look(cuda=1, files={"hosts": "n1 slots=2\n"}))
    assert lines[:3] == ["-" * 50, "dsl general environment info:", f"host {'.' * 29} machine"]
    assert {line[33:35] for line in lines[2:]} == {". "}


def test_packages() -> None:
    found = look()
    assert found["torch"] == {"version": "2.9.0+cu128", "path": "/site/torch", "cuda": "12.8", "hip": None}
    assert found["deepspeed"] is None
    assert value(found, "torch hip version") == "None"
    assert value(found, "deepspeed install path") == "not found"


def test_deepspeed_tells_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"git_hash": "abc", "git_branch": None, "torch_info": "version 2.9, cuda 12.8"}
    deepspeed = {"version": "0.18.1", "path": "/site/deepspeed", **facts}
    monkeypatch.setattr(module, "find_package", lambda *_: deepspeed)
    found = look()
    assert value(found, "deepspeed info") == "0.18.1, abc"
    assert value(found, "deepspeed wheel compiled w.") == "version 2.9, cuda 12.8"


def test_devices_of_nvidia() -> None:
    found = look(
        cuda=2,
        files={"/proc/driver/nvidia/version": NVRM},
        survey=Survey((GPU, SLICED), "nvml", ("GPU 2 does not answer",)),
        environ={"CUDA_VISIBLE_DEVICES": "1"},
    )
    assert found["accelerator"] == {
        "name": "cuda",
        "count": 2,
        "visible": "1",
        "variable": "CUDA_VISIBLE_DEVICES",
    }
    assert found["nvidia"]["driver"] == "550.54.14"
    assert found["problems"] == ["GPU 2 does not answer"]
    assert value(found, "nvidia device 0") == "H200, 150.0 GB, 0000:07:00.0, numa node 1"
    assert value(found, "nvidia device 1") == "unknown model, 0000:08:00.0, 2 MIG instances"
    assert value(found, "CUDA_VISIBLE_DEVICES") == "'1'"
    assert machine_lines(found)[-1] == "[WARNING] GPU 2 does not answer"


def test_a_machine_without_devices() -> None:
    found = look(numa_nodes=numa_table(range(4), range(4, 8), ()))
    assert found["nvidia"] is None
    assert (found["accelerator"]["name"], found["accelerator"]["count"]) == ("cpu", 2)
    assert value(found, "cpus") == "8 (0-7)"
    assert value(found, "numa node 2") == "cpus none"
    wrong = look(environ={"DS_ACCELERATOR": "abacus"})
    assert wrong["accelerator"]["name"] is None
    assert wrong["problems"][0].startswith("DS_ACCELERATOR must be one of")


@pytest.mark.parametrize("text, version", [(NVRM, "550.54.14"), (OPEN, "570.86.15"), ("", ""), ("x\n", "")])
def test_the_driver_tells_its_version(text: str, version: str) -> None:
    assert driver_version(text) == version


def test_programs_and_addresses() -> None:
    found = look()
    assert found["programs"]["pdsh"] is None
    assert value(found, "ssh") == "9.2p1, /bin/ssh"
    assert value(found, "mpirun") == "mpich, version unknown, /bin/mpirun"
    assert value(found, "srun") == "not found"
    assert value(found, "addresses") == ", ".join(OWN_ADDRESSES)


def test_the_master_port() -> None:
    def refuse(_port: int) -> bool:
        raise PortError("no network")

    assert value(look(), "master port 29500") == "free"
    assert value(look(taken=(29500,)), "master port 29500") == "taken by pid 9 (python old.py)"
    found = look(is_free=refuse)
    assert value(found, "master port 29500") == "cannot be used"
    assert found["problems"] == ["no network"]


def test_little_shared_memory_is_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look()["problems"] == []
    shm(monkeypatch, 64 << 20)
    found = look()
    assert found["shared_memory"] == {"path": "/dev/shm", "bytes": 64 << 20, "free_bytes": 4096}
    assert found["problems"] == [
        "/dev/shm has 64 MB, which may be too small: in a container raise it with --shm-size=1gb"
    ]
    assert value(found, "shared memory (/dev/shm) size") == "64.0 MB"


def test_the_hostfile_is_counted() -> None:
    found = look(files={"hosts": "n1 slots=2\nn2 slots=3\n"})
    assert found["hostfile"] == {"path": "hosts", "hosts": 2, "slots": 5}
    assert value(found, "hostfile") == "hosts, 2 hosts, 5 slots"
    assert look()["hostfile"] is None
    wrong = look(files={"hosts": "n1\n"})
    assert value(wrong, "hostfile") == "hosts, malformed"
    assert wrong["problems"][0].startswith("hosts line 1: hostfile contains a bad entry")


def test_an_allocation_is_counted() -> None:
    found = look(environ={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-5]", "SLURM_GPUS_PER_NODE": "4"})
    assert found["allocation"] == {"name": "Slurm job 7", "hosts": 3, "slots": 12}
    assert value(found, "allocation") == "Slurm job 7, 3 hosts, 12 slots"
    assert look()["allocation"] is None
    wrong = look(environ={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-"})
    assert wrong["allocation"] is None
    assert len(wrong["problems"]) == 1


def test_of_files_of_variables_the_names_alone_are_told() -> None:
    files = {"/home/me/.deepspeed_env": "TOKEN=hidden\nA=hidden\nA=hidden\n", "/here/.deepspeed_env": "\n"}
    found = look(files=files, home="/home/me", cwd="/here")
    assert found["env_files"] == [
        {"path": "/home/me/.deepspeed_env", "variables": ["TOKEN", "A"]},
        {"path": "/here/.deepspeed_env", "variables": []},
    ]
    assert "hidden" not in json.dumps(found)
    assert [line[35:] for line in machine_lines(found) if line.startswith("env file")] == [
        "/home/me/.deepspeed_env: TOKEN, A",
        "/here/.deepspeed_env: no variable",
    ]


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (1024, -1))
    assert value(look(), "open files") == "1024, up to no limit"


@pytest.mark.parametrize(
    "size, text", [(0, "0.0 B"), (1023, "1023.0 B"), (64 << 20, "64.0 MB"), (3 << 40, "3.0 TB")]
)
def test_sizes(size: int, text: str) -> None:
    assert human(size) == text
