"""Record what torch 2.15 binds workers to into ``golden/torch_numa.json``. Not part of a test run.

From the root of the repository, with a Python that has torch 2.15 and this package::

    python -m tests.contract.record_torch_numa

torch's own function is asked; the files of sysfs, the affinity mask, the devices and the numactl program that it
looks for are those of the machines in `torch_numa_inputs`. Nothing in the golden is written by hand.
"""

from __future__ import annotations

import builtins
import os
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.contract.golden_file import torch_version, write
from tests.contract.torch_numa_inputs import MODES, Machine, address, machines, write_sysfs

from dsl.words import format_ranges


def answers(machine: Machine) -> dict[str, list[str]]:
    """For each mode the CPUs of each device's worker, or the exception that torch raises in place of it.

    There is a worker more than there are devices.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_sysfs(machine, Path(folder))
        return {
            mode: [_ask(machine, folder, mode, rank) for rank in range(len(machine.gpus) + 1)]
            for mode in MODES
        }


def _ask(machine: Machine, folder: str, mode: str, rank: int) -> str:
    binding: Any = import_module("torch.numa.binding")
    listdir, opener = os.listdir, builtins.open

    def moved(path: Any) -> Any:
        return folder + path if isinstance(path, str) and path.startswith("/sys/") else path

    def properties(index: int) -> Any:
        if index >= len(machine.gpus):
            raise AssertionError("Invalid device id")
        domain, bus, device = address(index).replace(".", ":").split(":")[:3]
        return SimpleNamespace(
            pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(device, 16)
        )

    torch: Any = import_module("torch")
    module = SimpleNamespace(get_device_properties=properties)
    with (
        mock.patch.object(
            builtins, "open", lambda path, *args, **kwargs: opener(moved(path), *args, **kwargs)
        ),
        mock.patch.object(os, "listdir", lambda path=".": listdir(moved(path))),
        mock.patch.object(os, "sched_getaffinity", return_value=machine.cpus()),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "device_count", return_value=len(machine.gpus)),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=None),
        mock.patch.object(torch, "get_device_module", return_value=module),
        mock.patch.object(binding.shutil, "which", return_value="/usr/bin/numactl"),
    ):
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        try:
            cpus = binding._get_validated_logical_cpus_to_bind_to(device_index=rank, numa_options=options)
        except Exception as error:  # noqa: BLE001  whatever it raises is the answer
            return type(error).__name__
        return format_ranges(sorted(cpus))


def main() -> None:
    """Record everything."""
    how = (
        f"torch {torch_version()}: CPUs that torch.numa.binding would give to the worker of each device of a machine of "
        "torch_numa_inputs, and to one worker more, by mode; or the exception that it raises"
    )
    cases = [[name, answers(machine)] for name, machine in machines()]
    write("torch_numa", how, cases=cases)


if __name__ == "__main__":
    main()
