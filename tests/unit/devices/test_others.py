"""Accelerators by the files of their drivers, and by their torch plug-ins where the files do not tell."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.support.command import ran
from tests.support.outcome import assert_one_line

from dsl.devices import ACCELERATORS
from dsl.devices.offered import OTHER_FILES, DeviceFacts
from dsl.devices.others import (
    COUNTINGS,
    ask_plug_in,
    count_accelerator,
    count_amd,
    count_gaudi,
    find_accelerator,
    read_devices,
)
from dsl.errors import AcceleratorError

FILES = {
    "npu": ["dev/davinci0", "dev/davinci7", "dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"],
    "mlu": ["dev/cambricon_dev0", "dev/cambricon_dev1", "dev/cambricon_ctl", "dev/cambricon_ipcm0"],
    "klxpu": ["dev/xpu0", "dev/xpu1", "dev/xpuctrl"],
    "sdaa": ["dev/tcaicard0", "dev/tcaicard1"],
    "supa": ["dev/biren/card_0", "dev/biren/card_1"],
    "hpu": [
        *("dev/accel/accel0", "dev/accel/accel1", "dev/accel/accel_controlD0"),
        *(f"sys/class/accel/accel{number}/device/device_type=GAUDI2" for number in range(3)),
    ],
    "xpu": [
        *("dev/dri/renderD128", "dev/dri/renderD129", "dev/dri/card0"),
        *(f"sys/class/drm/renderD{number}/device/vendor=0x8086" for number in (128, 129)),
    ],
}


def lay(root: Path, files: Sequence[str]) -> str:
    """Make files, ``PATH=TEXT`` for one with a text."""
    for file in files:
        path, _, text = file.partition("=")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n", encoding="utf-8")
    return str(root)


def names(root: str) -> tuple[str, ...]:
    return tuple(one.name for one in read_devices("cuda", {}, root))


def test_all_accelerators_but_the_cpu_and_cuda_can_be_counted() -> None:
    assert set(COUNTINGS) == set(ACCELERATORS) - {"cuda", "cpu"}
    assert set(FILES) == set(COUNTINGS) - {"mps"}


@pytest.mark.parametrize("name", FILES)
def test_two_devices_of_each_accelerator_are_counted_by_their_files(name: str, tmp_path: Path) -> None:
    asked: list[Mapping[str, str]] = []

    def ask(_plug_in: str, _function: str, environ: Mapping[str, str]) -> int:
        asked.append(environ)
        return 8

    root = lay(tmp_path, FILES[name])
    variable = ACCELERATORS[name].visible_variable
    expected = 8 if COUNTINGS[name].asked_without else 2
    assert count_accelerator(name, {variable: "0", "A": "1"}, root, ask) == expected
    # What the plug-in sees must not be cut by the variable, or slots could not be counted.
    assert asked == ([{"A": "1"}] if COUNTINGS[name].asked_without else [])


@pytest.mark.parametrize("name", COUNTINGS)
def test_a_machine_without_a_device_asks_no_plug_in(name: str, tmp_path: Path) -> None:
    def ask(*_question: object) -> int:
        pytest.fail("a plug-in was asked")

    if name != "mps" or sys.platform != "darwin":
        assert count_accelerator(name, {}, str(tmp_path), ask) == 0


def test_other_accel_devices_are_no_gaudi(tmp_path: Path) -> None:
    root = lay(tmp_path, ["dev/accel/accel0", "sys/class/accel/accel0/device/vendor=0x8086"])
    assert count_gaudi(root) == 0
    lay(tmp_path, ["dev/accel/accel1", "sys/class/accel/accel1/device/vendor=0x1da3"])
    assert count_gaudi(root) == 1


def test_gaudi_devices_of_older_drivers(tmp_path: Path) -> None:
    assert count_gaudi(lay(tmp_path, ["dev/hl0", "dev/hl1", "dev/hl_controlD0"])) == 2


@pytest.mark.parametrize("value, count", [("1", 1), ("0,1", 2), ("0,1,2,3", 2), ("all", 2), ("", 2)])
def test_the_modules_of_a_gaudi_machine_that_the_user_chose(value: str, count: int, tmp_path: Path) -> None:
    root = lay(tmp_path, FILES["hpu"])
    assert count_accelerator("hpu", {"HABANA_VISIBLE_MODULES": value}, root) == count


def _intel(root: Path, number: int, address: str, files: Sequence[str] = ()) -> None:
    device = root / "sys/devices" / address
    lay(device, ["vendor=0x8086", *files])
    link = root / f"sys/class/drm/renderD{number}/device"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)
    lay(root, [f"dev/dri/renderD{number}"])


def test_intel_tiles_are_devices_unless_the_hierarchy_is_composite(tmp_path: Path) -> None:
    _intel(tmp_path, 128, "0000:3a:00.0", ["tile0/id", "tile1/id"])
    _intel(tmp_path, 129, "0000:9a:00.0", ["drm/card1/gt/gt0/id", "drm/card1/gt/gt1/id"])
    assert count_accelerator("xpu", {}, str(tmp_path)) == 4
    environ = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    assert count_accelerator("xpu", environ, str(tmp_path)) == 2


def test_an_integrated_gpu_counts_only_if_there_is_no_other(tmp_path: Path) -> None:
    _intel(tmp_path, 128, "0000:00:02.0")
    assert count_accelerator("xpu", {}, str(tmp_path)) == 1
    _intel(tmp_path, 129, "0000:03:00.0")
    _intel(tmp_path, 130, "0000:04:00.0")
    assert count_accelerator("xpu", {}, str(tmp_path)) == 2


def test_graphics_devices_of_others_and_those_not_given_to_us_are_no_xpu(tmp_path: Path) -> None:
    lay(tmp_path, ["dev/dri/renderD128", "sys/class/drm/renderD128/device/vendor=0x1a03"])
    lay(tmp_path, ["sys/class/drm/renderD129/device/vendor=0x8086"])
    assert count_accelerator("xpu", {}, str(tmp_path)) == 0


def _kfd(root: Path, *nodes: str) -> str:
    base = "sys/class/kfd/kfd/topology/nodes"
    lay(root, ["dev/kfd", f"{base}/0/properties=cpu_cores_count 64\nsimd_count 0\ndrm_render_minor 0"])
    for number, node in enumerate(nodes, 1):
        lay(root, [f"{base}/{number}/properties={node}"])
    return str(root)


def _gpu(render: int, serial: int) -> str:
    return f"cpu_cores_count 0\nsimd_count 440\ndrm_render_minor {render}\nunique_id {serial}"


def test_amd_devices_are_the_nodes_of_kfd_that_we_may_use(tmp_path: Path) -> None:
    root = _kfd(tmp_path, _gpu(128, 0xBEEF), _gpu(129, 0), _gpu(136, 0xF00), "")
    lay(tmp_path, ["dev/dri/renderD128", "dev/dri/renderD129"])
    assert names(root) == ("GPU-000000000000beef", "GPU-XX")


@pytest.mark.parametrize(
    "environ, count",
    [
        ({}, 3),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000002,0"}, 2),
        ({"HIP_VISIBLE_DEVICES": "2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "2"}, 3),
    ],
)
def test_amd_devices_are_cuda_devices(environ: dict[str, str], count: int, tmp_path: Path) -> None:
    root = _kfd(tmp_path, *[_gpu(128 + number, number + 1) for number in range(3)])
    lay(tmp_path, [f"dev/dri/renderD{128 + number}" for number in range(3)])
    assert count_amd(environ, root) == count
    assert DeviceFacts(root, environ).cuda_count == count


def test_nodes_of_kfd_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    root = _kfd(tmp_path, *[_gpu(0, number) for number in range(1, 12)])
    assert names(root)[-1] == "GPU-000000000000000b"


def test_without_kfd_there_is_no_amd_device(tmp_path: Path) -> None:
    root = _kfd(tmp_path, _gpu(0, 1))
    (tmp_path / "dev/kfd").unlink()
    assert names(root) == ()


def _packages(root: Path, *names: str) -> list[str]:
    folder = root / "site"
    for name in names:
        lay(folder, [f"{name}/__init__.py"])
    return ["/nonexistent", str(folder)]


@pytest.mark.parametrize("name", [name for name in FILES if name != "xpu"])
def test_an_accelerator_is_chosen_if_both_device_and_plug_in_are_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at a machine overlooks no device file."""
    path = _packages(tmp_path, COUNTINGS[name].plug_in.partition(".")[0])
    assert find_accelerator(str(tmp_path), path) is None
    root = lay(tmp_path, FILES[name])
    assert find_accelerator(root, path) == name
    assert find_accelerator(root, ["/nonexistent"]) is None
    assert any(file.startswith(OTHER_FILES) for file in os.listdir(tmp_path / "dev"))
    monkeypatch.setattr(sys, "path", path)
    assert DeviceFacts(root).other_name == name


def test_an_intel_gpu_is_chosen_if_torch_is_built_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, path = lay(tmp_path, FILES["xpu"]), _packages(tmp_path, "torch")
    monkeypatch.setattr(sys, "path", path)
    assert (find_accelerator(root, path), DeviceFacts(root).other_name) == (None, None)
    lay(tmp_path, ["site/torch/lib/libtorch_xpu.so"])
    assert (find_accelerator(root, path), DeviceFacts(root).other_name) == ("xpu", "xpu")


def test_among_several_the_order_is_deepspeeds(tmp_path: Path) -> None:
    plug_ins = [each.plug_in.partition(".")[0] for each in COUNTINGS.values() if each.plug_in]
    path = _packages(tmp_path, "torch/lib/libtorch_xpu.so", *plug_ins)
    found = []
    for name in reversed(COUNTINGS):
        lay(tmp_path, FILES.get(name, []))
        found.append(find_accelerator(str(tmp_path), path))
    assert found == ["klxpu", "supa", "mlu", "hpu", "hpu", "sdaa", "npu", "xpu"]


@pytest.mark.guarantee("G7")
def test_the_first_look_at_a_machine_without_devices_imports_nothing(tmp_path: Path) -> None:
    root = lay(tmp_path, ["dev/null", "dev/dri/card0", "dev/kvm", "dev/hwrng"])
    code = (
        "import sys; from dsl.devices.offered import *; before = set(sys.modules);"
        "facts = DeviceFacts(sys.argv[1]); print(facts.other_name, facts.cuda_count, set(sys.modules) - before)"
    )
    result = ran([sys.executable, "-I", "-c", code, root], check=True)
    assert result.stdout.strip() == "None 0 set()"


def _torch(root: Path, plug_in: str) -> dict[str, str]:
    """An environment in which torch is a stub and its plug-in this program."""
    lay(root, ["torch/__init__.py=import types, os\nsdaa = types.SimpleNamespace(device_count=None)"])
    (root / "torch_sdaa.py").write_text(plug_in, encoding="utf-8")
    return {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}


def test_a_plug_in_is_asked_in_a_child_process(tmp_path: Path) -> None:
    environ = _torch(tmp_path, "import torch\nprint('hello')\ntorch.sdaa.device_count = lambda: 3\n")
    assert ask_plug_in("torch_sdaa", "torch.sdaa.device_count", environ) == 3
    assert "torch_sdaa" not in sys.modules


def test_a_folder_that_is_named_torch_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = _torch(tmp_path / "site", "import torch\ntorch.sdaa.device_count = lambda: 3\n")
    lay(tmp_path, ["work/torch/__init__.py=raise SystemExit(9)"])
    monkeypatch.chdir(tmp_path / "work")
    assert ask_plug_in("torch_sdaa", "torch.sdaa.device_count", environ) == 3


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "plug_in, timeout_s, said",
    [
        ("raise RuntimeError('no driver')", 20, "RuntimeError: no driver"),
        ("import os; os._exit(5)", 20, "exit code 5"),
        ("import os; os.kill(os.getpid(), 9)", 20, "exit code -9"),
        ("import torch\ntorch.sdaa.device_count = lambda: -1", 20, "exit code 0"),
        ("import time; time.sleep(600)", 0.5, "no answer in 0.5 s"),
        ("import missing_library", 20, "No module named 'missing_library'"),
    ],
)
def test_a_plug_in_that_fails_is_one_line(plug_in: str, timeout_s: float, said: str, tmp_path: Path) -> None:
    environ = _torch(tmp_path, plug_in)
    with pytest.raises(AcceleratorError) as caught:
        ask_plug_in("torch_sdaa", "torch.sdaa.device_count", environ, timeout_s=timeout_s)
    message = str(caught.value)
    assert message.startswith("devices cannot be counted, asking torch_sdaa in a child process failed: ")
    assert said in message
    assert message.endswith("; give their number")
    assert_one_line(message)


@pytest.mark.guarantee("G1")
def test_what_a_plug_in_started_ends_with_it(tmp_path: Path) -> None:
    """Nothing of ours survives, here when it does not answer in time."""
    read, write = os.pipe()
    hold = f"import os, time; os.open('/proc/{os.getpid()}/fd/{write}', os.O_WRONLY); time.sleep(600)"
    program = (
        f"import subprocess, sys, time\nhold = {hold!r}\n"
        "subprocess.Popen([sys.executable, '-c', hold])\nexec(hold)\n"
    )
    environ = _torch(tmp_path, program)
    with pytest.raises(AcceleratorError, match="no answer"):
        ask_plug_in("torch_sdaa", "torch.sdaa.device_count", environ, timeout_s=1.5)
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b""  # it ends only when nobody holds the other end


def test_an_answer_does_not_wait_for_what_a_plug_in_leaves_behind(tmp_path: Path) -> None:
    program = (
        "import pathlib, subprocess, sys, torch\ntorch.sdaa.device_count = lambda: 2\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(25)'])\n"
        f"pathlib.Path({str(tmp_path / 'left')!r}).write_text(str(left.pid))\n"
    )
    environ = _torch(tmp_path, program)
    assert ask_plug_in("torch_sdaa", "torch.sdaa.device_count", environ, timeout_s=15) == 2
    left = int((tmp_path / "left").read_text(encoding="utf-8"))
    os.kill(left, signal.SIGKILL)  # fails if the answer came after its end


def test_an_interpreter_that_is_not_there_is_one_line() -> None:
    with pytest.raises(
        AcceleratorError, match=r"failed: /nonexistent: No such file or directory; give their"
    ):
        ask_plug_in("", "torch.xpu.device_count", {}, "/nonexistent")
