"""The accelerators of this machine, found without importing torch. Each answer is kept.

This module takes the first look of every launch: a few file names. Modules that only some machines need are
imported only there: `dsl.devices.others` (devices other than CUDA's, and where a device sits), and
`dsl.devices.nvidia` (what the driver says).
"""

from __future__ import annotations

import os
import sys

from dsl._record import kept
from dsl.machine.kernel_files import has_intel_torch, has_nvidia_driver, list_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.devices.nvidia import Device, Survey
    from dsl.devices.others import LocatedDevice

OTHER_FILES = ("davinci", "accel", "hl", "cambricon_dev", "xpu", "tcaicard", "biren")
"""How the names of accelerators other than GPUs start in ``/dev``."""


class DeviceFacts:
    """Devices of the machine below ``root``, with those that the environment hides."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._counts: dict[str, int] = {}

    @kept
    def cuda_count(self) -> int:
        """Devices that torch calls CUDA devices, see `count_cuda_devices`."""
        return count_cuda_devices(self._root)

    @kept
    def other_name(self) -> str | None:
        """The accelerator that comes before CUDA, None if there is none, see `find_other_accelerator`."""
        return find_other_accelerator(self._root)

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


def find_other_accelerator(root: str = "/") -> str | None:
    """The accelerator that comes before CUDA on this machine, None if there is none.

    See `dsl.devices.others.find_accelerator`: it is imported only if a file in ``/dev`` may be such a device.
    """
    names = list_names(os.path.join(root, "dev"))
    # Most machines have a graphics device, but few have a torch for Intel's devices.
    is_intel = "dri" in names and any(has_intel_torch(folder) for folder in sys.path)
    if not is_intel and not any(name.startswith(OTHER_FILES) for name in names):
        return None
    from dsl.devices.others import find_accelerator

    return find_accelerator(root)


def count_cuda_devices(root: str = "/", environ: Mapping[str, str] | None = None) -> int:
    """NVIDIA devices of this machine or container, whatever ``CUDA_VISIBLE_DEVICES`` says, else AMD ones.

    The driver's directory in ``/proc`` and the device files in ``/dev`` answer in microseconds. If they
    disagree (a container that was given some devices, device files not yet made, WSL), we ask the driver
    through pynvml; without pynvml the device files decide.

    torch calls AMD devices CUDA devices, too. Those count that ``ROCR_VISIBLE_DEVICES`` and
    ``HIP_VISIBLE_DEVICES`` of ``environ`` (ours, if None) leave visible.
    """
    in_proc = len(list_names(os.path.join(root, "proc/driver/nvidia/gpus")))
    names = list_names(os.path.join(root, "dev"))
    in_dev = len([name for name in names if name.startswith("nvidia") and name[6:].isdigit()])
    if not in_proc and not in_dev and "kfd" in names:
        from dsl.devices.others import count_amd

        return count_amd(os.environ if environ is None else environ, root)
    if in_proc == in_dev and (in_proc or "dxg" not in names):
        return in_proc
    from dsl.devices import nvidia

    answer = nvidia.count(root)
    return (in_dev or in_proc) if answer is None else answer
