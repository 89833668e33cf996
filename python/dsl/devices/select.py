"""Which accelerator a node has, and how many devices of it, found without importing torch.

The names, variables and export prefixes are those of DeepSpeed's accelerators. Here is what every launch
needs. What only some machines need is imported there: `dsl.devices.others` (how devices other than CUDA's
are counted), `dsl.devices.nvidia` (what the driver says), `dsl.devices.visible` (the grammars of the variables).
"""

from __future__ import annotations

import os
import sys

from dsl._record import record
from dsl.errors import AcceleratorError, FilterError, NoDevicesError
from dsl.resources.filters import check_slots

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dsl.machine.topology import NumaNode

    FindOther = Callable[[], str | None]
    """`find_other_accelerator`, for some machine."""
    CountOther = Callable[[str, Mapping[str, str]], int]
    """`count_other_devices`, for some machine."""


@record
class Accelerator:
    """One kind of device, named as in ``DS_ACCELERATOR``.

    ``visible_variable`` limits which devices a process sees; variables whose names start with one of
    ``export_prefixes`` go to every node.
    """

    name: str
    visible_variable: str
    export_prefixes: tuple[str, ...] = ()


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("cuda", "CUDA_VISIBLE_DEVICES", ("NCCL",)),
        Accelerator("cpu", "CUDA_VISIBLE_DEVICES"),
        Accelerator("xpu", "ZE_AFFINITY_MASK"),
        Accelerator("npu", "ASCEND_RT_VISIBLE_DEVICES", ("ASCEND", "HCCL", "LD_LIBRARY", "PATH")),
        Accelerator("hpu", "CUDA_VISIBLE_DEVICES"),
        Accelerator("mps", "CUDA_VISIBLE_DEVICES"),
        Accelerator("mlu", "MLU_VISIBLE_DEVICES", ("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH")),
        Accelerator("sdaa", "SDAA_VISIBLE_DEVICES", ("NCCL", "LD_LIBRARY", "PATH")),
        Accelerator("supa", "SUPA_VISIBLE_DEVICES", ("BCCL", "BIREN", "SUPA", "LD_LIBRARY", "PATH")),
        Accelerator("klxpu", "CUDA_VISIBLE_DEVICES", ("BKCL", "XPU", "XMLIR", "LD_LIBRARY", "PATH")),
    )
}


@record
class Devices:
    """What this node offers: its accelerator, the slots it counts, and the devices that the user shows.

    ``visible`` is None when the visible-devices variable is not set, and ``()`` when it hides them all;
    ``visible_setting`` is its ``NAME=VALUE``.
    """

    accelerator: str
    slots: range
    visible: tuple[str, ...] | None
    visible_setting: str
    size_from_environment: bool = False


PLACEHOLDERS = ("cpu", "hpu", "mps")
"""Accelerators whose runtime does not read the variable: it picks slots here, and hides nothing."""

OTHER_FILES = ("davinci", "accel", "hl", "cambricon_dev", "xpu", "tcaicard", "biren")
"""How names in ``/dev`` start that may be accelerators besides GPUs."""


def find_devices(
    environ: Mapping[str, str],
    count_cuda: Callable[[], int],
    numa_nodes: Callable[[], Iterable[NumaNode]],
    find_other: FindOther | None = None,
    count_other: CountOther | None = None,
) -> Devices:
    """Look for the devices of this node. Raises what `select_accelerator` and `local_size` raise."""
    accelerator, count = select_accelerator(environ, count_cuda, find_other, count_other)
    forced = 0
    if accelerator == "cpu":
        forced = local_size(environ)
        count = forced or count_numa_nodes(numa_nodes())
    variable = ACCELERATORS[accelerator].visible_variable
    value = environ.get(variable)
    return Devices(accelerator, range(count), visible_entries(value), f"{variable}={value}", forced > 0)


def visible_slots(devices: Devices, shown: Sequence[str]) -> list[int]:
    """Slots of this machine that the user shows, in the user's order.

    Numbers are slots; names of devices (``GPU-...``, ``MIG-...``, ``0.1`` for a tile) are counted from 0.

    Raises:
        FilterError: a slot that the machine does not have, or a name that is no device.
    """
    setting = devices.visible_setting
    if all(entry.isascii() and entry.isdigit() for entry in shown):
        slots = list(dict.fromkeys([int(entry) for entry in shown]))
        try:
            check_slots("localhost", slots, {"localhost": devices.slots})
        except FilterError as error:
            raise FilterError(f"{setting}: {error}; correct or unset the variable") from None
        return slots
    if devices.accelerator == "cpu":
        raise FilterError(f"{setting} names devices, but none was found on this machine; unset the variable")
    from dsl.devices.visible import count_named

    try:
        return list(range(count_named(setting.partition("=")[0], shown, len(devices.slots))))
    except FilterError as error:
        raise FilterError(f"{setting}: {error}") from None


def visible_warning(shown: Sequence[str]) -> str | None:
    """What the user should know of the devices that `visible_slots` was given, if anything."""
    instances = [entry for entry in shown if entry.startswith("MIG-")]
    if len(instances) < 2:
        return None
    return (
        f"CUDA shows a process one MIG instance, the first of the {len(instances)} that are named: "
        "let each worker show itself its own before it imports torch, or use dslrun --virtual-local-rank"
    )


def visible_override(devices: Devices, shown: Sequence[str]) -> str | None:
    """What the workers' visible-devices variable holds instead of slot ids, if anything.

    Names of devices are passed on. On a CPU an empty set is too: slot ids would show what the user hid.
    """
    if devices.accelerator == "cpu":
        return devices.visible_setting.partition("=")[2] if devices.visible == () else None
    return ",".join(shown) if shown and not all(entry.isdigit() for entry in shown) else None


def visible_entries(value: str | None) -> tuple[str, ...] | None:
    """Devices that ``CUDA_VISIBLE_DEVICES`` names, each once: None when unset, ``()`` when it hides them all.

    An empty value, ``-1`` and ``NoDevFiles`` (Slurm's word) hide the devices; like CUDA, nothing is read
    beyond a negative number.
    """
    if value is None:
        return None
    entries: dict[str, None] = {}
    for entry in [part.strip() for part in value.split(",")]:
        if not entry or entry == "NoDevFiles" or (entry.startswith("-") and entry[1:].isdigit()):
            break
        entries[entry] = None
    return tuple(entries)


def visible_cuda_count(
    environ: Mapping[str, str],
    count: int,
    names: Callable[[], Sequence[str]] | None = None,
    *,
    alone: bool = False,
) -> int:
    """How many of ``count`` CUDA devices a process of this environment sees, as torch counts them.

    ``names`` tells the devices' UUIDs, so that shortened ones can be looked up (None: any name counts).
    ``alone``: each worker is shown one device, so MIG instances count as many as are named.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return count
    from dsl.devices.visible import count_visible

    known = names() if names is not None and value.startswith("GPU-") else ()
    return count_visible(value, count, known, alone=alone)


def select_accelerator(
    environ: Mapping[str, str],
    count_cuda: Callable[[], int],
    find_other: FindOther | None = None,
    count_other: CountOther | None = None,
) -> tuple[str, int]:
    """Return the accelerator of this node and its number of devices (0 for the CPU).

    ``DS_ACCELERATOR`` decides. Otherwise it is what ``find_other`` finds (None: nothing), then CUDA, then the
    CPU; an accelerator whose devices the user has hidden is passed over. ``count_cuda`` and ``count_other``
    count the devices of the machine, whatever the environment hides.

    Raises:
        AcceleratorError: ``DS_ACCELERATOR`` is no accelerator, or its devices cannot be counted.
        NoDevicesError: it is one, and there is no device, or all are hidden.
    """
    named = environ.get("DS_ACCELERATOR")
    if named and named not in ACCELERATORS:
        raise AcceleratorError(f"DS_ACCELERATOR must be one of {', '.join(ACCELERATORS)}, got {named!r}")
    if named == "cpu":
        return "cpu", 0
    other = find_other() if find_other is not None and not named else None
    for name in (named,) if named else (other, "cuda"):
        if name is None or are_hidden(name, environ):
            continue
        count = count_cuda() if name == "cuda" else (count_other or count_other_devices)(name, environ)
        if count:
            return name, count
    if named:
        what = "NVIDIA or AMD" if named == "cuda" else named
        where = f"this machine has no {what} device"
        if are_hidden(named, environ):
            where = f"{ACCELERATORS[named].visible_variable} hides them all"
        raise NoDevicesError(
            f"DS_ACCELERATOR={named}: unable to proceed, no GPU resources available: {where}"
        )
    return "cpu", 0


def are_hidden(name: str, environ: Mapping[str, str]) -> bool:
    """Whether the user hides all devices of an accelerator from every process."""
    # An empty mask of Level Zero shows all; -1 and the like are read the same way everywhere.
    value = environ.get(ACCELERATORS[name].visible_variable)
    if name in PLACEHOLDERS or (name == "xpu" and not (value or "").strip()):
        return False
    return visible_entries(value) == ()


def find_other_accelerator(root: str = "/") -> str | None:
    """The accelerator that comes before CUDA on this machine, None if there is none.

    See `dsl.devices.others.find_accelerator`, which is imported only if some file in ``/dev`` may be one.
    """
    try:
        names = os.listdir(os.path.join(root, "dev"))
    except OSError:
        return None
    # Most machines have a graphics device; few have a torch for one of Intel's.
    is_intel = "dri" in names and any(has_intel_torch(folder) for folder in sys.path)
    if not is_intel and not any(name.startswith(OTHER_FILES) for name in names):
        return None
    from dsl.devices.others import find_accelerator

    return find_accelerator(root)


def has_intel_torch(folder: str) -> bool:
    """Whether a torch for Intel GPUs is installed in this folder of packages."""
    names = ("torch/lib/libtorch_xpu.so", "intel_extension_for_pytorch")
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def count_other_devices(name: str, environ: Mapping[str, str]) -> int:
    """Devices on this machine of an accelerator that is neither ``cuda`` nor ``cpu``.

    Raises:
        AcceleratorError: a plug-in had to be asked, and did not answer.
    """
    from dsl.devices.others import count_accelerator

    return count_accelerator(name, environ)


def local_size(environ: Mapping[str, str]) -> int:
    """``LOCAL_SIZE``, the number of workers a node runs on its CPU; 0 when it is not set or not positive.

    Raises:
        AcceleratorError: it is not a whole number.
    """
    value = environ.get("LOCAL_SIZE", "").strip() or "0"
    try:
        return max(int(value), 0)
    except ValueError:
        raise AcceleratorError(f"LOCAL_SIZE={value!r} is not a whole number, unset or correct it") from None


def count_numa_nodes(nodes: Iterable[NumaNode]) -> int:
    """NUMA nodes that have cores; neighbours with the same cores are one (fake NUMA). 1 if none is known."""
    count = 0
    previous: Sequence[int] = ()
    for node in nodes:
        count += bool(node.cpus) and node.cpus != previous
        previous = node.cpus or previous
    return max(count, 1)


def has_nvidia_driver(root: str = "/") -> bool:
    """Whether there are files of an NVIDIA driver (on WSL: of a driver of any GPU)."""
    names = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")
    return any(os.path.exists(os.path.join(root, name)) for name in names)


def count_cuda_devices(
    root: str = "/",
    ask_driver: Callable[[], int | None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """NVIDIA devices of this machine or container, whatever ``CUDA_VISIBLE_DEVICES`` says, else AMD ones.

    The driver's directory in ``/proc`` and the device files in ``/dev`` answer in microseconds. Only when
    they disagree (a container that was given some devices, device files not yet made, WSL) is the driver
    asked, through pynvml; without pynvml the device files decide.

    torch calls AMD devices CUDA devices too. They are those that ``ROCR_VISIBLE_DEVICES`` and
    ``HIP_VISIBLE_DEVICES`` of ``environ`` (ours, if None) leave.
    """
    try:
        in_proc = len(os.listdir(os.path.join(root, "proc/driver/nvidia/gpus")))
    except OSError:
        in_proc = 0
    dev = os.path.join(root, "dev")
    try:
        names = os.listdir(dev)
    except OSError:
        names = []
    in_dev = len([name for name in names if name.startswith("nvidia") and name[6:].isdigit()])
    if not in_proc and not in_dev and "kfd" in names:
        from dsl.devices.others import count_amd

        return count_amd(os.environ if environ is None else environ, root)
    if in_proc == in_dev and (in_proc or "dxg" not in names):
        return in_proc
    if ask_driver is None:
        from dsl.devices import nvidia

        ask_driver = nvidia.count
    answer = ask_driver()
    return (in_dev or in_proc) if answer is None else answer
