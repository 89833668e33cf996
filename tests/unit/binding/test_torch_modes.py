"""``--numa-binding`` beyond torch's answers: devices by name, machines without them, memory, and what is said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.machine import make_facts, numa_table
from tests.support.outcome import assert_one_line

from dsl._record import replace
from dsl.binding import NodeGroup, Placement, place
from dsl.binding.rules import MODES
from dsl.devices.nvidia import Device, MigInstance, Survey
from dsl.errors import PlacementError
from dsl.facts import Facts
from dsl.machine.kernel import NumaNode, Topology
from dsl.model.request import PlacementRequest
from dsl.words import format_ranges

# Two sockets of two NUMA nodes of four cores, a cache for two of them.
NODES = numa_table(range(4), range(4, 8), range(8, 12), range(12, 16))
TOPOLOGY = Topology(NODES, tuple((cpu,) for cpu in range(16)))
PACKAGES = (range(8), range(8, 16))
CACHES = tuple((cpu, cpu + 1) for cpu in range(0, 16, 2))


def _host(
    homes: Sequence[int | None] = (),
    topology: Topology = TOPOLOGY,
    allowed: Iterable[int] = range(16),
    **facts: Any,
) -> Facts:
    gpus = [Device(f"0000:{one:02x}:00.0", f"GPU-{one}abc", "H200", home) for one, home in enumerate(homes)]
    own = topology is TOPOLOGY
    return make_facts(
        allowed=allowed,
        topology=topology,
        packages=PACKAGES if own else (),
        caches=CACHES if own else (),
        **{"gpus": gpus, **facts},
    )


def _plan(mode: str, count: int, host: Facts, **environ: str) -> Placement:
    return place(PlacementRequest(numa_binding=mode), NodeGroup(count, environ), host)


def _cpus(mode: str, count: int, host: Facts, **environ: str) -> list[str]:
    return [format_ranges(one.cpus) for one in _plan(mode, count, host, **environ).bindings]


def _refusal(mode: str, count: int, host: Facts, **environ: str) -> str:
    with pytest.raises(PlacementError) as caught:
        _plan(mode, count, host, **environ)
    assert_one_line(str(caught.value))
    assert "--numa-binding" in str(caught.value)
    return str(caught.value)


FOUR = (3, 2, 1, 0)


@pytest.mark.parametrize(
    "visible, expected",
    [
        ("2,0", ["4-7", "12-15"]),
        ("GPU-1abc,GPU-3abc", ["8-11", "0-3"]),
        ("GPU-1,GPU-3a", ["8-11", "0-3"]),
        ("GPU-1,gpu-3A", ["8-11"]),
        ("MIG-GPU-2abc/1/0,MIG-GPU-2abc/2/0", ["4-7", "4-7"]),
        ("MIG-6f1c,MIG-77aa", ["0-3", "12-15"]),
        ("1,9,0", ["8-11"]),
        ("1,-1,0", ["8-11"]),
        ("3,GPU-0", ["0-3"]),
        ("3rd,02", ["0-3", "4-7"]),
    ],
)
def test_a_device_is_the_one_that_its_visible_name_means(visible: str, expected: list[str]) -> None:
    instances = {0: ("MIG-77aa",), 2: ("MIG-older1", "MIG-older2"), 3: ("MIG-6f1c",)}
    devices = [
        replace(
            gpu, mig=tuple(MigInstance(one, gpu.uuid, n, 0) for n, one in enumerate(instances.get(at, ()), 1))
        )
        for at, gpu in enumerate(_host(FOUR).devices.gpus)
    ]
    host = _host(FOUR, survey=Survey(tuple(devices)))
    assert _cpus("node", len(expected), host, CUDA_VISIBLE_DEVICES=visible) == expected


@pytest.mark.parametrize(
    "visible",
    ["9", "GPU-", "GPU-7", "MIG-gone", "MIG-GPU-9/1/0", "cuda:0", "9" * 5000, "0,0", "GPU-1,GPU-1a"],
)
def test_names_of_no_device_or_of_several_show_none(visible: str) -> None:
    """CUDA would show none either; the workers would fail later, with less said."""
    text = _refusal("node", 1, _host(FOUR), CUDA_VISIBLE_DEVICES=visible)
    assert text.startswith("--numa-binding: 0 devices can be seen (CUDA_VISIBLE_DEVICES=")


def test_visible_devices_share_a_numa_node_and_hidden_ones_do_not() -> None:
    host = _host((0, 0, 0, 0))
    assert _cpus("exclusive", 1, host, CUDA_VISIBLE_DEVICES="3,1") == ["0-1"]
    assert _cpus("exclusive", 1, host, CUDA_VISIBLE_DEVICES="2") == ["0-3"]
    assert _cpus("exclusive", 1, host) == ["0"]


def test_more_workers_than_devices_are_refused() -> None:
    assert _refusal("node", 3, _host((0, 1))) == (
        "--numa-binding: 2 devices can be seen, but each of 3 workers needs one, start fewer or leave it out"
    )


def test_a_device_whose_cpus_may_not_be_used_is_refused_with_its_address() -> None:
    host = _host((0, 2), allowed=range(4))
    assert _cpus("node", 1, host) == ["0-3"]
    assert _refusal("node", 2, host) == (
        "--numa-binding node: device 0000:01:00.0 is at NUMA node 2, none of whose CPUs may be used (only 0-3), "
        "widen the affinity mask or leave it out"
    )


def test_fewer_cores_than_devices_are_refused() -> None:
    assert _refusal("exclusive", 1, _host((1,) * 5)) == (
        "--numa-binding exclusive: device 0000:00:00.0 is one of 5 at NUMA node 1, which has 4 cores that may be "
        "used, choose another mode"
    )


@pytest.mark.parametrize(
    "mode, count, expected",
    [
        ("node", 1, ["0-3"]),
        ("node", 2, ["0-3", "8-11"]),
        ("node", 4, ["0-3", "4-7", "8-11", "12-15"]),
        ("node", 6, ["0-3", "0-3", "4-7", "8-11", "8-11", "12-15"]),
        ("socket", 4, ["0-7", "0-7", "8-15", "8-15"]),
        ("exclusive", 5, ["0-1", "2-3", "4-7", "8-11", "12-15"]),
        ("exclusive", 16, [str(cpu) for cpu in range(16)]),
        ("core-complex", 8, ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12-13", "14-15"]),
    ],
)
def test_without_a_device_workers_are_spread_over_the_numa_nodes(
    mode: str, count: int, expected: list[str]
) -> None:
    assert _cpus(mode, count, _host()) == expected
    assert _cpus(mode, count, _host((0,)), CUDA_VISIBLE_DEVICES="") == expected


def test_spread_workers_are_never_more_than_their_cores_if_these_are_to_be_theirs_alone() -> None:
    text = _refusal("exclusive", 17, _host())
    assert text.startswith(
        "--numa-binding exclusive: local rank 0 is one of 5 at NUMA node 0, which has 4 cores"
    )


def test_numa_nodes_without_cpus_of_ours_get_no_worker() -> None:
    topology = Topology((NumaNode(0, (0, 1)), NumaNode(1, ()), NumaNode(2, (2, 3)), NumaNode(5, (4, 5))))
    assert _cpus("node", 2, _host((), topology, (0, 4, 5))) == ["0", "4-5"]


def test_fake_numa_nodes_are_one() -> None:
    topology = Topology(numa_table((0, 1), (0, 1), (2, 3), (2, 3)), ((0,), (1,), (2,), (3,)))
    assert _cpus("exclusive", 4, _host((), topology, range(4))) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_that_tells_nothing_has_one_numa_node_of_cpus(mode: str) -> None:
    host = _host((None,), Topology((), tuple((cpu,) for cpu in range(4))), range(4))
    (binding,) = _plan(mode, 1, host).bindings
    assert (binding.cpus, binding.mempolicy) == ((0, 1, 2, 3), None)


@pytest.mark.parametrize(
    "mode, allowed, memory",
    [
        ("node", range(16), ("preferred", (1,))),
        ("exclusive", range(16), ("preferred", (1,))),
        ("core-complex", range(16), ("preferred", (1,))),
        ("socket", range(16), None),
        ("socket", range(4, 16), ("preferred", (1,))),
    ],
)
def test_memory_of_the_numa_node_is_preferred_if_all_cpus_are_there(
    mode: str, allowed: Iterable[int], memory: object
) -> None:
    (binding,) = _plan(mode, 1, _host((1,), allowed=allowed)).bindings
    assert binding.mempolicy == memory


def test_memory_that_may_not_be_used_is_never_preferred() -> None:
    topology = Topology((NumaNode(0, (0, 1), usable_memory=False),), ((0,), (1,)))
    (binding,) = _plan("node", 1, _host((0,), topology, range(2))).bindings
    assert (binding.cpus, binding.mempolicy) == ((0, 1), None)


def _said(homes: Sequence[int | None], models: Sequence[str] = (), **environ: str) -> list[tuple[str, str]]:
    named = zip(_host(homes).devices.gpus, models or ["H200"] * len(homes), strict=True)
    gpus = [replace(gpu, model=model) for gpu, model in named]
    notices = _plan("node", 1, _host(gpus=gpus), **environ).notices
    return [(notice.level, notice.text) for notice in notices]


def test_guesses_are_said() -> None:
    text = "no NVIDIA device can be seen, workers are spread over 4 NUMA nodes"
    assert _said(())[0] == ("info", f"--numa-binding node: {text}")
    assert _said((None, 1))[0] == (
        "warning",
        "--numa-binding node: the machine does not tell the NUMA node of 1 of 2 devices, 0 is taken",
    )


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, ["warning"]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ["warning"]),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, ["warning"]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-0"}, []),
    ],
)
def test_numbers_of_devices_of_several_models_depend_on_cudas_order(
    environ: dict[str, str], expected: list[str]
) -> None:
    levels = [level for level, text in _said((0, 0), ("T400", "H200"), **environ) if "2 models" in text]
    assert levels == expected


@given(
    st.sampled_from(MODES), st.integers(1, 40), st.lists(st.none() | st.integers(0, 4), max_size=9), st.data()
)
def test_no_worker_leaves_the_affinity_mask(
    mode: str, count: int, homes: list[int | None], data: st.DataObject
) -> None:
    """Either every worker has some CPUs of the mask, no two the same if they are to be exclusive, or one line."""
    allowed = data.draw(st.sets(st.integers(0, 15), min_size=1))
    host = _host(homes, allowed=allowed)
    try:
        bindings = _plan(mode, count, host).bindings
    except PlacementError as error:
        assert_one_line(str(error))
        return
    assert len(bindings) == count
    for binding in bindings:
        assert binding.cpus
        assert list(binding.cpus) == sorted(set(binding.cpus) & allowed)
    if mode == "exclusive":
        given_out = [cpu for binding in bindings for cpu in binding.cpus]
        assert len(given_out) == len(set(given_out))
