"""The devices of the NVIDIA driver, by recorded answers of NVML (see `record_nvml`)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.support.command import ran
from tests.support.outcome import assert_one_line
from tests.unit.devices.record_nvml import FOLDER, Recording, Replay, key, load

from dsl.devices.nvidia import (
    NOT_INSTALLED,
    Device,
    Gpu,
    GpuUse,
    MigInstance,
    Nvml,
    NvmlError,
    assign,
    quick_devices,
    read_devices,
    survey,
    visible_devices,
)
from dsl.machine.kernel import pci_address, read_numa_node

# recording: (devices, who named them, NUMA nodes, numbers of MIG instances, what the user is told)
ANSWERS: dict[str, tuple[int, str, list[int | None], list[int], str]] = {
    "none": (0, "", [], [], ""),
    "one_h200": (1, "nvml", [1], [0], ""),
    "one_h100": (1, "nvml", [0], [0], ""),
    "eight_a100": (8, "nvml", [3, 3, 1, 1, 7, 7, 5, 5], [0] * 8, ""),
    "mig_a100": (2, "nvml", [None, None], [4, 0], ""),
    "mig_h100": (1, "nvml", [0], [4], ""),
    "one_lost": (3, "nvml", [3, 3, 1], [0] * 3, "GPU 2 is left out: the GPU is lost, reset it"),
    "container_2_of_8": (2, "nvml", [1, 1], [0, 0], ""),
    "wsl": (1, "nvml", [None], [0], ""),
    "old_driver": (1, "nvml", [0], [0], ""),
    "mismatch": (2, "files", [3, 3], [0, 0], "module and library differ in version, restart the machine"),
    "no_library": (2, "files", [3, 3], [0, 0], "libnvidia-ml.so.1 cannot be loaded"),
    "no_pynvml": (2, "files", [3, 3], [0, 0], "not installed, install nvidia-ml-py; the driver's files"),
    "broken": (2, "files", [3, 3], [0, 0], "Unknown Error; the driver's files in /proc show 2"),
    "no_permission": (2, "files", [3, 3], [0, 0], "this user may not open the NVIDIA devices"),
    "not_loaded": (0, "files", [], [], "the NVIDIA kernel module is not loaded; none is counted"),
}


def test_every_recording_is_looked_at() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_devices_of_a_recorded_machine(name: str, tmp_path: Path) -> None:
    """Right counts, and one clear line on failure."""
    number, source, numa_nodes, instances, said = ANSWERS[name]
    driver = load(name, tmp_path)
    found = survey(str(tmp_path), lambda: driver)
    assert (len(found.devices), found.source) == (number, source)
    assert [device.numa_node for device in found.devices] == numa_nodes
    assert [len(device.mig) for device in found.devices] == instances
    assert len(found.problems) == bool(said)
    for problem in found.problems:
        assert said in problem
        assert_one_line(problem)


@pytest.mark.parametrize("name", ["eight_a100", "one_h200", "container_2_of_8", "old_driver"])
def test_the_drivers_files_know_the_same_devices_as_nvml(name: str, tmp_path: Path) -> None:
    driver = load(name, tmp_path)
    facts = [
        (one.address, one.uuid, one.model, one.numa_node)
        for one in survey(str(tmp_path), lambda: driver).devices
    ]
    assert [(one.address, one.uuid, one.model, one.numa_node) for one in read_devices(str(tmp_path))] == facts


@pytest.mark.parametrize(
    "name, asks", [("eight_a100", False), ("container_2_of_8", False), ("wsl", True), ("none", False)]
)
def test_the_driver_is_asked_only_where_its_files_disagree(name: str, *, asks: bool, tmp_path: Path) -> None:
    driver = load(name, tmp_path)
    asked = []

    def nvml() -> Replay:
        asked.append(1)
        return driver

    found = quick_devices(str(tmp_path), nvml)
    assert (len(found), bool(asked)) == (ANSWERS[name][0], asks)


def test_a_device_file_that_no_device_explains_makes_the_driver_answer(tmp_path: Path) -> None:
    driver = load("one_h200", tmp_path)
    (tmp_path / "dev/nvidia4").touch()
    assert quick_devices(str(tmp_path), lambda: driver) == survey(str(tmp_path), lambda: driver).devices
    assert quick_devices(str(tmp_path), lambda: driver)[0].memory_bytes


def test_what_is_free_is_known_of_each_device_that_says_it(tmp_path: Path) -> None:
    driver = load("eight_a100", tmp_path)
    unknown = {"error": [3, "Not Supported"]}
    driver.answers |= {f"free_bytes {at}": unknown if at == 2 else at * 1000 for at in range(8)}
    found = survey(str(tmp_path), lambda: driver).devices
    assert [one.free_bytes for one in found] == [None if at == 2 else at * 1000 for at in range(8)]


def test_a_device_has_all_its_facts(tmp_path: Path) -> None:
    driver = load("mig_a100", tmp_path)
    first, second = survey(str(tmp_path), lambda: driver).devices
    assert (first.index, first.address, first.model) == (0, "0000:07:00.0", "NVIDIA A100-SXM4-40GB")
    assert first.memory_bytes == 42_949_672_960
    assert second.uuid.startswith("GPU-8a440a48")
    assert [(one.profile, one.gpu_instance, one.compute_instance) for one in first.mig] == [
        ("3g.20gb", 2, 0),
        ("2g.10gb", 3, 0),
        ("1g.5gb", 9, 0),
        ("1g.5gb", 10, 0),
    ]
    assert {one.parent for one in first.mig} == {first.uuid}


def test_devices_are_in_the_order_of_their_addresses(tmp_path: Path) -> None:
    for minor, name in enumerate(("10000:01:00.0", "0000:dc:00.0", "2000:01:00.0", "0000:1a:00.0")):
        path = tmp_path / "proc/driver/nvidia/gpus" / name / "information"
        path.parent.mkdir(parents=True)
        path.write_text(f"Device Minor: \t {minor}\nBus Location: \t {name}\n", encoding="utf-8")
    addresses = [device.address for device in read_devices(str(tmp_path))]
    assert addresses == ["0000:1a:00.0", "0000:dc:00.0", "2000:01:00.0", "10000:01:00.0"]


def test_instances_by_the_drivers_files_have_the_old_names(tmp_path: Path) -> None:
    load("mig_h100", tmp_path)
    (device,) = read_devices(str(tmp_path))
    assert [one.uuid for one in device.mig] == [
        f"MIG-{device.uuid}/{end}" for end in ("1/0", "1/1", "2/0", "13/0")
    ]


def test_device_files_that_are_not_made_yet_hide_no_device(tmp_path: Path) -> None:
    load("mismatch", tmp_path)
    for number in (0, 1):
        (tmp_path / f"dev/nvidia{number}").unlink()
    assert len(read_devices(str(tmp_path))) == 2


def test_devices_that_the_driver_was_told_to_leave_alone_do_not_count(tmp_path: Path) -> None:
    load("mismatch", tmp_path)
    path = tmp_path / "proc/driver/nvidia/gpus/0000:07:00.0/information"
    path.write_text(
        path.read_text(encoding="utf-8").replace("Excluded:\t No", "Excluded:\t Yes"), encoding="utf-8"
    )
    (device,) = read_devices(str(tmp_path))
    assert (device.address, device.index) == ("0000:0f:00.0", 0)


def test_a_uuid_that_the_driver_has_not_read_is_unknown(tmp_path: Path) -> None:
    load("mismatch", tmp_path)
    path = tmp_path / "proc/driver/nvidia/gpus/0000:07:00.0/information"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace(text.partition("UUID: \t ")[2][:40], "GPU-????????-????-????-????-????????????")
    )
    assert read_devices(str(tmp_path))[0].uuid == ""


@pytest.mark.parametrize(
    "text, address",
    [
        ("00000000:07:00.0", "0000:07:00.0"),
        ("00010000:DC:00.0", "10000:dc:00.0"),
        ("0009:01:00.0", "0009:01:00.0"),
        ("", ""),
    ],
)
def test_pci_addresses_are_spelled_as_in_sysfs(text: str, address: str) -> None:
    assert pci_address(text) == address


def test_an_unknown_numa_node_is_none_rather_than_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:07:00.0"
    folder.mkdir(parents=True)
    for text, node in (("-1\n", None), ("0\n", 0), ("x", None)):
        (folder / "numa_node").write_text(text, encoding="utf-8")
        assert read_numa_node("0000:07:00.0", str(tmp_path)) == node
    assert read_numa_node("0000:08:00.0", str(tmp_path)) is None


INSTANCES = (MigInstance("MIG-aa1", "GPU-b1", 1, 0), MigInstance("MIG-aa2", "GPU-b1", 2, 0))
GPUS = (Device("0", "GPU-a1"), Device("1", "GPU-b1", mig=INSTANCES), Device("2", "GPU-b2"))


@pytest.mark.parametrize(
    "value, alone, addresses",
    [
        (None, False, "012"),
        ("2,0", False, "20"),
        ("GPU-b2,GPU-a", False, "20"),
        ("GPU-b,GPU-a", False, ""),
        ("MIG-aa2,MIG-aa1", False, "1"),
        ("MIG-aa2,MIG-aa1", True, "11"),
        ("MIG-GPU-b1/2/0", False, "1"),
        ("MIG-GPU-b1/7/0", False, ""),
        ("MIG-aa", False, ""),
        ("", False, ""),
    ],
)
def test_the_gpu_behind_each_visible_device(value: str | None, *, alone: bool, addresses: str) -> None:
    assert "".join([one.address for one in visible_devices(value, GPUS, alone=alone)]) == addresses


def test_without_a_driver_pynvml_is_not_imported(tmp_path: Path) -> None:
    code = "import sys, dsl.devices.nvidia as n; print(n.survey(sys.argv[1]), 'pynvml' in sys.modules)"
    result = ran([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert result.stdout.strip() == "Survey(devices=(), source='', problems=()) False"


class MismatchError(Exception):
    """What pynvml raises, instead of an error of the driver, where the driver is older than itself."""


def older() -> None:
    raise MismatchError


def _pynvml(answers: dict[str, Any]) -> ModuleType:
    """A pynvml whose functions return, or raise, what is given."""
    fake = ModuleType("pynvml")

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"code {value}")
            self.value = value

    def function(name: str) -> Any:
        def call(*args: Any) -> Any:
            answer = answers[name](*args) if callable(answers[name]) else answers[name]
            if isinstance(answer, int) and answer < 0:
                raise NVMLError(-answer)
            return answer

        return call

    functions = {name: function(name) for name in answers}
    vars(fake).update(functions, NVMLError=NVMLError, NVMLLibraryMismatchError=MismatchError)
    return fake


WORKING: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda handle, index: (
        f"{handle} part {index}" if index == 1 else -6
    ),
    "nvmlDeviceGetUUID": lambda handle: b"MIG-7" if "part" in handle else b"GPU-1",
    "nvmlDeviceGetName": lambda handle: "NVIDIA H100 MIG 1g.10gb" if "part" in handle else "NVIDIA H100",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:8D:00.0"),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80, free=30),
    "nvmlDeviceGetMemoryAffinity": lambda _handle, size, scope: [1 << 5] if (size, scope) == (1, 0) else -2,
    "nvmlDeviceGetMigMode": [1, 1],
    "nvmlDeviceGetMaxMigDeviceCount": 2,
    "nvmlDeviceGetGpuInstanceId": 9,
    "nvmlDeviceGetComputeInstanceId": 0,
}


def test_pynvml_is_asked_through_one_seam_and_a_recording_says_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _pynvml(WORKING))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    instance = MigInstance("MIG-7", "GPU-1", 9, 0, "1g.10gb")
    device = Device("0000:8d:00.0", "GPU-1", "NVIDIA H100", 5, 0, 80, (instance,), 30)
    recording = Recording()
    assert survey(str(tmp_path), lambda: recording).devices == (device,)
    assert recording.answers[key("mig", "0", 0)] == {"error": [6, "code 6"]}
    assert survey(str(tmp_path), lambda: Replay(recording.answers)).devices == (device,)
    assert len(survey(str(tmp_path)).devices) == 1


@pytest.mark.parametrize(
    "answers, code",
    [
        ({**WORKING, "nvmlInit": -18}, 18),
        ({"nvmlInit": None}, 13),
        ({**WORKING, "nvmlDeviceGetCount": older}, 13),
        ({**WORKING, "nvmlDeviceGetCount": -999}, 999),
        (None, 0),
    ],
    ids=["driver", "old pynvml", "old driver", "no answer", "no pynvml"],
)
def test_errors_of_pynvml_are_ours(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any] | None, code: int
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", answers and _pynvml(answers))
    with pytest.raises(NvmlError) as caught, Nvml() as nvml:
        nvml.ask("count")
    assert caught.value.code == code
    assert survey("/").source != "nvml"


GIB = 1 << 30
QUIET = [Gpu(f"GPU-{index}", 10 * index, index * GIB, ()) for index in range(4)]


def busy(*processes: tuple[tuple[int, int | None], ...]) -> list[Gpu]:
    return [Gpu(f"GPU-{at}", 10 * at, 9 * GIB, found) for at, found in enumerate(processes)]


@pytest.mark.parametrize(
    "gpus, places, expected",
    [
        (busy(((11, GIB),), ((10, 2 * GIB),)), [(0, None), (1, None)], [(10, 2 * GIB), (0, GIB)]),
        (busy(((10, None),), ()), [(0, None), (1, None)], [(0, 9 * GIB), (-1, 0)]),
        (busy(((10, GIB),), ((10, GIB),)), [(0, None), (1, None)], [(10, 2 * GIB), (-1, 0)]),
        (QUIET, [(0, None), (1, None)], [(0, 0), (10, GIB)]),
        (QUIET, [(0, "3"), (1, "2")], [(30, 3 * GIB), (20, 2 * GIB)]),
        (QUIET, [(0, "2,3"), (1, "2,3")], [(20, 2 * GIB), (30, 3 * GIB)]),
        (QUIET, [(0, "GPU-3"), (1, "GPU-9")], [(30, 3 * GIB), (-1, 0)]),
        (QUIET, [(0, ""), (9, None)], [(-1, 0), (-1, 0)]),
        (QUIET, [(0, "7"), (5, "0,1")], [(-1, 0), (-1, 0)]),
    ],
    ids=["by pid", "size unknown", "two GPUs", "by place", "one visible", "list", "uuid", "none", "beyond"],
)
def test_a_worker_has_the_gpu_that_it_uses(
    gpus: list[Gpu], places: list[tuple[int, str | None]], expected: list[tuple[int, int]]
) -> None:
    assert assign(gpus, [10, 11], places) == expected


def test_a_worker_without_a_process_uses_no_gpu() -> None:
    assert assign(QUIET, [0], [(1, None)]) == [(-1, 0)]


class Driver:
    """Two GPUs. One does not answer."""

    asked = 0

    def ask(self, question: str, device: str = "", number: int = 0) -> Any:
        self.asked += 1
        if question == "count":
            return 2
        if question == "device" and number == 1:
            raise NvmlError(15, "lost")
        answers = {"device": "0", "processes": [(10, GIB)], "used_bytes": 2 * GIB, "uuid": "GPU-a"}
        if question not in answers:
            raise NvmlError(3, "not supported")
        return answers[question]


def test_what_the_driver_does_not_say_is_unknown() -> None:
    assert GpuUse(Driver).of([10, 11], [(0, None), (1, None)]) == [(-1, GIB), (-1, 0)]


def test_a_driver_that_cannot_be_opened_is_asked_once() -> None:
    opened = []

    def fail() -> Driver:
        opened.append(1)
        raise NvmlError(NOT_INSTALLED, "pynvml is not installed")

    use = GpuUse(fail)
    assert use.of([10], [(0, None)]) == use.of([10], [(0, None)]) == [(-1, 0)]
    assert len(opened) == 1
