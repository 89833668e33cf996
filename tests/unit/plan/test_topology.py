"""CPUs, NUMA nodes and devices as the kernel and NVIDIA's driver describe them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dsl.plan.topology import (
    Gpu,
    NumaNode,
    Topology,
    find_mig_parent,
    parse_kernel_list,
    read_gpus,
    read_numa_nodes,
    read_topology,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    "text, numbers",
    [("0-2,5\n", (0, 1, 2, 5)), ("\n", ()), ("", ()), ("7", (7,)), ("0-1,3-4", (0, 1, 3, 4))],
)
def test_the_kernels_lists(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_kernel_list(text) == numbers


def _write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return str(root)


NODE = "sys/devices/system/node"
CPU = "sys/devices/system/cpu"


def test_numa_nodes_come_in_order_and_say_where_memory_may_be_used(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            f"{NODE}/node10/cpulist": "4-5\n",
            f"{NODE}/node2/cpulist": "2-3\n",
            f"{NODE}/node0/cpulist": "0-1\n",
            f"{NODE}/node1/cpulist": "\n",
            f"{NODE}/possible": "0-10\n",
            f"{NODE}/has_memory": "0-2\n",
            "proc/self/status": "Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t0-1,10\nThreads:\t1\n",
        },
    )
    assert read_numa_nodes(root) == (
        NumaNode(0, (0, 1)),
        NumaNode(1, ()),
        NumaNode(2, (2, 3), usable_memory=False),
        NumaNode(10, (4, 5), usable_memory=False),
    )


def test_a_kernel_that_does_not_say_knows_no_numa_nodes(tmp_path: Path) -> None:
    assert read_topology([0, 1], str(tmp_path)) == Topology((), ((0,), (1,)))


def test_memory_counts_as_usable_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert read_numa_nodes(_write(tmp_path, {f"{NODE}/node0/cpulist": "0\n"})) == (NumaNode(0, (0,)),)


def test_cores_are_the_thread_siblings_of_the_cpus_asked_for(tmp_path: Path) -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"}
    root = _write(
        tmp_path,
        {f"{CPU}/cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in siblings.items()},
    )
    assert read_topology([0, 1, 4], root).cores == ((0, 4), (1, 5))


def test_this_machine_has_a_core_for_every_cpu_we_may_use() -> None:
    import os

    allowed = os.sched_getaffinity(0)
    assert allowed <= {cpu for core in read_topology(allowed).cores for cpu in core}


def test_packages_and_last_level_caches_are_told_once_each(tmp_path: Path) -> None:
    files = {}
    for cpu in range(8):
        half, quarter = cpu // 4 * 4, cpu // 2 * 2
        files[f"{CPU}/cpu{cpu}/topology/package_cpus_list"] = f"{half}-{half + 3}\n"
        for index, (level, kind, shared) in enumerate(
            [
                (1, "Data", f"{cpu}"),
                (3, "Unified", f"{quarter}-{quarter + 1}"),
                (2, "Unified", f"{cpu}"),
                (4, "Instruction", "0-7"),
            ]
        ):
            folder = f"{CPU}/cpu{cpu}/cache/index{index}"
            files |= {f"{folder}/type": f"{kind}\n", f"{folder}/level": f"{level}\n"}
            files[f"{folder}/shared_cpu_list"] = f"{shared}\n"
    topology = read_topology([0, 1, 2, 5], _write(tmp_path, files))
    assert topology.packages == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.caches == ((0, 1), (2, 3), (4, 5))


def test_old_kernels_have_another_name_for_the_cpus_of_a_package(tmp_path: Path) -> None:
    root = _write(tmp_path, {f"{CPU}/cpu{cpu}/topology/core_siblings_list": "0-1\n" for cpu in range(2)})
    assert read_topology([1], root).packages == ((0, 1),)


def test_this_machine_has_its_packages_and_caches_around_its_cores() -> None:
    import os

    topology = read_topology(sorted(os.sched_getaffinity(0)))
    for groups in (topology.packages, topology.caches):
        for group in groups:
            assert all(set(core) <= set(group) or not set(core) & set(group) for core in topology.cores)


GPUS = "proc/driver/nvidia/gpus"


def _information(number: int, excluded: str = "No") -> str:
    return (
        f"Model: \t\t NVIDIA H200\nIRQ:   \t\t {number}\nGPU UUID: \t GPU-0{number}\nVideo BIOS: \t ??.??\n"
        f"Bus Location: \t 0000:00:00.0\nDevice Minor: \t {number}\nGPU Excluded:\t {excluded}\n"
    )


def _unasked() -> None:
    pytest.fail("the driver was asked")


def test_devices_come_by_their_address_with_their_numa_node(tmp_path: Path) -> None:
    addresses = ["0000:dc:00.0", "0000:1a:00.0", "10000:01:00.0", "0001:00:00.0"]
    files = {f"{GPUS}/{address}/information": _information(n) for n, address in enumerate(addresses)}
    files |= {f"dev/nvidia{name}": "" for name in (0, 1, 2, 3, "ctl", "-uvm")}
    files["sys/bus/pci/devices/0000:dc:00.0/numa_node"] = "1\n"
    files["sys/bus/pci/devices/0000:1a:00.0/numa_node"] = "-1\n"
    assert read_gpus(_write(tmp_path, files), _unasked) == [
        Gpu("0000:1a:00.0", "GPU-01", "NVIDIA H200"),
        Gpu("0000:dc:00.0", "GPU-00", "NVIDIA H200", 1),
        Gpu("0001:00:00.0", "GPU-03", "NVIDIA H200"),
        Gpu("10000:01:00.0", "GPU-02", "NVIDIA H200"),
    ]


@pytest.mark.parametrize(
    "in_dev, expected", [("1", ["0000:11:00.0"]), ("013", ["0000:10:00.0", "0000:11:00.0", "0000:13:00.0"])]
)
def test_a_device_without_a_file_and_one_that_is_excluded_are_not_ours(
    in_dev: str, expected: list[str], tmp_path: Path
) -> None:
    """A container sees all devices in /proc, but has the files of its own alone."""
    files = {
        f"{GPUS}/0000:1{n}:00.0/information": _information(n, "Yes" if n == 2 else "No") for n in range(4)
    }
    root = _write(tmp_path, files | {f"dev/nvidia{n}": "" for n in (*in_dev, "2")})
    assert [gpu.address for gpu in read_gpus(root, _unasked)] == expected


def test_the_driver_is_asked_when_the_files_disagree(tmp_path: Path) -> None:
    files = {"dev/nvidia0": "", "sys/bus/pci/devices/0000:0a:00.0/numa_node": "3\n"}
    root = _write(tmp_path, files)
    assert read_gpus(root, lambda: [Gpu("0000:0a:00.0", "GPU-9", "H200")]) == [
        Gpu("0000:0a:00.0", "GPU-9", "H200", 3)
    ]
    assert read_gpus(root, lambda: None) == []


def test_a_machine_without_nvidias_driver_is_not_asked(tmp_path: Path) -> None:
    assert read_gpus(str(tmp_path), _unasked) == []


class _Nvml:
    """As pynvml: two devices, of which the second is divided. Old versions speak in bytes."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, is_broken: str = "", in_bytes: bool = False) -> None:
        self.calls: list[str] = []
        self.is_broken = is_broken
        self.in_bytes = in_bytes

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.in_bytes else text

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(
                busId=self._text(f"00000000:{10 + index:02X}:00.0")
            ),
            "nvmlDeviceGetUUID": lambda index: self._text(f"GPU-{index}"),
            "nvmlDeviceGetName": lambda _index: self._text("H200"),
            "nvmlDeviceGetHandleByUUID": lambda uuid: {b"MIG-1": "part"}[uuid],
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda part: {"part": 1}[part],
        }

        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name == self.is_broken:
                raise self.NVMLError
            return answers.get(name, lambda: None)(*args)

        return call


@pytest.mark.parametrize("facts", [{}, {"in_bytes": True}], ids=str)
def test_what_the_driver_answers(
    facts: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = _Nvml(in_bytes="in_bytes" in facts)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = read_gpus(_write(tmp_path, {"dev/dxg": ""}))
    assert found == [Gpu("0000:0a:00.0", "GPU-0", "H200"), Gpu("0000:0b:00.0", "GPU-1", "H200")]
    assert find_mig_parent("MIG-1") == "0000:0b:00.0"
    assert nvml.calls.count("nvmlInit") == nvml.calls.count("nvmlShutdown") == 2


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetPciInfo", "no module"])
def test_a_driver_that_does_not_answer_is_nobody(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None if broken == "no module" else _Nvml(is_broken=broken))
    assert read_gpus(_write(tmp_path, {"dev/nvidia0": ""})) == []
    assert find_mig_parent("MIG-1") is None
