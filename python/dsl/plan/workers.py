"""The number of workers of a node that counts its own workers: torchrun's ``--nproc-per-node``."""

from __future__ import annotations

from dsl.devices.accelerators import ACCELERATORS
from dsl.devices.nproc import count_visible_devices, node_accelerator
from dsl.errors import OptionError
from dsl.lists import MOST_WORKERS, parse_integer, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.facts import Facts


def local_world_size(text: str, environ: Mapping[str, str], facts: Facts, *, alone: bool = False) -> int:
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
        return len(facts.cpus.allowed)
    name = node_accelerator(text, environ, facts.devices) if text == "auto" else text
    if name != "gpu" and name not in ACCELERATORS:
        raise OptionError(f"{shown}: expected a number, auto, cpu or gpu, or an accelerator such as xpu")
    count = count_visible_devices(name, environ, facts.devices, alone=alone)
    if count or text == "auto":
        return count or len(facts.cpus.allowed)
    kind = "CUDA" if name in ("gpu", "cuda") else name
    raise OptionError(f"{shown}: no {kind} device can be seen on this machine, give a number or cpu")
