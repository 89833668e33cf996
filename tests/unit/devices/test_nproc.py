"""How many workers a node of `dslrun` has, its devices, and which worker has which."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.machine import UNASKED, make_facts
from tests.support.outcome import assert_one_line, error_of
from tests.unit.devices.record_nvml import load

from dsl.devices.counted import count_visible_devices, local_world_size, node_accelerator, own_devices
from dsl.devices.nvidia import Device, mig_names, survey
from dsl.devices.offered import DeviceFacts
from dsl.devices.others import LocatedDevice
from dsl.errors import AcceleratorError, OptionError
from dsl.model.job import WorkerDevice


@pytest.mark.parametrize(
    "text, environ, other, name",
    [
        ("4", {}, None, "cuda"),
        ("4", {}, "npu", "npu"),
        ("auto", {}, "npu", "npu"),
        ("auto", {"ASCEND_RT_VISIBLE_DEVICES": ""}, "npu", "cuda"),
        ("4", {"ZE_AFFINITY_MASK": ""}, "xpu", "xpu"),
        ("gpu", {}, "npu", "cuda"),
        ("cuda", {}, "npu", "cuda"),
        (" cpu ", {}, "npu", "cpu"),
        ("mlu", {}, "npu", "mlu"),
    ],
)
def test_the_accelerator_is_the_one_that_is_named_or_the_one_before_cuda(
    text: str, environ: dict[str, str], other: str | None, name: str
) -> None:
    assert node_accelerator(text, environ, make_facts(other_name=other).devices) == name


@pytest.mark.parametrize(
    "environ, devices",
    [
        ({}, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "7, GPU-1,3"}, ("7", "GPU-1")),
        ({"CUDA_VISIBLE_DEVICES": "7,8", "HIP_VISIBLE_DEVICES": "3,4"}, ("3", "4")),
        ({"CUDA_VISIBLE_DEVICES": "7,8", "HIP_VISIBLE_DEVICES": ""}, ("7", "8")),
    ],
)
@pytest.mark.parametrize("other", [None, "klxpu", "mps"])
def test_each_worker_has_a_device_of_those_that_can_be_seen(
    environ: dict[str, str], devices: tuple[str, ...], other: str | None
) -> None:
    names = ["CUDA_VISIBLE_DEVICES", *(["HIP_VISIBLE_DEVICES"] if environ.get("HIP_VISIBLE_DEVICES") else [])]
    host = make_facts(other_name=other)
    own = own_devices("2", environ, 2, host.devices)
    assert own == tuple(dict.fromkeys(names, device) for device in devices)


@pytest.mark.parametrize("variable, value", [("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "3")])
def test_too_few_devices_are_refused_by_the_name_of_their_variable(variable: str, value: str) -> None:
    message = error_of(OptionError, own_devices, "2", {variable: value}, 2, make_facts().devices)
    assert message == f"--virtual-local-rank: 2 workers need as many devices, but {variable}={value} names 1"


def _other(name: str, count: int) -> DeviceFacts:
    return make_facts(cuda=4, other_name=name, other_count=lambda *_: count).devices


@pytest.mark.parametrize(
    "name, variable, value, devices",
    [
        ("npu", "ASCEND_RT_VISIBLE_DEVICES", None, ("0", "1")),
        ("npu", "ASCEND_RT_VISIBLE_DEVICES", "2,5,7", ("2", "5")),
        ("mlu", "MLU_VISIBLE_DEVICES", "3,1", ("3", "1")),
        ("sdaa", "SDAA_VISIBLE_DEVICES", "06,2", ("6", "2")),
        ("supa", "SUPA_VISIBLE_DEVICES", None, ("0", "1")),
        ("xpu", "ZE_AFFINITY_MASK", None, ("0", "1")),
        ("xpu", "ZE_AFFINITY_MASK", "", ("0", "1")),
        ("xpu", "ZE_AFFINITY_MASK", "6,9,4", ("4", "6")),
        ("xpu", "ZE_AFFINITY_MASK", "1.1,0.0,1.0", ("0.0", "1.0,1.1")),
        ("xpu", "ZE_AFFINITY_MASK", "3.1,3.0", ("3.0", "3.1")),
    ],
)
def test_devices_of_other_accelerators_are_shown_by_their_own_variable(
    name: str, variable: str, value: str | None, devices: tuple[str, ...]
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"} if value is None else {variable: value}
    own = own_devices("2", environ, 2, _other(name, 8))
    assert own == tuple({variable: device} for device in devices)


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "name, mask, said",
    [
        ("npu", "ASCEND_RT_VISIBLE_DEVICES=0,4", " shows 1"),
        ("npu", "ASCEND_RT_VISIBLE_DEVICES=1, 2", " shows 1: ' 2' is no device, give numbers alone"),
        ("mlu", "MLU_VISIBLE_DEVICES=0-1", " shows 1: '0-1' is a range, which MLU_VISIBLE_DEVICES does not"),
        ("sdaa", "SDAA_VISIBLE_DEVICES=1,1", " shows 0"),
        ("xpu", "ZE_AFFINITY_MASK=1.0", " shows 1"),
    ],
)
def test_too_few_devices_of_another_accelerator_are_one_line(name: str, mask: str, said: str) -> None:
    variable, _, value = mask.partition("=")
    message = error_of(OptionError, own_devices, "2", {variable: value}, 2, _other(name, 4))
    assert message.startswith(f"--virtual-local-rank: 2 workers need as many devices, but {mask}{said}")
    assert_one_line(message)


def test_a_machine_with_too_few_devices_is_told_in_one_line() -> None:
    message = error_of(OptionError, own_devices, "2", {}, 2, _other("npu", 1))
    assert message == "--virtual-local-rank: 2 workers need as many devices, but this machine has 1 of npu"


def test_parts_of_intel_devices_are_none_in_the_flat_hierarchy() -> None:
    environ = {"ZE_AFFINITY_MASK": "0.0,0.1", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}
    message = error_of(OptionError, own_devices, "2", environ, 2, _other("xpu", 4))
    assert message.endswith("but ZE_AFFINITY_MASK=0.0,0.1 shows 0")


def test_a_plug_in_that_does_not_answer_leaves_the_number_to_the_user() -> None:
    def refuse(*_question: object) -> int:
        raise AcceleratorError("no answer")

    host = make_facts(other_name="sdaa", other_count=refuse).devices
    environ = {"SDAA_VISIBLE_DEVICES": "5,40"}
    assert own_devices("2", environ, 2, host) == tuple({"SDAA_VISIBLE_DEVICES": one} for one in ("5", "40"))
    assert len(own_devices("2", {}, 3, host)) == 3


@pytest.mark.guarantee("G8")
def test_gaudi_devices_are_refused_because_all_workers_must_have_the_same_modules() -> None:
    environ = {"HABANA_VISIBLE_MODULES": "0,1"}
    message = error_of(OptionError, own_devices, "2", environ, 2, _other("hpu", 8))
    assert message.startswith("--virtual-local-rank: hpu devices cannot be shown to one worker each")
    assert message.endswith("leave the option out")
    assert_one_line(message)
    assert own_devices("cpu", {}, 1, _other("hpu", 8)) == ({"CUDA_VISIBLE_DEVICES": "0"},)


@pytest.mark.parametrize(
    "name, environ, count",
    [
        ("gpu", {}, 4),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "3,1"}, 2),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1,1"}, 0),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1),
        ("npu", {}, 8),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1,2,9"}, 2),
        ("npu", {"CUDA_VISIBLE_DEVICES": "1"}, 8),
        ("xpu", {"ZE_AFFINITY_MASK": "0.0,0.1,3"}, 2),
        ("xpu", {"ZE_AFFINITY_MASK": ""}, 8),
        ("hpu", {"CUDA_VISIBLE_DEVICES": ""}, 8),
        ("mlu", {"MLU_VISIBLE_DEVICES": "-1"}, 0),
        ("klxpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
    ],
)
def test_devices_that_a_process_sees(name: str, environ: dict[str, str], count: int) -> None:
    assert count_visible_devices(name, environ, _other("npu", 8)) == count


def test_instances_count_one_by_one_for_workers_that_see_one_each() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    assert count_visible_devices("gpu", environ, _other("npu", 8), alone=True) == 2


@pytest.mark.parametrize("name", ["cpu", "tpu"])
def test_what_is_no_device_cannot_be_counted(name: str) -> None:
    with pytest.raises(KeyError):
        count_visible_devices(name, {}, _other("npu", 8))


@pytest.mark.parametrize(
    "environ, count",
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1,4"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a1,GPU-a"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b1,GPU-a1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a1,GPU-c,GPU-b1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_cuda_devices_that_a_process_sees(environ: dict[str, str], count: int) -> None:
    gpus = [Device("", name) for name in ("GPU-a1", "GPU-a2", "GPU-b1", "GPU-b2")]
    assert count_visible_devices("cuda", environ, make_facts(cuda=4, gpus=gpus).devices) == count


def test_names_are_only_asked_for_where_names_are_given() -> None:
    devices = make_facts(cuda=4, gpus=UNASKED).devices
    assert count_visible_devices("cuda", {"CUDA_VISIBLE_DEVICES": "0"}, devices) == 1
    assert count_visible_devices("cuda", {}, devices) == 4


def test_a_device_without_a_known_name_leaves_the_names_unchecked() -> None:
    """As where the driver has not looked at it yet."""
    devices = make_facts(cuda=2, gpus=[Device("", "GPU-a1"), Device("", "")]).devices
    assert count_visible_devices("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-b1,GPU-a1"}, devices) == 2


@pytest.mark.parametrize(
    "value, counts",
    [
        ("{0},{1}", (1, 2)),
        ("MIG-0,{0}", (0, 0)),
        ("{1},MIG-0,{0}", (1, 1)),
        ("{2},{0}", (1, 2)),
        ("{0},{0}", (0, 0)),
    ],
)
@pytest.mark.parametrize("machine", ["mig_a100", "mig_h100"])
def test_instances_that_are_not_there_end_the_list(
    tmp_path: Path, machine: str, value: str, counts: tuple[int, int]
) -> None:
    driver = load(machine, tmp_path)
    found = survey(str(tmp_path), lambda: driver)
    instances = [one for gpu in found.devices for one in gpu.mig]
    names = [instances[0].uuid, instances[1].uuid, mig_names(instances[2])[1]]
    devices = make_facts(cuda=len(found.devices), gpus=found.devices, survey=found).devices
    environ = {"CUDA_VISIBLE_DEVICES": value.format(*names)}
    seen = [count_visible_devices("cuda", environ, devices, alone=alone) for alone in (False, True)]
    assert tuple(seen) == counts


@pytest.mark.parametrize(
    "environ, count",
    [
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000000000000b1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000000000000c1,GPU-00000000000000b1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000000000000a1", "ROCR_VISIBLE_DEVICES": "1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000000000000b1", "ROCR_VISIBLE_DEVICES": "1"}, 1),
    ],
)
def test_hip_ends_its_list_at_a_name_that_is_not_there(environ: dict[str, str], count: int) -> None:
    names = ("GPU-00000000000000a1", "GPU-00000000000000b1")
    located = [LocatedDevice(WorkerDevice("AMD", "", None), name) for name in names]
    left = 1 if "ROCR_VISIBLE_DEVICES" in environ else 2
    devices = make_facts(cuda_count=left, gpus=(), located=lambda *_: located).devices
    assert count_visible_devices("cuda", environ, devices) == count


@pytest.mark.parametrize(
    "text, environ, cuda, count",
    [
        ("1", {}, 0, 1),
        (" 3 ", {}, 0, 3),
        ("65536", {}, 0, 65536),
        ("cpu", {}, 4, 8),
        ("gpu", {}, 4, 4),
        ("cuda", {}, 4, 4),
        ("auto", {}, 4, 4),
        ("auto", {}, 0, 8),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "3,1"}, 4, 2),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, 4, 8),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "GPU-00000003,GPU-00000001"}, 4, 2),
    ],
)
def test_the_number_of_workers(text: str, environ: dict[str, str], cuda: int, count: int) -> None:
    assert local_world_size(text, environ, make_facts(cuda=cuda)) == count


@pytest.mark.parametrize("text", ["gpu", "auto"])
def test_a_process_sees_one_mig_instance_unless_each_worker_has_its_own(text: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-aaaa,MIG-bbbb"}
    host = make_facts(cuda=1)
    assert [local_world_size(text, environ, host, alone=alone) for alone in (False, True)] == [1, 2]


@pytest.mark.parametrize(
    "text, environ, count",
    [
        *(("npu", {}, 16), ("auto", {}, 16), ("gpu", {}, 4)),
        ("auto", {"ASCEND_RT_VISIBLE_DEVICES": "1,2"}, 2),
        ("auto", {"ASCEND_RT_VISIBLE_DEVICES": ""}, 4),
    ],
)
def test_devices_of_another_accelerator_go_before_cuda_unless_all_are_hidden(
    text: str, environ: dict[str, str], count: int
) -> None:
    host = make_facts(cuda=4, other_name="npu", other_count=lambda *_: 16)
    assert local_world_size(text, environ, host) == count


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "text, said",
    [
        ("0", "it must be 1 to 65536"),
        ("-1", "it must be 1 to 65536"),
        ("65537", "it must be 1 to 65536"),
        ("9" * 5000, "it must be 1 to 65536"),
        ("", "expected a number, auto, cpu or gpu"),
        ("1.5", "expected a number, auto, cpu or gpu"),
        ("gpus", "expected a number, auto, cpu or gpu"),
        ("٣", "expected a number, auto, cpu or gpu"),
        ("gpu", "no CUDA device can be seen on this machine, give a number or cpu"),
        ("xpu", "no xpu device can be seen on this machine, give a number or cpu"),
    ],
)
def test_a_number_of_workers_that_is_none_is_refused_in_one_line(text: str, said: str) -> None:
    message = error_of(OptionError, local_world_size, text, {}, make_facts())
    assert message.startswith("--nproc-per-node ")
    assert said in message
    assert_one_line(message)
