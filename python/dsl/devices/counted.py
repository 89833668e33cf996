"""A node that counts its own workers: how many (``--nproc-per-node``), and which device each gets."""

from __future__ import annotations

from dsl.devices import ACCELERATORS, PLACEHOLDERS, are_hidden
from dsl.errors import AcceleratorError, FilterError, OptionError
from dsl.words import MOST_WORKERS, counted, parse_integer, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from dsl.devices.offered import DeviceFacts
    from dsl.machine.kernel import Cpus

    class Machine(Protocol):
        """What `dsl.facts.Facts` knows of CPUs and devices, looked up on first use."""

        cpus: Cpus
        devices: DeviceFacts


DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
# On ROCm it overrides the other variable, if it is set.
HIP_DEVICES_VARIABLE = "HIP_VISIBLE_DEVICES"


def count_visible_devices(
    name: str, environ: Mapping[str, str], devices: DeviceFacts, *, alone: bool = False
) -> int:
    """How many devices of an accelerator a process with this environment sees; ``gpu`` is ``cuda``.

    ``alone``: each worker sees one device alone, so every MIG instance that is named counts. Raises
    AcceleratorError if a plug-in has to be asked and fails, and KeyError for the CPU and for a name that is
    no accelerator.
    """
    if name == "cpu":
        raise KeyError(name)
    is_cuda = name in ("cuda", "gpu")
    variable = DEVICES_VARIABLE if is_cuda else ACCELERATORS[name].visible_variable
    count = devices.cuda_count if is_cuda else devices.other_count(name, environ)
    value = environ.get(variable)
    if name in PLACEHOLDERS or value is None:
        return count
    from dsl.devices.masks import GRAMMARS, LEVEL_ZERO_VARIABLE, count_visible, resolve_level_zero

    if variable == LEVEL_ZERO_VARIABLE:
        return len(resolve_level_zero(environ, count))
    names = known_names(value, environ, devices) if is_cuda else ()
    return count_visible(value, count, names, GRAMMARS[variable], alone=is_cuda and alone)


def known_names(value: str, environ: Mapping[str, str], devices: DeviceFacts) -> tuple[str, ...]:
    """What CUDA or HIP calls the devices of the kind whose name stands first in ``CUDA_VISIBLE_DEVICES``.

    Empty: no name stands there, or the names are not known.
    """
    if value.startswith("MIG-"):
        from dsl.devices.nvidia import mig_names

        # The driver's files have only one of the two names of an instance.
        found = devices.survey.devices if devices.survey.source == "nvml" else ()
        names = [name for gpu in found for one in gpu.mig for name in mig_names(one)]
    elif not value.startswith("GPU-"):
        return ()
    elif devices.gpus:
        names = [gpu.uuid for gpu in devices.gpus]
    else:
        from dsl.devices.masks import rocm_names

        names = rocm_names(environ, [one.name for one in devices.located("cuda", environ)])
    return () if "" in names else tuple(dict.fromkeys(names))


def node_accelerator(nproc_per_node: str, environ: Mapping[str, str], devices: DeviceFacts) -> str:
    """The accelerator of this node's workers: the one that ``--nproc-per-node`` names, else the machine's.

    An accelerator other than CUDA comes first, as everywhere, unless its variable hides all its devices.
    ``cuda`` also stands for a machine without accelerators.
    """
    name = nproc_per_node.strip()
    if name in ACCELERATORS or name == "gpu":
        return "cuda" if name == "gpu" else name
    other = devices.other_name
    return "cuda" if other is None or are_hidden(other, environ) else other


def local_world_size(text: str, environ: Mapping[str, str], machine: Machine, *, alone: bool = False) -> int:
    """Number of workers on this node from torchrun's ``--nproc-per-node``.

    A number, ``cpu`` (the CPUs that we may use), ``gpu`` (visible CUDA devices), the name of another
    accelerator (its visible devices), ``auto`` (the devices that the node has, else CPUs). ``alone``: each
    worker sees one device alone, so every MIG instance that is named counts.

    Raises:
        OptionError: the text is none of these, the number is not positive, or there is no such device.
    """
    shown = f"--nproc-per-node {quote(text)}"
    text = text.strip()
    if text.isascii() and text.lstrip("+-").isdecimal():
        number = parse_integer(text)
        if number is None or not 1 <= number <= MOST_WORKERS:
            raise OptionError(f"{shown}: it must be 1 to {MOST_WORKERS}")
        return number
    if text == "cpu":
        return int(machine.cpus.room)
    name = node_accelerator(text, environ, machine.devices) if text == "auto" else text
    if name != "gpu" and name not in ACCELERATORS:
        raise OptionError(f"{shown}: expected a number, auto, cpu or gpu, or an accelerator such as xpu")
    count = count_visible_devices(name, environ, machine.devices, alone=alone)
    if count or text == "auto":
        return count or machine.cpus.room
    kind = "CUDA" if name in ("gpu", "cuda") else name
    raise OptionError(f"{shown}: no {kind} device can be seen on this machine, give a number or cpu")


def own_devices(
    nproc_per_node: str, environ: Mapping[str, str], count: int, devices: DeviceFacts
) -> tuple[Mapping[str, str], ...]:
    """The variables by which each of ``count`` workers sees one device alone (``--virtual-local-rank``).

    torchrun sets ``CUDA_VISIBLE_DEVICES`` for all kinds of devices. We set it for the accelerators that have
    this variable (also Kunlun's, which passes for CUDA) and on a machine without accelerators: Metal and the
    CPU ignore it. Other accelerators get their own variable. Gaudi is refused: ``HABANA_VISIBLE_MODULES``
    must be the same for all processes. Each process takes the module at the place of its local rank, and with
    this option all local ranks are 0 (Gaudi documentation, "Gaudi-to-process Assignment").

    Raises:
        OptionError: there are too few usable devices, or they cannot be shown to one worker alone.
    """
    name = node_accelerator(nproc_per_node, environ, devices)
    if name == "hpu":
        raise OptionError(
            "--virtual-local-rank: hpu devices cannot be shown to one worker each, because "
            "HABANA_VISIBLE_MODULES has to be the same for all of them, leave the option out"
        )
    variable = ACCELERATORS[name].visible_variable
    try:
        if variable == DEVICES_VARIABLE:
            return _own_cuda_devices(environ, count)
        values = _own_values(name, variable, environ, count, devices)
    except FilterError as error:
        raise OptionError(f"--virtual-local-rank: {error}") from None
    return tuple([{variable: value} for value in values])


def _own_cuda_devices(environ: Mapping[str, str], count: int) -> tuple[Mapping[str, str], ...]:
    variable = HIP_DEVICES_VARIABLE if environ.get(HIP_DEVICES_VARIABLE) else DEVICES_VARIABLE
    value = environ.get(variable)
    shown = [*map(str, range(count))] if value is None else [entry.strip() for entry in value.split(",")]
    if len(shown) < count:
        named = f"{variable}={','.join(shown)} names {len(shown)}"
        raise FilterError(f"{counted(count, 'worker', 'needs', 'need')} as many devices, but {named}")
    return tuple([dict.fromkeys((DEVICES_VARIABLE, variable), device) for device in shown[:count]])


def _own_values(
    name: str, variable: str, environ: Mapping[str, str], count: int, devices: DeviceFacts
) -> Sequence[str]:
    from dsl.devices.masks import explain_value, worker_choices

    try:
        total = devices.other_count(name, environ)
    except AcceleratorError:
        total = MOST_WORKERS  # the user, who gives the number of workers, knows better
    choices = worker_choices(variable, environ, total, count)
    if len(choices) >= count:
        return choices[:count]
    value = environ.get(variable, "")
    where = f"{variable}={value} shows {len(choices)}" if value else f"this machine has {total} of {name}"
    hint = explain_value(variable, value)
    need = f"{counted(count, 'worker', 'needs', 'need')} as many devices"
    raise FilterError(f"{need}, but {where}{f': {hint}' if hint is not None else ''}")
