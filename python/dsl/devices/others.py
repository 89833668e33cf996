"""Devices other than NVIDIA's: how many there are, without torch, and where they sit, by drivers' files.

The names are those of `dsl.devices.ACCELERATORS`. This module is imported only if there may be
a device, or if one is to be shown. If one card may be several devices for torch, a child process asks the
accelerator's torch plug-in: we never import torch ourselves.

Sources: the vendors' instructions for passing devices into containers; the kernel's documentation of its
drivers (amdkfd, i915, xe, habanalabs) and of sysfs for PCI devices (``numa_node``, -1 where it is not known),
for amdgpu (``product_name``) and for habanalabs (``pci_addr``, ``device_type``, ``module_id``); amdkfd's
topology (``drm_render_minor``, ``location_id``, ``domain``, ``gfx_target_version``); AMD's "GPU isolation
techniques"; "Device Hierarchy" and "Affinity Mask" of the Level Zero programming guide, and for the order of
its devices Intel's driver; "Gaudi-to-process Assignment" of the Gaudi documentation; Cambricon's driver guide
(``/proc/driver/cambricon/mlus``). Ascend, SDAA, Biren and Kunlun devices have no documented file that leads
from the number of a device to its PCI address, so we do not know where these devices sit.
"""

from __future__ import annotations

import os
import sys

from dsl._record import Record
from dsl.devices.masks import (
    GRAMMARS,
    NAMELESS,
    NUMBERS,
    count_visible,
    level_zero_hierarchy,
    read_entries,
    resolve,
    resolve_level_zero,
    resolve_rocm,
)
from dsl.errors import AcceleratorError
from dsl.machine.kernel import (
    has_intel_torch,
    list_names,
    numbered,
    pci_address,
    read_fact,
    read_fields,
    read_numa_node,
)
from dsl.model.job import WorkerDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import IO

    from dsl.devices.nvidia import Device

    Counter = Callable[[str], int]
    """Number of devices below this root directory."""

MODULES_VARIABLE = "HABANA_VISIBLE_MODULES"
"""For processes, beside the accelerator's own; the user sets it."""

ASK_TIMEOUT_S = 120.0
"""Seconds to wait for a plug-in: importing it and torch from a cold network file system takes a minute."""

_PROGRAM = """\
import sys
if sys.path[0] == "":
    del sys.path[0]  # a folder named torch may lie here
import importlib
plug_in, function = sys.argv[1:]
importlib.import_module("torch")
if plug_in:
    importlib.import_module(plug_in)
first, *names = function.split(".")
found = sys.modules[first]
for name in names:
    found = getattr(found, name)
print("devices", int(found()), flush=True)
"""


def count_amd(environ: Mapping[str, str], root: str = "/") -> int:
    """Number of AMD devices that ``ROCR_VISIBLE_DEVICES`` and ``HIP_VISIBLE_DEVICES`` leave visible.

    HIP reads ``CUDA_VISIBLE_DEVICES`` if its own variable is not set, but we ignore it here: it is the
    accelerator's own variable, as for NVIDIA devices.
    """
    rest = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return len(resolve_rocm(rest, [device.name for device in read_devices("cuda", environ, root)]))


def count_gaudi(root: str) -> int:
    """Gaudi devices: ``/dev/accel/accel0``, ... of habanalabs, before Linux 6.2 ``/dev/hl0``, ..."""
    return len(gaudi_folders(root)) or len(numbered(os.path.join(root, "dev"), "hl"))


def _numbered(folder: str, prefix: str) -> Counter:
    """Counts device files such as ``/dev/davinci0``; a container has those that it was given."""
    return lambda root: len(numbered(os.path.join(root, folder), prefix))


class Counting(Record):
    """How one accelerator is found and counted."""

    files: Counter
    """Counts its device files."""
    plug_in: str
    """The package whose import makes torch know the devices; empty: torch itself."""
    function: str
    """Dotted name of the function that counts the devices."""
    asked_without: str = ""
    """A device file may be several devices: the plug-in is asked, without this variable, which hides some."""


COUNTINGS = {
    "xpu": Counting(lambda root: len(read_devices("xpu", {}, root)), "", "torch.xpu.device_count"),
    "npu": Counting(_numbered("dev", "davinci"), "torch_npu", "torch.npu.device_count"),
    "sdaa": Counting(
        _numbered("dev", "tcaicard"), "torch_sdaa", "torch.sdaa.device_count", "SDAA_VISIBLE_DEVICES"
    ),
    "mps": Counting(lambda _root: int(sys.platform == "darwin"), "", "torch.mps.device_count"),
    "hpu": Counting(count_gaudi, "habana_frameworks.torch.hpu", "habana_frameworks.torch.hpu.device_count"),
    "mlu": Counting(_numbered("dev", "cambricon_dev"), "torch_mlu", "torch.mlu.device_count"),
    "supa": Counting(
        _numbered("dev/biren", "card_"), "torch_supa", "torch.supa.device_count", "SUPA_VISIBLE_DEVICES"
    ),
    "klxpu": Counting(_numbered("dev", "xpu"), "torch_xmlir", "torch.cuda.device_count"),
}
"""By accelerator, in the order in which DeepSpeed looks for them; CUDA devices come after all of them."""


def find_accelerator(root: str = "/", path: Sequence[str] | None = None) -> str | None:
    """The accelerator that DeepSpeed would choose before CUDA, as far as files can tell; None if none.

    It must have a device file, and its plug-in (for ``xpu``: a torch built for it) must lie on ``path``
    (ours, if None). DeepSpeed imports the plug-ins instead. It takes ``npu``, ``sdaa``, ``hpu``, ``mlu`` and
    ``klxpu`` as soon as the import succeeds, even on machines without such a device.
    """
    folders = sys.path if path is None else path
    for name, counting in COUNTINGS.items():
        if counting.files(root) and any(_has_plug_in(name, counting, folder) for folder in folders):
            return name
    return None


def _has_plug_in(name: str, counting: Counting, folder: str) -> bool:
    if name == "xpu":
        return has_intel_torch(folder)
    return os.path.isdir(os.path.join(folder, counting.plug_in.partition(".")[0] or "torch"))


def count_accelerator(
    name: str,
    environ: Mapping[str, str],
    root: str = "/",
    ask: Callable[[str, str, Mapping[str, str]], int] | None = None,
) -> int:
    """Devices of an accelerator on this machine, whatever its own variable hides.

    ``ask`` counts if the files cannot; None: `ask_plug_in`.

    Raises:
        AcceleratorError: the plug-in had to be asked, and did not answer.
    """
    counting = COUNTINGS[name]
    found = len(read_devices("xpu", environ, root)) if name == "xpu" else counting.files(root)
    if found and counting.asked_without:
        shown = {key: environ[key] for key in environ if key != counting.asked_without}
        found = (ask or ask_plug_in)(counting.plug_in, counting.function, shown)
    if name != "hpu" or MODULES_VARIABLE not in environ:
        return found
    # Module numbers are not indices: the modules that we were given may have any numbers.
    return min(found, count_visible(environ[MODULES_VARIABLE], 64, (), GRAMMARS[MODULES_VARIABLE]))


def ask_plug_in(
    plug_in: str,
    function: str,
    environ: Mapping[str, str],
    executable: str = sys.executable,
    timeout_s: float = ASK_TIMEOUT_S,
) -> int:
    """Number of devices that a function of torch or of a plug-in returns, called in a child process.

    ``plug_in``: the package to import besides torch (empty: none); ``function``: its dotted name, with its
    module; ``environ``: the child's environment; ``executable``: the interpreter of the workers.

    Raises:
        AcceleratorError: the plug-in cannot be imported, does not answer in time, or gives no number.
    """
    from signal import SIGKILL
    from subprocess import DEVNULL, Popen, TimeoutExpired
    from tempfile import TemporaryFile

    name = plug_in or "torch"
    argv = [executable, "-c", _PROGRAM, plug_in, function]
    # Files, not pipes: a pipe ends only when every process that the plug-in has started closes it, too.
    with TemporaryFile() as output, TemporaryFile() as complaint:
        own = dict(environ)
        try:
            child = Popen(
                argv, stdin=DEVNULL, stdout=output, stderr=complaint, env=own, start_new_session=True
            )
        except OSError as error:
            raise AcceleratorError(_failure(name, f"{executable}: {error.strerror}")) from None
        try:
            child.wait(timeout_s)
        except TimeoutExpired:
            raise AcceleratorError(_failure(name, f"no answer in {timeout_s:g} s")) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, SIGKILL)
                child.wait()
        answer, errors = (_lines(file) for file in (output, complaint))
    counts = [line.split()[1] for line in answer if line.startswith("devices ")]
    if child.returncode or len(counts) != 1 or not counts[0].isdigit():
        raise AcceleratorError(_failure(name, errors[-1] if errors else f"exit code {child.returncode}"))
    return int(counts[0])


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _failure(name: str, why: str) -> str:
    return f"devices cannot be counted, asking {name} in a child process failed: {why}; give their number"


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
    """The device of each of ``count`` workers, for `dsl.binding.shown_devices`.

    ``name`` is the accelerator, ``gpus`` NVIDIA's devices, ``others`` those of `read_devices`.
    """

    def see(values: Mapping[str, str]) -> Sequence[WorkerDevice | None]:
        if gpus:
            from dsl.devices.nvidia import visible_devices

            return [
                WorkerDevice(gpu.model or gpu.uuid or "NVIDIA device", gpu.address, gpu.numa_node)
                for gpu in visible_devices(values.get("CUDA_VISIBLE_DEVICES"), gpus)
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
        by_module = {located.name: located.device for located in found}
        modules = read_entries(environ.get(MODULES_VARIABLE), GRAMMARS[MODULES_VARIABLE])
        if modules is None:
            modules = tuple(map(str, range(max(map(int, by_module), default=-1) + 1)))
        return [by_module.get(module) for module in modules]
    if name == "cuda":
        positions = resolve_rocm(environ, [located.name for located in found])
    elif name == "xpu":
        positions = resolve_level_zero(environ, len(found))
    else:
        positions = resolve(environ.get("MLU_VISIBLE_DEVICES"), len(found), (), NUMBERS)
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
