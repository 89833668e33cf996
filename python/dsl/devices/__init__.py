"""Accelerators by name: the variable that limits which devices a process sees, and what else they need."""

from __future__ import annotations

from dsl._record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Accelerator(Record):
    """One kind of device."""

    name: str
    """As in ``DS_ACCELERATOR``."""
    visible_variable: str
    """Limits which devices a process sees."""
    export_prefixes: tuple[str, ...] = ()
    """Variables whose names start with one of these go to every host."""


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

PLACEHOLDERS = ("cpu", "hpu", "mps")
"""Accelerators whose runtime does not read the variable: here the variable picks slots, but hides nothing."""


def are_hidden(name: str, environ: Mapping[str, str]) -> bool:
    """Whether the user hides all devices of an accelerator from every process."""
    # An empty mask of Level Zero shows all; -1 and the like are read the same way everywhere.
    value = environ.get(ACCELERATORS[name].visible_variable)
    if value is None or name in PLACEHOLDERS or (name == "xpu" and not value.strip()):
        return False
    return hides_all(value)


def hides_all(value: str) -> bool:
    """Whether a value is meant to hide all devices. A value that names no device by mistake is not."""
    return ends_list(value.partition(",")[0].strip())


def ends_list(entry: str) -> bool:
    """Whether an entry ends the list of devices: empty, negative, or ``NoDevFiles`` (Slurm's word)."""
    return not entry or entry == "NoDevFiles" or (entry.startswith("-") and entry[1:].isdigit())
