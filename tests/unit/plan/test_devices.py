"""Accelerators and their devices."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from tests.unit.machine import numa_table

from dsl.errors import AcceleratorError, FilterError, NoDevicesError, UnsupportedError
from dsl.plan.devices import (
    Devices,
    ask_nvml,
    count_cuda_devices,
    find_devices,
    select_accelerator,
    visible_entries,
    visible_override,
    visible_slots,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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
def test_visible_devices_are_read_as_cuda_reads_them(
    value: str | None, entries: tuple[str, ...] | None
) -> None:
    assert visible_entries(value) == entries


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
    assert select_accelerator(environ, lambda: cuda) == expected


@pytest.mark.parametrize(
    "environ, kind, message",
    [
        ({"DS_ACCELERATOR": "tpu"}, AcceleratorError, "DS_ACCELERATOR must be one of cuda, cpu, xpu"),
        ({"DS_ACCELERATOR": "npu"}, UnsupportedError, "DS_ACCELERATOR=npu: this version of dsl counts only"),
        ({"DS_ACCELERATOR": "cuda"}, NoDevicesError, "no GPU resources available: .* has no NVIDIA device"),
        (
            {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "-1"},
            NoDevicesError,
            "no GPU resources available: .* CUDA_VISIBLE_DEVICES hides them all",
        ),
    ],
)
def test_an_accelerator_that_cannot_be_used(
    environ: dict[str, str], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        select_accelerator(environ, lambda: 0)


def test_nothing_is_counted_for_a_job_on_the_cpu() -> None:
    def count() -> int:
        pytest.fail("devices were counted")

    assert select_accelerator({"DS_ACCELERATOR": "cpu"}, count) == ("cpu", 0)
    assert select_accelerator({"CUDA_VISIBLE_DEVICES": ""}, count) == ("cpu", 0)


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
    devices = find_devices({"LOCAL_SIZE": local_size}, lambda: 0, lambda: numa_table(*nodes))
    assert (devices.accelerator, len(devices.slots)) == ("cpu", slots)
    assert devices.size_from_environment == (slots == 5)


def test_a_local_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(AcceleratorError, match="LOCAL_SIZE='two' is not a whole number"):
        find_devices({"LOCAL_SIZE": "two"}, lambda: 0, lambda: ())


def test_local_size_says_nothing_about_gpus() -> None:
    assert len(find_devices({"LOCAL_SIZE": "2"}, lambda: 4, lambda: ()).slots) == 4


def _devices(accelerator: str, count: int, value: str) -> Devices:
    return Devices(accelerator, range(count), visible_entries(value), f"CUDA_VISIBLE_DEVICES={value}")


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
        (
            "cuda",
            "0,7",
            "CUDA_VISIBLE_DEVICES=0,7: no slot '7' specified on host 'localhost', which has slots 0 to 3",
        ),
        ("cuda", "all", "CUDA_VISIBLE_DEVICES=all: 'all' is no device"),
        ("cuda", "GPU-1,2", "'2' is no device"),
        ("cpu", "GPU-1", "CUDA_VISIBLE_DEVICES=GPU-1 names devices, but none was found on this machine"),
    ],
)
def test_shown_devices_that_are_not_there(accelerator: str, value: str, message: str) -> None:
    devices = _devices(accelerator, 4, value)
    with pytest.raises(FilterError) as caught:
        visible_slots(devices, devices.visible or ())
    assert message in str(caught.value)


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
    tmp_path: Path, in_proc: list[str], in_dev: list[str], nvml: int | None, expected: int
) -> None:
    assert count_cuda_devices(_nvidia_root(tmp_path, in_proc, in_dev), lambda: nvml) == expected


def _pynvml(*, fails: str = "") -> ModuleType:
    fake = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def call(name: str) -> int:
        if name == fails:
            raise NVMLError
        return 3

    names = ("nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown")
    vars(fake).update({name: lambda name=name: call(name) for name in names}, NVMLError=NVMLError)
    return fake


@pytest.mark.parametrize(
    "module, expected",
    [
        (_pynvml(), 3),
        (_pynvml(fails="nvmlInit"), None),
        (_pynvml(fails="nvmlDeviceGetCount"), None),
        (None, None),
    ],
    ids=["works", "no driver", "no answer", "not installed"],
)
def test_the_driver_counts_or_is_silent(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, expected: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert ask_nvml() == expected
