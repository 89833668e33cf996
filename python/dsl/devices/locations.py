"""The device of each worker and where it sits, for ``--bind auto``, ``--report-bindings`` and dry runs.

`dsl.devices.nvidia` finds NVIDIA's devices; this module finds the others, by files. It is imported only if
there may be a device.

Sources: the kernel's documentation of sysfs for PCI devices (``numa_node``, -1 where it is not known), for
amdgpu (``product_name``) and for habanalabs (``pci_addr``, ``device_type``, ``module_id``); amdkfd's topology
(``drm_render_minor``, ``location_id``, ``domain``, ``gfx_target_version``); AMD's "GPU isolation techniques";
"Device Hierarchy" and "Affinity Mask" of the Level Zero programming guide, and for the order of its devices
Intel's driver; "Gaudi-to-process Assignment" of the Gaudi documentation; Cambricon's driver guide
(``/proc/driver/cambricon/mlus``). Ascend, SDAA, Biren and Kunlun devices have no documented file that leads
from the number of a device to its PCI address, so we do not know where these devices sit.
"""

from __future__ import annotations

import os

from dsl._record import Record
from dsl.devices.accelerators import ACCELERATORS
from dsl.devices.masks import (
    GRAMMARS,
    NAMELESS,
    level_zero_hierarchy,
    read_entries,
    resolve,
    resolve_level_zero,
    resolve_rocm,
)
from dsl.machine.kernel_files import (
    list_names,
    numbered,
    pci_address,
    read_fact,
    read_fields,
    read_numa_node,
)
from dsl.model.node import WorkerDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.devices.nvidia import Device

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
MODULES_VARIABLE = "HABANA_VISIBLE_MODULES"


class LocatedDevice(Record):
    """A device, and its name in its runtime's variable; empty: the variable knows only its position."""

    device: WorkerDevice
    name: str = ""


def worker_devices(
    name: str,
    env: Mapping[str, str],
    count: int,
    gpus: Sequence[Device],
    others: Sequence[LocatedDevice],
    own: Sequence[Mapping[str, str]],
) -> tuple[WorkerDevice | None, ...]:
    """The device of each of ``count`` workers, for `dsl.binding.placement.shown_devices`.

    ``name`` is the accelerator, ``gpus`` NVIDIA's devices, ``others`` those of `read_devices`.
    """

    def see(values: Mapping[str, str]) -> Sequence[WorkerDevice | None]:
        if gpus:
            from dsl.devices.nvidia import visible_devices

            return [
                WorkerDevice(gpu.model or gpu.uuid or "NVIDIA device", gpu.address, gpu.numa_node)
                for gpu in visible_devices(values.get(CUDA_VARIABLE), gpus)
            ]
        return seen_devices(name, values, others)

    if own:
        return tuple([next(iter(see({**env, **variables})), None) for variables in own])
    seen = see(env)
    return tuple([seen[rank] if rank < len(seen) else None for rank in range(count)])


def seen_devices(
    name: str, environ: Mapping[str, str], found: Sequence[LocatedDevice]
) -> list[WorkerDevice | None]:
    """The devices of ``found`` that a process with this environment sees, in the order of its runtime.

    A Gaudi worker takes the module whose number is its local rank, or the module at that place in
    ``HABANA_VISIBLE_MODULES``. None: there is no such module, or we do not know where it sits.
    """
    if name == "hpu":
        by_module = {one.name: one.device for one in found}
        numbers = [int(each) for each in by_module]
        modules = read_entries(environ.get(MODULES_VARIABLE), GRAMMARS[MODULES_VARIABLE])
        if modules is None:
            modules = tuple([str(number) for number in range(max(numbers, default=-1) + 1)])
        return [by_module.get(module) for module in modules]
    variable = ACCELERATORS[name].visible_variable
    if name == "cuda":
        positions = resolve_rocm(environ, [one.name for one in found])
    elif name == "xpu":
        positions = resolve_level_zero(environ, len(found))
    else:
        positions = resolve(environ.get(variable), len(found), (), GRAMMARS[variable])
    return [found[position].device for position in positions]


def read_devices(name: str, environ: Mapping[str, str], root: str = "/") -> tuple[LocatedDevice, ...]:
    """The devices of an accelerator that files describe, in the order of its runtime, hidden ones too.

    ``cuda`` stands for AMD's devices. Level Zero's depend on ``ZE_FLAT_DEVICE_HIERARCHY`` of ``environ``.
    """
    if name == "cuda":
        return tuple([_amd_device(node, root) for node in _rocm_nodes(root)])
    if name == "xpu":
        return _intel_devices(root, composite=level_zero_hierarchy(environ) == "COMPOSITE")
    if name == "hpu":
        return _gaudi_devices(root)
    return _cambricon_devices(root) if name == "mlu" else ()


def _place(label: str, address: str, root: str, name: str = "") -> LocatedDevice:
    node = read_numa_node(address, root) if address else None
    return LocatedDevice(WorkerDevice(label, address, node), name)


def _rocm_nodes(root: str) -> list[dict[str, str]]:
    """The properties of the AMD devices that ROCm can use, in its order.

    A node of kfd's topology counts if it has compute units, we may read its properties, and we have its
    render node. A container sees the other nodes, too, but cannot read their properties.
    """
    if not os.path.exists(os.path.join(root, "dev/kfd")):
        return []
    base = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    found = []
    for node in sorted(numbered(base, ""), key=int):
        lines = read_fact(f"{base}/{node}/properties").splitlines()
        fields = dict([line.split(" ", 1) for line in lines if " " in line])
        render = fields.get("drm_render_minor", "0")
        if fields.get("simd_count", "0") == "0":
            continue
        if render == "0" or os.path.exists(os.path.join(root, f"dev/dri/renderD{render}")):
            found.append(fields)
    return found


def _amd_device(node: Mapping[str, str], root: str) -> LocatedDevice:
    folder = os.path.join(root, f"sys/class/drm/renderD{node.get('drm_render_minor', '0')}/device")
    address = os.path.basename(os.path.realpath(folder))
    if address.count(":") != 2:
        # The render node of a part of a partitioned GPU belongs to no PCI device.
        address = _kfd_address(node)
        folder = os.path.join(root, "sys/bus/pci/devices", address)
    label = read_fact(f"{folder}/product_name") if address else ""
    # No name is meant to match one without a serial number.
    serial = _number(node, "unique_id")
    return _place(label or _amd_label(node), address, root, f"GPU-{serial:016x}" if serial else NAMELESS)


def _kfd_address(node: Mapping[str, str]) -> str:
    """The PCI address from kfd, which has bus, device and function in 16 bits, and the domain.

    The function is always taken as 0, because some kernels put the number of a part into its bits.
    """
    place, domain = _number(node, "location_id") & 0xFFFF, _number(node, "domain")
    return f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 0x1F:02x}.0" if place else ""


def _amd_label(node: Mapping[str, str]) -> str:
    version = _number(node, "gfx_target_version")
    if not version:
        return "AMD device"
    return f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _number(node: Mapping[str, str], field: str) -> int:
    text = node.get(field, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _intel_devices(root: str, *, composite: bool) -> tuple[LocatedDevice, ...]:
    """Intel GPUs whose render node we have, in the order of their PCI addresses, which is Level Zero's.

    ``composite``: a card is one device; else each of its tiles is. Integrated GPUs count only if there are no
    others, as in torch. They sit at 00:02.0.
    """
    cards = []
    base = os.path.join(root, "sys/class/drm")
    for name in numbered(base, "renderD"):
        folder = f"{base}/{name}/device"
        if read_fact(f"{folder}/vendor") == "0x8086" and os.path.exists(os.path.join(root, "dev/dri", name)):
            cards.append((os.path.basename(os.path.realpath(folder)), folder))
    discrete = [card for card in cards if not card[0].endswith(":00:02.0")]
    found = []
    # Longer domains are higher ones.
    for address, folder in sorted(discrete or cards, key=lambda card: (len(card[0]), card[0])):
        label = f"Intel GPU {read_fact(f'{folder}/device').removeprefix('0x')}".rstrip()
        tiles = 1 if composite or not discrete else _count_tiles(folder)
        found += [
            _place(f"{label} tile {one}" if tiles > 1 else label, address, root) for one in range(tiles)
        ]
    return tuple(found)


def _count_tiles(device: str) -> int:
    tiles = len(numbered(device, "tile"))  # xe
    if not tiles:
        for card in numbered(f"{device}/drm", "card"):  # i915
            tiles = len(numbered(f"{device}/drm/{card}/gt", "gt"))
    return max(tiles, 1)


def gaudi_folders(root: str) -> list[str]:
    """The folder in sysfs of each Gaudi that we have. Other accel devices (NPUs of laptops) are skipped."""
    found = []
    for name in numbered(os.path.join(root, "dev/accel"), "accel"):
        device = os.path.join(root, "sys/class/accel", name, "device")
        vendor = read_fact(f"{device}/vendor")
        if read_fact(f"{device}/device_type").upper().startswith("GAUDI") or vendor == "0x1da3":
            found.append(device)
    return found


def _gaudi_devices(root: str) -> tuple[LocatedDevice, ...]:
    """Gaudi devices that tell their module. Only older drivers do not, and their files have another order."""
    found = []
    for folder in gaudi_folders(root):
        module = read_fact(f"{folder}/module_id")
        if module.isascii() and module.isdigit():
            address = pci_address(read_fact(f"{folder}/pci_addr"))
            label = read_fact(f"{folder}/device_type") or "Gaudi device"
            found.append(_place(label, address, root, str(int(module))))
    return tuple(found)


def _cambricon_devices(root: str) -> tuple[LocatedDevice, ...]:
    """Devices by the driver's files in ``/proc``, if we have their device files, in the order of these."""
    base = os.path.join(root, "proc/driver/cambricon/mlus")
    found = []
    for address in list_names(base):
        fields = read_fields(f"{base}/{address}/information")
        file = fields.get("Device inode path", "").lstrip("/")
        number = file.removeprefix("dev/cambricon_dev")
        if number.isascii() and number.isdigit() and os.path.exists(os.path.join(root, file)):
            label = fields.get("Device name") or "Cambricon device"
            found.append((int(number), _place(label, pci_address(address), root)))
    return tuple([device for _, device in sorted(found, key=lambda each: each[0])])
