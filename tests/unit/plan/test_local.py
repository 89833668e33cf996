"""How many workers a node of `dslrun` has, and the device of each."""

from __future__ import annotations

import pytest
from tests.unit.machine import make_host
from tests.unit.outcome import assert_one_line, error_of

from dsl.errors import OptionError
from dsl.model import TorchRequest
from dsl.plan.local import local_world_size, own_devices


@pytest.mark.parametrize(
    "text, environ, cuda, count",
    [
        ("1", {}, 0, 1),
        (" 3 ", {}, 0, 3),
        ("4194304", {}, 0, 4194304),
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
    assert local_world_size(text, environ, make_host(cuda=cuda)) == count


@pytest.mark.parametrize(
    "text, environ, count",
    [("npu", {}, 16), ("auto", {}, 16), ("auto", {"ASCEND_RT_VISIBLE_DEVICES": "1,2"}, 2), ("gpu", {}, 4)],
)
def test_devices_of_another_accelerator(text: str, environ: dict[str, str], count: int) -> None:
    host = make_host(cuda=4, find_other=lambda: "npu", count_other=lambda *_: 16)
    assert local_world_size(text, environ, host) == count


@pytest.mark.parametrize(
    "text, said",
    [
        ("0", "it must be 1 to 4194304"),
        ("-1", "it must be 1 to 4194304"),
        ("4194305", "it must be 1 to 4194304"),
        ("9" * 5000, "it must be 1 to 4194304"),
        ("", "expected a number, auto, cpu or gpu"),
        ("1.5", "expected a number, auto, cpu or gpu"),
        ("gpus", "expected a number, auto, cpu or gpu"),
        ("٣", "expected a number, auto, cpu or gpu"),
        ("gpu", "no CUDA device can be seen on this machine, give a number or cpu"),
        ("xpu", "no xpu device can be seen on this machine, give a number or cpu"),
    ],
)
def test_a_number_of_workers_that_is_none_is_refused_in_one_line(text: str, said: str) -> None:
    """G8."""
    message = error_of(OptionError, local_world_size, text, {}, make_host())
    assert message is not None
    assert message.startswith("--nproc-per-node ")
    assert said in message
    assert_one_line(message)


@pytest.mark.parametrize(
    "environ, devices",
    [
        ({}, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "7, GPU-1,3"}, ("7", "GPU-1")),
        ({"CUDA_VISIBLE_DEVICES": "7,8", "HIP_VISIBLE_DEVICES": "3,4"}, ("3", "4")),
        ({"CUDA_VISIBLE_DEVICES": "7,8", "HIP_VISIBLE_DEVICES": ""}, ("7", "8")),
    ],
)
def test_each_worker_has_a_device_of_those_that_can_be_seen(
    environ: dict[str, str], devices: tuple[str, ...]
) -> None:
    request = TorchRequest("t.py", virtual_local_rank=True)
    assert own_devices(request, environ, 2) == devices
    assert own_devices(TorchRequest("t.py"), environ, 2) == ()


@pytest.mark.parametrize("variable, value", [("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "3")])
def test_too_few_devices_are_refused_by_the_name_of_their_variable(variable: str, value: str) -> None:
    request = TorchRequest("t.py", virtual_local_rank=True)
    message = error_of(OptionError, own_devices, request, {variable: value}, 2)
    assert message == f"--virtual-local-rank: 2 workers need as many devices, but {variable}={value} names 1"
