"""The device of each worker and where it sits: AMD, Intel, Gaudi and Cambricon devices on made-up machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.machine import ROOMS, UNASKED, make_facts, numa_table
from tests.support.requests import make_request, plan_of

from dsl.binding import NodeGroup, shown_devices
from dsl.devices.others import LocatedDevice, read_devices
from dsl.model.job import WorkerDevice
from dsl.model.request import PlacementRequest

NAMED = PlacementRequest(names_devices=True)
KFD = "sys/class/kfd/kfd/topology/nodes"


def lay(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n", encoding="utf-8")


def _pci(root: Path, address: str, node: int, **facts: str) -> None:
    """A PCI device with these files."""
    for name, text in {"numa_node": str(node), **facts}.items():
        lay(root, f"sys/bus/pci/devices/{address}/{name}", text)


def _render(root: Path, minor: int, target: str) -> None:
    """A render node of a device that lies at this path of sysfs."""
    link = root / f"sys/class/drm/renderD{minor}/device"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / target)
    lay(root, f"dev/dri/renderD{minor}")


def _amd(root: Path, places: Sequence[tuple[str, int]], **properties: int) -> str:
    """AMD devices at these PCI addresses and NUMA nodes, whose render nodes are numbered the other way round."""
    lay(root, "dev/kfd")
    lay(root, f"{KFD}/0/properties", "cpu_cores_count 64\nsimd_count 0")
    for number, (address, node) in enumerate(places):
        minor = 200 - number
        _pci(root, address, node)
        _render(root, minor, f"sys/bus/pci/devices/{address}")
        fields = {"simd_count": 304, "drm_render_minor": minor, "unique_id": number + 1, **properties}
        lay(root, f"{KFD}/{number + 1}/properties", "\n".join(f"{key} {one}" for key, one in fields.items()))
    return str(root)


def _intel(root: Path, minor: int, address: str, node: int, tiles: int = 1) -> None:
    _pci(root, address, node, vendor="0x8086", device="0x0bd5")
    for tile in range(tiles):
        lay(root, f"sys/bus/pci/devices/{address}/tile{tile}/id")
    _render(root, minor, f"sys/bus/pci/devices/{address}")


def _gaudi(root: Path, number: int, address: str, node: int, module: str | None) -> None:
    lay(root, f"dev/accel/accel{number}")
    _pci(root, address, node)
    device = f"sys/class/accel/accel{number}/device"
    lay(root, f"{device}/device_type", "GAUDI2")
    lay(root, f"{device}/pci_addr", address)
    if module is not None:
        lay(root, f"{device}/module_id", module)


def _mlu(root: Path, number: int, address: str, node: int) -> None:
    lay(root, f"dev/cambricon_dev{number}")
    _pci(root, address, node)
    text = f"Device name: MLU370-X8\nDevice inode path: /dev/cambricon_dev{number}\nDevice Major: 238"
    lay(root, f"proc/driver/cambricon/mlus/{address}/information", text)


def see(
    name: str, root: object, environ: Mapping[str, str], count: int, own: Sequence[Mapping[str, str]] = ()
) -> list[tuple[str, int | None] | None]:
    """Address and NUMA node of the device of each worker on a machine with this root and no NVIDIA device."""
    group = NodeGroup(count, environ, tuple(own), accelerator=name)
    facts = make_facts(located=lambda kind, env: read_devices(kind, env, str(root)))
    found = shown_devices(NAMED, group, facts.devices)
    return [None if one is None else (one.pci_address, one.numa_node) for one in found]


def test_amd_devices_are_in_the_order_of_kfd_not_of_their_addresses_or_render_nodes(tmp_path: Path) -> None:
    places = [("0000:c1:00.0", 1), ("0000:03:00.0", 0), ("0002:43:00.0", 3)]
    _amd(tmp_path, places)
    assert see("cuda", tmp_path, {}, 4) == [*places, None]


@pytest.mark.parametrize(
    "environ, nodes",
    [
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, [2, 0, None]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000002,3", "HIP_VISIBLE_DEVICES": "1"}, [3, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, [3, 1, None]),
        ({"CUDA_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "0,2"}, [0, 2, None]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, [None, None, None]),
    ],
)
def test_amd_devices_that_are_hidden_are_nobodys(
    environ: dict[str, str], nodes: list[int | None], tmp_path: Path
) -> None:
    places = [(f"0000:{number:02x}:00.0", number) for number in range(4)]
    _amd(tmp_path, places)
    seen = see("cuda", tmp_path, environ, 3)
    assert seen == [None if node is None else places[node] for node in nodes]


def test_a_part_of_a_partitioned_amd_device_lies_where_kfd_says(tmp_path: Path) -> None:
    """Its render node belongs to a platform device; some kernels put its number beside the PCI function."""
    _pci(tmp_path, "0001:4f:02.0", 5, product_name="AMD Instinct MI300X OAM")
    lay(tmp_path, "dev/kfd")
    for part, place in enumerate((0x4F10, 0x4F11, 0x4F10 | 2 << 28)):
        _render(tmp_path, 128 + part, f"sys/devices/platform/amdgpu_xcp_{part}")
        text = f"simd_count 152\ndrm_render_minor {128 + part}\nlocation_id {place}\ndomain 1"
        lay(tmp_path, f"{KFD}/{part}/properties", text)
    expected = LocatedDevice(WorkerDevice("AMD Instinct MI300X OAM", "0001:4f:02.0", 5), "GPU-XX")
    assert read_devices("cuda", {}, str(tmp_path)) == (expected,) * 3


@pytest.mark.parametrize(
    "version, label",
    [(90402, "AMD gfx942"), (90010, "AMD gfx90a"), (100300, "AMD gfx1030"), (0, "AMD device")],
)
def test_an_amd_device_without_a_product_name_is_called_by_its_instruction_set(
    version: int, label: str, tmp_path: Path
) -> None:
    root = _amd(tmp_path, [("0000:03:00.0", 0)], gfx_target_version=version)
    assert [one.device.name for one in read_devices("cuda", {}, root)] == [label]


def test_an_amd_device_of_which_nothing_is_told_has_no_place(tmp_path: Path) -> None:
    lay(tmp_path, "dev/kfd")
    lay(tmp_path, f"{KFD}/1/properties", "simd_count 152\nlocation_id 0")
    assert see("cuda", tmp_path, {}, 1) == [("", None)]


def test_minus_one_is_an_unknown_numa_node(tmp_path: Path) -> None:
    _amd(tmp_path, [("0000:03:00.0", -1)])
    assert see("cuda", tmp_path, {}, 1) == [("0000:03:00.0", None)]


@pytest.mark.parametrize(
    "environ, nodes",
    [
        ({}, [0, 0, 1, 1, 2, None]),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [0, 1, 2, None, None, None]),
        ({"ZE_AFFINITY_MASK": "4,2"}, [1, 2, None, None, None, None]),
        ({"ZE_AFFINITY_MASK": "2,1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [1, 2, *[None] * 4]),
        ({"ZE_AFFINITY_MASK": "1.1,2.0"}, [1, 2, *[None] * 4]),
        ({"ZE_AFFINITY_MASK": "1.1", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}, [None] * 6),
    ],
)
def test_tiles_of_intel_cards_share_an_address_unless_cards_are_devices(
    environ: dict[str, str], nodes: list[int | None], tmp_path: Path
) -> None:
    """Cards are in the order of their addresses, whatever the numbers of their render nodes."""
    places = [("0000:3a:00.0", 0), ("2000:9a:00.0", 1), ("10000:01:00.0", 2)]
    _intel(tmp_path, 130, *places[0], tiles=2)
    _intel(tmp_path, 129, *places[1], tiles=2)
    _intel(tmp_path, 128, *places[2])
    seen = see("xpu", tmp_path, environ, 6)
    assert seen == [None if node is None else places[node] for node in nodes]


def test_an_intel_device_is_called_by_its_pci_number_and_its_tile(tmp_path: Path) -> None:
    _intel(tmp_path, 128, "0000:3a:00.0", 0, tiles=2)
    _intel(tmp_path, 129, "0000:9a:00.0", 0)
    names = [one.device.name for one in read_devices("xpu", {}, str(tmp_path))]
    assert names == ["Intel GPU 0bd5 tile 0", "Intel GPU 0bd5 tile 1", "Intel GPU 0bd5"]


@pytest.mark.parametrize(
    "environ, modules",
    [
        ({}, [0, 1, 2]),
        ({"HABANA_VISIBLE_MODULES": "5,0"}, [5, 0, None]),
        ({"HABANA_VISIBLE_MODULES": "all"}, [0, 1, 2]),
        ({"HABANA_VISIBLE_MODULES": "1,7"}, [1, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, [0, 1, 2]),
    ],
)
def test_a_gaudi_worker_has_the_module_of_its_local_rank(
    environ: dict[str, str], modules: list[int | None], tmp_path: Path
) -> None:
    for number, module in enumerate((3, 0, 5, 1, 2)):
        _gaudi(tmp_path, number, f"0000:{module:02x}:00.0", module // 2, str(module))
    seen = see("hpu", tmp_path, environ, 3)
    assert seen == [None if one is None else (f"0000:{one:02x}:00.0", one // 2) for one in modules]


def test_gaudi_devices_that_do_not_tell_their_module_are_nobodys(tmp_path: Path) -> None:
    """Their files are numbered otherwise than their modules, so a guess would bind to the wrong cores."""
    _gaudi(tmp_path, 0, "0000:33:00.0", 0, None)
    assert see("hpu", tmp_path, {}, 1) == [None]


def test_a_container_that_lacks_the_module_of_a_rank_tells_no_place(tmp_path: Path) -> None:
    _gaudi(tmp_path, 0, "0000:33:00.0", 1, "1")
    assert see("hpu", tmp_path, {}, 2) == [None, ("0000:33:00.0", 1)]


def test_cambricon_devices_are_those_whose_device_file_we_have(tmp_path: Path) -> None:
    places = [("0000:e1:00.0", 1), ("0000:21:00.0", 0), ("0000:41:00.0", 0)]
    for number, (address, node) in enumerate(places):
        _mlu(tmp_path, number * 5, address, node)
    assert see("mlu", tmp_path, {}, 4) == [*places, None]
    assert see("mlu", tmp_path, {"MLU_VISIBLE_DEVICES": "2,0"}, 2) == [places[2], places[0]]
    (tmp_path / "dev/cambricon_dev0").unlink()
    assert see("mlu", tmp_path, {}, 2) == places[1:]


@pytest.mark.parametrize("name", ["npu", "sdaa", "supa", "klxpu", "mps", "cpu"])
def test_devices_of_others_are_not_known(name: str, tmp_path: Path) -> None:
    _amd(tmp_path, [("0000:03:00.0", 0)])
    lay(tmp_path, "dev/davinci0")
    assert see(name, tmp_path, {}, 2) == [None, None]


def test_a_machine_without_any_of_these_files_has_no_devices(tmp_path: Path) -> None:
    for name in ("cuda", "xpu", "hpu", "mlu"):
        assert read_devices(name, {}, str(tmp_path)) == ()


def test_workers_that_are_shown_one_device_each_have_that_one(tmp_path: Path) -> None:
    places = [(f"0000:{number:02x}:00.0", number) for number in range(4)]
    _amd(tmp_path, places)
    own = [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "9"}, {"CUDA_VISIBLE_DEVICES": "0"}]
    assert see("cuda", tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}, 3, own) == [places[3], None, places[0]]


def test_nvidia_devices_come_from_the_driver_and_nothing_else_is_asked() -> None:
    devices = make_facts(cuda=4, located=UNASKED).devices
    group = NodeGroup(2, {"CUDA_VISIBLE_DEVICES": "2,GPU-00000001"}, accelerator="cuda")
    assert shown_devices(NAMED, group, devices) == (WorkerDevice("H200", "0000:02:00.0", 0), None)
    own = ({"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, {"CUDA_VISIBLE_DEVICES": "3"})
    found = shown_devices(NAMED, NodeGroup(2, {}, own, accelerator="cuda"), devices)
    assert [one and one.pci_address for one in found] == ["0000:01:00.0", "0000:03:00.0"]


@pytest.mark.guarantee("G7")
def test_nothing_is_looked_up_for_a_launch_that_does_not_need_it() -> None:
    unasked: dict[str, Any] = dict.fromkeys(ROOMS["devices"], UNASKED)
    host = make_facts(**unasked)
    assert shown_devices(PlacementRequest(memory="bind"), NodeGroup(2, {}), host.devices) == ()
    plan = plan_of(make_request("torch", nproc_per_node="2"), make_facts(**unasked))
    assert [worker.device for worker in plan.workers] == [None, None]


def test_workers_with_a_device_of_another_accelerator_each_are_bound_beside_it() -> None:
    """The whole way: masks of the accelerator's own, and the cores of the NUMA nodes of what they show."""
    found = [
        LocatedDevice(WorkerDevice("Intel GPU 0bd5", f"0000:{number:02x}:00.0", node))
        for number, node in enumerate((1, 1, 0, 0))
    ]
    table = numa_table(range(4), range(4, 8))
    topology = make_facts().cpus.topology
    facts = make_facts(
        environ={"ZE_AFFINITY_MASK": "3,0"},
        other_name="xpu",
        other_count=lambda *_: 4,
        located=lambda name, _environ: found if name == "xpu" else (),
        topology=type(topology)(table, topology.cores),
    )
    request = make_request(
        "torch", nproc_per_node="auto", virtual_local_rank=True, bind="auto", names_devices=True
    )
    plan = plan_of(request, facts)
    assert [worker.env["ZE_AFFINITY_MASK"] for worker in plan.workers] == ["0", "3"]
    assert [worker.env["LOCAL_RANK"] for worker in plan.workers] == ["0", "0"]
    assert all("CUDA_VISIBLE_DEVICES" not in worker.env for worker in plan.workers)
    assert [worker.device and worker.device.pci_address for worker in plan.workers] == [
        "0000:00:00.0",
        "0000:03:00.0",
    ]
    assert [worker.cpus for worker in plan.workers] == [(4, 5, 6, 7), (0, 1, 2, 3)]
