"""How many workers a node of `dslrun` has."""

from __future__ import annotations

import pytest
from tests.support.machine import make_facts
from tests.support.outcome import assert_one_line, error_of

from dsl.devices.nproc import local_world_size
from dsl.errors import OptionError


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
    [("npu", {}, 16), ("auto", {}, 16), ("auto", {"ASCEND_RT_VISIBLE_DEVICES": "1,2"}, 2), ("gpu", {}, 4)],
)
def test_devices_of_another_accelerator(text: str, environ: dict[str, str], count: int) -> None:
    host = make_facts(cuda=4, other_name="npu", other_count=lambda *_: 16)
    assert local_world_size(text, environ, host) == count


def test_hidden_devices_leave_room_for_cuda() -> None:
    host = make_facts(cuda=4, other_name="npu", other_count=lambda *_: 16)
    assert local_world_size("auto", {"ASCEND_RT_VISIBLE_DEVICES": ""}, host) == 4


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
    assert message is not None
    assert message.startswith("--nproc-per-node ")
    assert said in message
    assert_one_line(message)
