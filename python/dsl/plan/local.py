"""What ``dslrun`` makes of this node: how many workers it has, and the device of each."""

from __future__ import annotations

from dsl.errors import FilterError, OptionError

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

    A number, ``cpu`` (the CPUs that we may use), ``gpu`` (visible CUDA devices), the name of another
    accelerator (its visible devices), ``auto`` (whatever devices there are, else CPUs).

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
    from dsl.plan.devices import ACCELERATORS, visible_cuda_count

    name = (host.find_other() or "gpu") if text == "auto" else text
    if name in ("gpu", "cuda"):
        devices = visible_cuda_count(environ, host.count_cuda(), lambda: [gpu.uuid for gpu in host.gpus()])
    elif name in ACCELERATORS:
        from dsl.plan.accelerators import count_devices

        devices = count_devices(name, environ, host.count_cuda, host.count_other)
    else:
        raise OptionError(f"{shown}: expected a number, auto, cpu or gpu, or an accelerator such as xpu")
    if devices or text == "auto":
        return devices or len(set(host.allowed_cpus()))
    kind = "CUDA" if name in ("gpu", "cuda") else name
    raise OptionError(f"{shown}: no {kind} device can be seen on this machine, give a number or cpu")


def own_devices(request: TorchRequest, environ: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The one device that each of ``count`` workers is to see; empty if all see the same.

    Raises:
        OptionError: the devices that we may use are too few.
    """
    if not request.virtual_local_rank:
        return ()
    from dsl.plan.visible import masks

    variable = HIP_DEVICES_VARIABLE if environ.get(HIP_DEVICES_VARIABLE) else DEVICES_VARIABLE
    value = environ.get(variable)
    shown = None if value is None else [entry.strip() for entry in value.split(",")]
    try:
        return masks(shown, count, variable)
    except FilterError as error:
        raise OptionError(f"--virtual-local-rank: {error}") from None
