"""Accelerators and their devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.machine import UNASKED, make_facts, numa_table
from tests.unit.devices.record_nvml import load

from dsl.devices import nvidia
from dsl.devices.offered import (
    DeviceFacts,
    Devices,
    find_devices,
    read_slots,
    select_accelerator,
    visible_override,
    visible_slots,
    visible_warning,
)
from dsl.errors import AcceleratorError, FilterError, NoDevicesError


def _find(environ: dict[str, str], **facts: Any) -> Devices:
    host = make_facts(**facts)
    return find_devices(environ, host.devices, host.cpus)


@pytest.mark.parametrize(
    "value, entries",
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,1", ("0", "1")),
        (" 3, 1 ", ("3", "1")),
        ("1,1", ("1",)),
        ("0,-1,2", ("0",)),
        ("0,,2", ("0",)),
        ("GPU-1,MIG-2", ("GPU-1", "MIG-2")),
    ],
)
def test_words_of_the_variable_are_slots_as_deepspeed_reads_them(
    value: str | None, entries: tuple[str, ...] | None
) -> None:
    assert read_slots(value) == entries


@pytest.mark.parametrize(
    "environ, cuda, expected",
    [
        ({}, 4, ("cuda", 4)),
        ({}, 0, ("cpu", 0)),
        ({"DS_ACCELERATOR": "cpu"}, 4, ("cpu", 0)),
        ({"DS_ACCELERATOR": "cuda"}, 4, ("cuda", 4)),
        ({"DS_ACCELERATOR": ""}, 4, ("cuda", 4)),
        ({"CUDA_VISIBLE_DEVICES": ""}, 4, ("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 4, ("cuda", 4)),
    ],
)
def test_the_accelerator(environ: dict[str, str], cuda: int, expected: tuple[str, int]) -> None:
    assert select_accelerator(environ, make_facts(cuda=cuda).devices) == expected


def test_an_accelerator_that_there_is_not_is_refused() -> None:
    with pytest.raises(AcceleratorError, match="DS_ACCELERATOR must be one of cuda, cpu, xpu"):
        select_accelerator({"DS_ACCELERATOR": "tpu"}, make_facts().devices)


@pytest.mark.parametrize(
    "name, mask, message",
    [
        ("npu", {}, "^DS_ACCELERATOR=npu: .* this machine has no npu device"),
        ("mps", {}, "DS_ACCELERATOR=mps: .* this machine has no mps device"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": ""}, "ASCEND_RT_VISIBLE_DEVICES hides them all"),
        ("cuda", {}, "no GPU resources available: this machine has no NVIDIA or AMD device"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "-1"}, "no GPU .* available: CUDA_VISIBLE_DEVICES hides them all"),
    ],
)
def test_an_accelerator_that_cannot_be_used(name: str, mask: dict[str, str], message: str) -> None:
    with pytest.raises(NoDevicesError, match=message):
        select_accelerator({"DS_ACCELERATOR": name, **mask}, make_facts().devices)


@pytest.mark.parametrize(
    "environ, found, expected",
    [
        ({}, None, ("cuda", 4)),
        ({}, "npu", ("npu", 8)),
        ({"DS_ACCELERATOR": "mlu"}, None, ("mlu", 8)),
        ({"DS_ACCELERATOR": "cuda"}, "npu", ("cuda", 4)),
        ({"DS_ACCELERATOR": "cpu"}, "npu", ("cpu", 0)),
        ({"ASCEND_RT_VISIBLE_DEVICES": "-1"}, "npu", ("cuda", 4)),
        ({"ASCEND_RT_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": ""}, "npu", ("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": ""}, "hpu", ("hpu", 8)),
        ({"CUDA_VISIBLE_DEVICES": ""}, "klxpu", ("cpu", 0)),
        ({"ZE_AFFINITY_MASK": ""}, "xpu", ("xpu", 8)),
        ({"ZE_AFFINITY_MASK": "3"}, "xpu", ("xpu", 8)),
    ],
)
def test_other_accelerators_come_before_cuda(
    environ: dict[str, str], found: str | None, expected: tuple[str, int]
) -> None:
    devices = make_facts(cuda=4, other_name=found, other_count=lambda *_: 8).devices
    assert select_accelerator(environ, devices) == expected


def test_an_accelerator_that_is_named_is_not_looked_for() -> None:
    devices = make_facts(other_name=UNASKED, other_count=lambda *_: 8).devices
    assert select_accelerator({"DS_ACCELERATOR": "npu"}, devices) == ("npu", 8)


def test_devices_of_another_accelerator_have_its_variable() -> None:
    environ = {"ASCEND_RT_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "1"}
    devices = _find(environ, other_name="npu", other_count=lambda *_: 8)
    assert devices == Devices("npu", range(8), ("4", "5"), "ASCEND_RT_VISIBLE_DEVICES=4,5")
    assert visible_slots(devices, devices.visible or ()) == [4, 5]


def test_nothing_is_counted_for_a_job_on_the_cpu() -> None:
    devices = make_facts(cuda_count=UNASKED).devices
    assert select_accelerator({"DS_ACCELERATOR": "cpu"}, devices) == ("cpu", 0)
    assert select_accelerator({"CUDA_VISIBLE_DEVICES": ""}, devices) == ("cpu", 0)


@pytest.mark.parametrize(
    "local_size, nodes, slots",
    [
        ("", [[0]], 1),
        ("", [], 1),
        ("", [[0], [1]], 2),
        ("0", [[0], [1]], 2),
        ("-3", [[0], [1]], 2),
        (" 5 ", [[0]], 5),
    ],
)
def test_workers_of_a_cpu_node(local_size: str, nodes: list[list[int]], slots: int) -> None:
    devices = _find({"LOCAL_SIZE": local_size}, numa_nodes=numa_table(*nodes))
    assert (devices.accelerator, len(devices.slots)) == ("cpu", slots)
    assert devices.size_from_environment == (slots == 5)


def test_a_local_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(AcceleratorError, match="LOCAL_SIZE='two' is not a whole number"):
        _find({"LOCAL_SIZE": "two"})


def test_local_size_says_nothing_about_gpus() -> None:
    assert len(_find({"LOCAL_SIZE": "2"}, cuda=4).slots) == 4


def _devices(accelerator: str, count: int, value: str) -> Devices:
    return Devices(accelerator, range(count), read_slots(value), f"CUDA_VISIBLE_DEVICES={value}")


@pytest.mark.parametrize(
    "value, slots, override",
    [("3,1", [3, 1], None), ("GPU-b,GPU-a", [0, 1], "GPU-b,GPU-a"), ("0,00", [0], None)],
)
def test_shown_devices_are_slots_in_the_users_order(
    value: str, slots: list[int], override: str | None
) -> None:
    devices = _devices("cuda", 4, value)
    assert visible_slots(devices, devices.visible or ()) == slots
    assert visible_override(devices, devices.visible or ()) == override


@pytest.mark.parametrize(
    "accelerator, value, message",
    [
        ("cuda", "0,7", "=0,7: no slot '7' specified on host 'localhost', which has slots 0 to 3"),
        ("cuda", "all", "CUDA_VISIBLE_DEVICES=all: 'all' is no device"),
        ("cuda", "GPU-1,2", "'2' is no device"),
        ("cuda", "0-2", "CUDA_VISIBLE_DEVICES=0-2: '0-2' is a range, which"),
        ("cuda", "0.1", "'0.1' is no device, give numbers alone, or GPU-... and MIG-... names"),
        ("cuda", "0,x", "'x' is no device, give numbers alone, or GPU-... and MIG-... names"),
        ("cpu", "GPU-1", "CUDA_VISIBLE_DEVICES=GPU-1 names devices, but none was found on this machine"),
    ],
)
def test_shown_devices_that_are_not_there(accelerator: str, value: str, message: str) -> None:
    devices = _devices(accelerator, 4, value)
    with pytest.raises(FilterError) as caught:
        visible_slots(devices, devices.visible or ())
    assert message in str(caught.value)


A100 = ("MIG-1f0", "MIG-GPU-a/7/0", "MIG-1f1", "MIG-GPU-a/8/0")
"""Both names of two instances."""


@pytest.mark.parametrize(
    "value, names, found",
    [
        ("GPU-b,GPU-a", ("GPU-a1", "GPU-b1"), [0, 1]),
        ("GPU-b1", ("GPU-a1", "GPU-b1"), [0]),
        ("GPU-c,GPU-a", ("GPU-a1", "GPU-b1"), "'GPU-c' is no device of this machine"),
        ("GPU-a,GPU-c", ("GPU-a1", "GPU-b1"), "'GPU-c' is no device of this machine"),
        ("GPU-a,GPU-b", ("GPU-a1", "GPU-a2"), "'GPU-a' begins several names of devices"),
        ("GPU-a,GPU-a1", ("GPU-a1", "GPU-b1"), "'GPU-a1' names a device again, which hides them all"),
        ("MIG-1f1,MIG-1f0", A100, [0, 1]),
        ("MIG-GPU-a/7/0,MIG-1f1", A100, [0, 1]),
        ("MIG-2,MIG-1f0", A100, "'MIG-2' is no device of this machine"),
        ("MIG-1f0,GPU-a", A100, "'GPU-a' cannot stand behind 'MIG-1f0'"),
        ("GPU-c,GPU-d", (), [0, 1]),
    ],
)
def test_a_name_that_hides_devices_is_refused_if_the_names_are_known(
    value: str, names: tuple[str, ...], found: list[int] | str
) -> None:
    devices = _devices("cuda", 4, value)
    if isinstance(found, list):
        assert visible_slots(devices, devices.visible or (), names) == found
        return
    with pytest.raises(FilterError) as caught:
        visible_slots(devices, devices.visible or (), names)
    assert f"CUDA_VISIBLE_DEVICES={value}: {found}" in str(caught.value)


@pytest.mark.parametrize("value, slots", [("0.0,0.1", [0]), ("0.1,1", [0, 1]), ("3.0,9.0", [0])])
def test_parts_of_intel_devices_are_counted_by_device_and_passed_on(value: str, slots: list[int]) -> None:
    devices = Devices("xpu", range(4), read_slots(value), f"ZE_AFFINITY_MASK={value}")
    assert visible_slots(devices, devices.visible or ()) == slots
    assert visible_override(devices, devices.visible or ()) == value


def test_names_are_refused_where_the_vendor_takes_none() -> None:
    devices = Devices("npu", range(4), ("GPU-1",), "ASCEND_RT_VISIBLE_DEVICES=GPU-1")
    with pytest.raises(FilterError, match=r"'GPU-1' is no device, give numbers alone$"):
        visible_slots(devices, ("GPU-1",))


def test_several_mig_instances_are_one_device_for_each_process() -> None:
    warning = visible_warning(("MIG-a", "MIG-b"))
    assert warning is not None
    assert "the first of the 2 that are named" in warning
    assert "\n" not in warning
    assert [visible_warning(shown) for shown in ((), ("MIG-a",), ("GPU-a", "GPU-b"), ("0", "1"))] == [
        None
    ] * 4


@pytest.mark.parametrize("value, override", [("", ""), ("-1", "-1"), ("0", None)])
def test_devices_that_the_user_hid_stay_hidden_on_the_cpu(value: str, override: str | None) -> None:
    assert visible_override(_devices("cpu", 1, value), ()) == override


def _nvidia_root(root: Path, in_proc: Sequence[str], in_dev: Sequence[str]) -> str:
    (root / "dev").mkdir()
    for name in in_dev:
        (root / "dev" / name).touch()
    for name in in_proc:
        (root / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    return str(root)


CONTROL_FILES = ["nvidiactl", "nvidia-uvm", "nvidia-caps", "null"]


@pytest.mark.parametrize(
    "in_proc, in_dev, nvml, expected",
    [
        ([], [], 9, 0),
        ([], CONTROL_FILES, 9, 0),
        (["0000:01:00.0", "0000:02:00.0"], ["nvidia0", "nvidia1", *CONTROL_FILES], 9, 2),
        (["0000:01:00.0", "0000:02:00.0"], ["nvidia1"], 1, 1),
        (["0000:01:00.0", "0000:02:00.0"], ["nvidia1"], None, 1),
        (["0000:01:00.0", "0000:02:00.0"], [], None, 2),
        ([], ["nvidia3"], None, 1),
        ([], ["dxg"], 1, 1),
        ([], ["dxg"], None, 0),
    ],
)
def test_cuda_devices_are_counted_without_the_driver_where_that_is_certain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_proc: list[str],
    in_dev: list[str],
    nvml: int | None,
    expected: int,
) -> None:
    found = nvidia.Survey() if nvml is None else nvidia.Survey((nvidia.Device(""),) * nvml, "nvml")
    monkeypatch.setattr(DeviceFacts, "survey", found)
    assert DeviceFacts(_nvidia_root(tmp_path, in_proc, in_dev)).cuda_count == expected


@pytest.mark.parametrize("name", ["container_2_of_8", "wsl", "eight_a100", "one_lost", "none"])
def test_cuda_devices_of_recorded_machines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = load(name, tmp_path)
    expected = {"container_2_of_8": 2, "wsl": 1, "eight_a100": 8, "one_lost": 4, "none": 0}
    # All files of the lost GPU are still there: only asking the driver, which takes long, would tell.
    monkeypatch.setattr("dsl.devices.nvidia.Nvml", lambda: driver)
    assert DeviceFacts(str(tmp_path)).cuda_count == expected[name]
