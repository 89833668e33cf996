"""What ``dslrun`` makes of this node: how many workers it has, and the device of each."""

from __future__ import annotations

from dsl.errors import OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.model import TorchRequest
    from dsl.plan.host import Host

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
# On ROCm it says more than the other, if it is set.
HIP_DEVICES_VARIABLE = "HIP_VISIBLE_DEVICES"
MOST_WORKERS = 1 << 22
"""No machine holds more processes."""


def local_world_size(text: str, environ: Mapping[str, str], host: Host) -> int:
    """Number of workers on this node from torchrun's ``--nproc-per-node``.

    A number, ``cpu`` (the CPUs that we may use), ``gpu`` (visible CUDA devices), ``auto`` (these, else CPUs).

    Raises:
        OptionError: it is none of these, is not positive, or there is no such device.
    """
    shown = f"--nproc-per-node {text!r}"
    text = text.strip()
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal():
        if not (len(text) <= 9 and 1 <= int(text) <= MOST_WORKERS):
            raise OptionError(f"{shown}: it must be 1 to {MOST_WORKERS}")
        return int(text)
    if text == "cpu":
        return len(set(host.allowed_cpus()))
    if text in ("gpu", "cuda", "auto"):
        from dsl.plan.devices import visible_cuda_count

        devices = visible_cuda_count(environ, host.count_cuda())
        if devices or text == "auto":
            return devices or len(set(host.allowed_cpus()))
        raise OptionError(f"{shown}: no CUDA device can be seen on this machine, give a number or cpu")
    from dsl.plan.devices import ACCELERATORS

    if text in ACCELERATORS:
        raise OptionError(f"{shown}: this version of dsl cannot count {text} devices, give their number")
    raise OptionError(f"{shown}: expected a number, auto, cpu or gpu")


def own_devices(request: TorchRequest, environ: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The one device that each of ``count`` workers is to see; empty if all see the same.

    Raises:
        OptionError: the devices that we may use are too few.
    """
    if not request.virtual_local_rank:
        return ()
    variable = HIP_DEVICES_VARIABLE if environ.get(HIP_DEVICES_VARIABLE) else DEVICES_VARIABLE
    value = environ.get(variable)
    if value is None:
        return tuple(map(str, range(count)))
    entries = [entry.strip() for entry in value.split(",")]
    if len(entries) < count:
        raise OptionError(
            f"--virtual-local-rank: {count} workers need as many devices, but {variable}={value} "
            f"names {len(entries)}"
        )
    return tuple(entries[:count])
