"""Which accelerator a node has, and how many devices of it, found without importing torch.

The names, variables and export prefixes are those of DeepSpeed's accelerators. Only ``cuda`` and ``cpu`` are
counted so far; the other names are known, so that asking for one gives a clear answer.
"""

from __future__ import annotations

import os

from dsl._record import record
from dsl.errors import AcceleratorError, FilterError, NoDevicesError, UnsupportedError
from dsl.plan.filters import check_slots

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dsl.plan.topology import NumaNode


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


def find_devices(
    environ: Mapping[str, str], count_cuda: Callable[[], int], numa_nodes: Callable[[], Iterable[NumaNode]]
) -> Devices:
    """Look for the devices of this node. Raises what `select_accelerator` and `count_cpu_devices` raise."""
    accelerator, count = select_accelerator(environ, count_cuda)
    forced = 0
    if accelerator == "cpu":
        forced = local_size(environ)
        count = forced or count_numa_nodes(numa_nodes())
    variable = ACCELERATORS[accelerator].visible_variable
    value = environ.get(variable)
    return Devices(accelerator, range(count), visible_entries(value), f"{variable}={value}", forced > 0)


def visible_slots(devices: Devices, shown: Sequence[str]) -> list[int]:
    """Slots of this machine that the user shows, in the user's order.

    Numbers are slots; ``GPU-...`` and ``MIG-...`` names are counted from 0.

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
    strange = [entry for entry in shown if not entry.startswith(("GPU-", "MIG-"))]
    if strange:
        raise FilterError(
            f"{setting}: {strange[0]!r} is no device, give numbers alone, or GPU-... and MIG-... names"
        )
    return list(range(len(shown)))


def visible_override(devices: Devices, shown: Sequence[str]) -> str | None:
    """What the workers' visible-devices variable holds instead of slot ids, if anything.

    Names of devices are passed on. On a CPU an empty set is too: slot ids would show what the user hid.
    """
    if devices.accelerator == "cpu":
        return devices.visible_setting.partition("=")[2] if devices.visible == () else None
    return ",".join(shown) if shown and not shown[0].isdigit() else None


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


def visible_cuda_count(environ: Mapping[str, str], count: int) -> int:
    """How many of ``count`` CUDA devices a process of this environment sees.

    Like CUDA, nothing is read beyond an entry that is no device of this machine.
    """
    entries = visible_entries(environ.get("CUDA_VISIBLE_DEVICES"))
    if entries is None:
        return count
    seen = 0
    for entry in entries:
        if entry.isascii() and entry.isdigit() and int(entry) >= count:
            break
        seen += 1
    return seen


def select_accelerator(environ: Mapping[str, str], count_cuda: Callable[[], int]) -> tuple[str, int]:
    """Return the accelerator of this node and its number of CUDA devices (0 for the CPU).

    ``DS_ACCELERATOR`` decides; otherwise CUDA if it has a device and the user has not hidden them all, else
    the CPU. ``count_cuda`` counts the devices of the machine, whatever the environment hides.

    Raises:
        AcceleratorError: ``DS_ACCELERATOR`` is no accelerator.
        UnsupportedError: it is one that this version does not count.
        NoDevicesError: it is ``cuda`` and there is no device, or all are hidden.
    """
    named = environ.get("DS_ACCELERATOR")
    if named and named not in ACCELERATORS:
        raise AcceleratorError(f"DS_ACCELERATOR must be one of {', '.join(ACCELERATORS)}, got {named!r}")
    if named and named not in ("cuda", "cpu"):
        raise UnsupportedError(
            f"DS_ACCELERATOR={named}: this version of dsl counts only cuda and cpu devices"
        )
    if named == "cpu":
        return "cpu", 0
    hidden = visible_entries(environ.get("CUDA_VISIBLE_DEVICES")) == ()
    count = 0 if hidden else count_cuda()
    if count:
        return "cuda", count
    if named == "cuda":
        where = "CUDA_VISIBLE_DEVICES hides them all" if hidden else "this machine has no NVIDIA device"
        raise NoDevicesError(
            f"unable to proceed, no GPU resources available: DS_ACCELERATOR=cuda, but {where}"
        )
    return "cpu", 0


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


def count_cuda_devices(root: str = "/", ask_driver: Callable[[], int | None] | None = None) -> int:
    """NVIDIA devices of this machine or container, whatever ``CUDA_VISIBLE_DEVICES`` says.

    The driver's directory in ``/proc`` and the device files in ``/dev`` answer in microseconds. Only when
    they disagree (a container that was given some devices, device files not yet made, WSL) is the driver
    asked, through pynvml; without pynvml the device files decide.
    """
    try:
        in_proc = len(os.listdir(os.path.join(root, "proc/driver/nvidia/gpus")))
    except OSError:
        in_proc = 0
    dev = os.path.join(root, "dev")
    try:
        in_dev = len([name for name in os.listdir(dev) if name.startswith("nvidia") and name[6:].isdigit()])
    except OSError:
        in_dev = 0
    if in_proc == in_dev and (in_proc or not os.path.exists(os.path.join(dev, "dxg"))):
        return in_proc
    answer = (ask_driver or ask_nvml)()
    return (in_dev or in_proc) if answer is None else answer


def ask_nvml() -> int | None:
    """Number of devices by the NVIDIA driver; None when pynvml or the driver cannot say."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
