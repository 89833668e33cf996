"""What a node offers: its accelerators, found without torch, its slots, and those that the user shows."""

from __future__ import annotations

import os
import sys

from dsl._record import Record, kept
from dsl.devices import ACCELERATORS, are_hidden, ends_list
from dsl.errors import AcceleratorError, FilterError, NoDevicesError
from dsl.machine.kernel import has_intel_torch, has_nvidia_driver, list_names
from dsl.words import (
    BEYOND,
    MOST_WORKERS,
    find_runs,
    first_few,
    parse_integer,
    parse_number,
    quote,
    shorten,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dsl.devices.nvidia import Device, Survey
    from dsl.devices.others import LocatedDevice
    from dsl.machine.kernel import Cpus, NumaNode


class Devices(Record):
    """What this node offers."""

    accelerator: str
    """Name in `ACCELERATORS`."""
    slots: range
    """One slot for each device; on the CPU for each NUMA node, or as many as ``LOCAL_SIZE`` says."""
    visible: tuple[str, ...] | None
    """What the user shows; None: the visible-devices variable is not set; ``()``: it hides all devices."""
    visible_setting: str
    """This variable as ``NAME=VALUE``."""
    size_from_environment: bool = False
    """``LOCAL_SIZE`` sets the number of slots."""


def find_devices(environ: Mapping[str, str], devices: DeviceFacts, cpus: Cpus) -> Devices:
    """Look for the devices of this node. Raises what `select_accelerator` and `local_size` raise."""
    accelerator, count = select_accelerator(environ, devices)
    forced = 0
    if accelerator == "cpu":
        forced = local_size(environ)
        count = forced or count_numa_nodes(cpus.numa_nodes)
    variable = ACCELERATORS[accelerator].visible_variable
    value = environ.get(variable)
    if accelerator == "cuda" and environ.get("HIP_VISIBLE_DEVICES") and not devices.gpus:
        value = None  # HIP reads its own variable alone, and only the devices that it shows were counted
    return Devices(accelerator, range(count), read_slots(value), f"{variable}={value}", forced > 0)


def visible_slots(devices: Devices, shown: Sequence[str], names: Sequence[str] = ()) -> list[int]:
    """Slots of this machine that the user shows, in the user's order.

    Numbers are slots. For names of devices (``GPU-...``, ``MIG-...``, ``0.1`` for a tile) slots count from 0.
    ``names``: those of this machine, as far as they are known.

    Raises:
        FilterError: a slot that the machine does not have, or a name that is no device.
    """
    variable, setting = devices.visible_setting.partition("=")[0], shorten(devices.visible_setting)
    if all(entry.isascii() and entry.isdigit() for entry in shown):
        # A number too large for any machine is refused like any other slot that this machine lacks.
        numbers = [parse_number(entry) for entry in shown]
        slots = list(dict.fromkeys([BEYOND if number is None else number for number in numbers]))
        try:
            check_slots("localhost", slots, {"localhost": devices.slots})
        except FilterError as error:
            raise FilterError(f"{setting}: {error}; correct or unset the variable") from None
        return slots
    if devices.accelerator == "cpu":
        raise FilterError(f"{setting} names devices, but none was found on this machine; unset the variable")
    from dsl.devices.masks import count_named

    try:
        return list(range(count_named(variable, shown, len(devices.slots), names)))
    except FilterError as error:
        raise FilterError(f"{setting}: {error}") from None


def check_slots(
    host: str, slots: Iterable[int], pool: Mapping[str, Sequence[int]], source: str = "hostfile"
) -> None:
    """Raise FilterError unless the pool has the host and each of the slots."""
    if host not in pool:
        from difflib import get_close_matches

        close = get_close_matches(host, list(pool), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {first_few(list(pool))}"
        raise FilterError(f"hostname {quote(host)} not found in {source}, {hint}")
    for slot in slots:
        if slot not in pool[host]:
            raise FilterError(
                f"no slot '{slot}' specified on host {host!r}, which has {slots_text(pool[host])}"
            )


def slots_text(slots: Sequence[int]) -> str:
    """Ascending slots in words: ``only slot 0``, ``slots 0 to 3``, ``slots 0, 2``."""
    if not slots:
        return "no slots"
    (first, last), *more = find_runs(slots)
    if not more:
        return f"only slot {first}" if first == last else f"slots {first} to {last}"
    return f"slots {first_few(slots, 16)}"


def visible_warning(shown: Sequence[str]) -> str | None:
    """A warning about the devices that `visible_slots` gets; None: there is nothing to warn of."""
    instances = [entry for entry in shown if entry.startswith("MIG-")]
    if len(instances) < 2:
        return None
    return (
        f"CUDA shows a process one MIG instance, the first of the {len(instances)} that are named: "
        "let each worker show itself its own before it imports torch, or use dslrun --virtual-local-rank"
    )


def visible_override(devices: Devices, shown: Sequence[str], num_gpus: int = 0) -> str | None:
    """What the workers' visible-devices variable holds instead of slot ids, if anything.

    Names of devices are passed on. On a CPU slot ids could show devices that the user hid. So an empty set is
    passed on, too, and with ``num_gpus``, which counts workers, the first of the user's devices are.
    """
    if devices.accelerator == "cpu" and devices.visible and num_gpus > 0:
        return ",".join(devices.visible[:num_gpus])
    if devices.accelerator == "cpu":
        return devices.visible_setting.partition("=")[2] if devices.visible == () else None
    return ",".join(shown) if shown and not all(entry.isdigit() for entry in shown) else None


def read_slots(value: str | None) -> tuple[str, ...] | None:
    """Words of the visible-devices variable, each once: None when unset, ``()`` when it hides all devices.

    The grammars of `dsl.devices.masks` do not apply to slots: DeepSpeed makes ``--include localhost:WORDS``
    of the value. So a repeated device is one slot, and a word that is no device has to be refused.
    """
    if value is None:
        return None
    entries: dict[str, None] = {}
    for entry in [part.strip() for part in value.split(",")]:
        if ends_list(entry):
            break
        entries[entry] = None
    return tuple(entries)


def select_accelerator(environ: Mapping[str, str], devices: DeviceFacts) -> tuple[str, int]:
    """Return the accelerator of this node and its number of devices, hidden ones too (0 for the CPU).

    ``DS_ACCELERATOR`` decides. If it is not set, the first one with devices is taken: the accelerator that
    comes before CUDA, then CUDA, then the CPU. An accelerator is skipped if the user hides all its devices.

    Raises:
        AcceleratorError: ``DS_ACCELERATOR`` names no accelerator, or its devices cannot be counted.
        NoDevicesError: the accelerator that it names has no devices here, or all of them are hidden.
    """
    named = environ.get("DS_ACCELERATOR")
    if named and named not in ACCELERATORS:
        raise AcceleratorError(f"DS_ACCELERATOR must be one of {', '.join(ACCELERATORS)}, got {named!r}")
    if named == "cpu":
        return "cpu", 0
    for name in (named,) if named else (devices.other_name, "cuda"):
        if name is None or are_hidden(name, environ):
            continue
        count = devices.cuda_count if name == "cuda" else devices.other_count(name, environ)
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


def local_size(environ: Mapping[str, str]) -> int:
    """``LOCAL_SIZE``, the number of workers a node runs on its CPU; 0 when it is not set or not positive.

    Raises:
        AcceleratorError: the value is not a whole number, or too large.
    """
    value = environ.get("LOCAL_SIZE", "").strip() or "0"
    number = parse_integer(value)
    if number is None or number > MOST_WORKERS:
        raise AcceleratorError(
            f"LOCAL_SIZE={quote(value)} is not a whole number up to {MOST_WORKERS}, unset or correct it"
        )
    return max(number, 0)


def count_numa_nodes(nodes: Iterable[NumaNode]) -> int:
    """Number of NUMA nodes with cores, at least 1; neighbours with the same cores count once (fake NUMA)."""
    count = 0
    previous: Sequence[int] = ()
    for node in nodes:
        count += bool(node.cpus) and node.cpus != previous
        previous = node.cpus or previous
    return max(count, 1)


OTHER_FILES = ("davinci", "accel", "hl", "cambricon_dev", "xpu", "tcaicard", "biren")
"""How the names of accelerators other than GPUs start in ``/dev``."""


class DeviceFacts:
    """Devices of the machine below ``root``, with those that the environment hides. Each answer is kept."""

    def __init__(self, root: str = "/", environ: Mapping[str, str] | None = None) -> None:
        """``environ``: hides AMD's devices; None: our own."""
        self._root, self._environ = root, environ
        self._counts: dict[str, int] = {}

    @kept
    def cuda_count(self) -> int:
        """NVIDIA devices of this machine or container, whatever ``CUDA_VISIBLE_DEVICES`` says, else AMD ones.

        The driver's directory in ``/proc`` and the device files in ``/dev`` answer in microseconds. If they
        disagree (a container that was given some devices, device files not yet made, WSL), we ask the driver
        through pynvml; without pynvml the device files decide.

        torch calls AMD devices CUDA devices, too. Those count that ``ROCR_VISIBLE_DEVICES`` and
        ``HIP_VISIBLE_DEVICES`` leave visible.
        """
        in_proc = len(list_names(os.path.join(self._root, "proc/driver/nvidia/gpus")))
        names = list_names(os.path.join(self._root, "dev"))
        in_dev = len([name for name in names if name.startswith("nvidia") and name[6:].isdigit()])
        if not in_proc and not in_dev and "kfd" in names:
            from dsl.devices.others import count_amd

            return count_amd(os.environ if self._environ is None else self._environ, self._root)
        if in_proc == in_dev and (in_proc or "dxg" not in names):
            return in_proc
        return len(self.survey.devices) if self.survey.source == "nvml" else in_dev or in_proc

    @kept
    def other_name(self) -> str | None:
        """The accelerator that comes before CUDA on this machine, None if there is none.

        `dsl.devices.others` is imported only if a file in ``/dev`` may be such a device.
        """
        names = list_names(os.path.join(self._root, "dev"))
        # Most machines have a graphics device, but few have a torch for Intel's devices.
        is_intel = "dri" in names and any(has_intel_torch(folder) for folder in sys.path)
        if not is_intel and not any(name.startswith(OTHER_FILES) for name in names):
            return None
        from dsl.devices.others import find_accelerator

        return find_accelerator(self._root)

    def other_count(self, name: str, environ: Mapping[str, str]) -> int:
        """Devices of an accelerator that is neither ``cuda`` nor ``cpu``.

        The first call may have to ask a plug-in, in its ``environ``: that takes seconds.

        Raises:
            AcceleratorError: the plug-in did not answer.
        """
        if name not in self._counts:
            from dsl.devices.others import count_accelerator

            self._counts[name] = count_accelerator(name, environ, self._root)
        return self._counts[name]

    def located(self, name: str, environ: Mapping[str, str]) -> Sequence[LocatedDevice]:
        """Where the devices of an accelerator are, in the order of its runtime; ``cuda``: AMD's devices."""
        if name == "cuda" and not os.path.exists(os.path.join(self._root, "dev/kfd")):
            return ()
        from dsl.devices.others import read_devices

        return read_devices(name, environ, self._root)

    @kept
    def gpus(self) -> Sequence[Device]:
        """NVIDIA devices by PCI address."""
        if not has_nvidia_driver(self._root):
            return ()
        from dsl.devices.nvidia import quick_devices

        return quick_devices(self._root)

    @kept
    def survey(self) -> Survey:
        """The NVIDIA devices by the driver's own answers, and what went wrong."""
        from dsl.devices.nvidia import survey

        return survey(self._root)
