"""How the devices of each accelerator are counted without torch, by the files that their drivers make.

The names are those of `dsl.devices.accelerators.ACCELERATORS`. This module is imported only if there may be
devices other than NVIDIA's. If one card may be several devices for torch, a child process asks the
accelerator's torch plug-in: we never import torch ourselves.

Sources: the kernel's documentation of its drivers (amdkfd, i915, xe, habanalabs), and the vendors'
instructions for passing devices into containers.
"""

from __future__ import annotations

import os
import sys

from dsl._record import Record
from dsl.devices.accelerators import ACCELERATORS
from dsl.devices.locations import gaudi_folders, read_devices
from dsl.devices.masks import GRAMMARS, count_visible, resolve_rocm
from dsl.errors import AcceleratorError
from dsl.machine.kernel_files import has_intel_torch, numbered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import IO

    Counter = Callable[[str], int]
    """Number of devices below this root directory."""


ASK_TIMEOUT_S = 120.0
"""Seconds to wait for a plug-in: importing it and torch from a cold network file system takes a minute."""

_PROGRAM = """\
import sys
if sys.path[0] == "":
    del sys.path[0]  # a folder named torch may lie here
import importlib
plug_in, function = sys.argv[1:]
importlib.import_module("torch")
if plug_in:
    importlib.import_module(plug_in)
first, *names = function.split(".")
found = sys.modules[first]
for name in names:
    found = getattr(found, name)
print("devices", int(found()), flush=True)
"""


def count_amd(environ: Mapping[str, str], root: str = "/") -> int:
    """Number of AMD devices that ``ROCR_VISIBLE_DEVICES`` and ``HIP_VISIBLE_DEVICES`` leave visible.

    HIP reads ``CUDA_VISIBLE_DEVICES`` if its own variable is not set, but we ignore it here: it is the
    accelerator's own variable, as for NVIDIA devices.
    """
    rest = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return len(resolve_rocm(rest, [one.name for one in read_devices("cuda", environ, root)]))


def count_gaudi(root: str) -> int:
    """Gaudi devices: ``/dev/accel/accel0``, ... of habanalabs, before Linux 6.2 ``/dev/hl0``, ..."""
    return len(gaudi_folders(root)) or len(numbered(os.path.join(root, "dev"), "hl"))


def _numbered(folder: str, prefix: str) -> Counter:
    """Counts device files such as ``/dev/davinci0``; a container has those that it was given."""
    return lambda root: len(numbered(os.path.join(root, folder), prefix))


class Counting(Record):
    """How one accelerator is found and counted."""

    files: Counter
    """Counts its device files."""
    plug_in: str
    """The package whose import makes torch know the devices; empty: torch itself."""
    function: str
    """Dotted name of the function that counts the devices."""
    exact: bool = True
    """Each device file is one device; False: a device file may be several devices."""


COUNTINGS = {
    "xpu": Counting(lambda root: len(read_devices("xpu", {}, root)), "", "torch.xpu.device_count"),
    "npu": Counting(_numbered("dev", "davinci"), "torch_npu", "torch.npu.device_count"),
    "sdaa": Counting(_numbered("dev", "tcaicard"), "torch_sdaa", "torch.sdaa.device_count", exact=False),
    "mps": Counting(lambda _root: int(sys.platform == "darwin"), "", "torch.mps.device_count"),
    "hpu": Counting(count_gaudi, "habana_frameworks.torch.hpu", "habana_frameworks.torch.hpu.device_count"),
    "mlu": Counting(_numbered("dev", "cambricon_dev"), "torch_mlu", "torch.mlu.device_count"),
    "supa": Counting(_numbered("dev/biren", "card_"), "torch_supa", "torch.supa.device_count", exact=False),
    "klxpu": Counting(_numbered("dev", "xpu"), "torch_xmlir", "torch.cuda.device_count"),
}
"""By accelerator, in the order in which DeepSpeed looks for them; CUDA devices come after all of them."""


def find_accelerator(root: str = "/", path: Sequence[str] | None = None) -> str | None:
    """The accelerator that DeepSpeed would choose before CUDA, as far as files can tell; None if none.

    It must have a device file, and its plug-in (for ``xpu``: a torch built for it) must lie on ``path``
    (ours, if None). DeepSpeed imports the plug-ins instead. It takes ``npu``, ``sdaa``, ``hpu``, ``mlu`` and
    ``klxpu`` as soon as the import succeeds, even on machines without such a device.
    """
    folders = sys.path if path is None else path
    for name, counting in COUNTINGS.items():
        if counting.files(root) and any(_has_plug_in(name, counting, folder) for folder in folders):
            return name
    return None


def _has_plug_in(name: str, counting: Counting, folder: str) -> bool:
    if name == "mps":
        return os.path.isdir(os.path.join(folder, "torch"))
    if name == "xpu":
        return has_intel_torch(folder)
    return os.path.isdir(os.path.join(folder, counting.plug_in.partition(".")[0]))


def count_accelerator(
    name: str,
    environ: Mapping[str, str],
    root: str = "/",
    ask: Callable[[str, str, Mapping[str, str]], int] | None = None,
) -> int:
    """Devices of an accelerator on this machine, whatever its own variable hides.

    ``ask`` counts if the files cannot; None: `ask_plug_in`.

    Raises:
        AcceleratorError: the plug-in had to be asked, and did not answer.
    """
    counting = COUNTINGS[name]
    hidden = ACCELERATORS[name].visible_variable
    found = len(read_devices("xpu", environ, root)) if name == "xpu" else counting.files(root)
    if found and not counting.exact:
        if ask is None:
            ask = ask_plug_in
        shown = {key: environ[key] for key in environ if key != hidden}
        found = ask(counting.plug_in, counting.function, shown)
    variable = "HABANA_VISIBLE_MODULES"  # for processes, beside the accelerator's own; the user sets it
    if name != "hpu" or variable not in environ:
        return found
    # Module numbers are not indices: the modules that we were given may have any numbers.
    return min(found, count_visible(environ[variable], 64, (), GRAMMARS[variable]))


def ask_plug_in(
    plug_in: str,
    function: str,
    environ: Mapping[str, str],
    executable: str = sys.executable,
    timeout_s: float = ASK_TIMEOUT_S,
) -> int:
    """Number of devices that a function of torch or of a plug-in returns, called in a child process.

    ``plug_in``: the package to import besides torch (empty: none); ``function``: its dotted name, with its
    module; ``environ``: the child's environment; ``executable``: the interpreter of the workers.

    Raises:
        AcceleratorError: the plug-in cannot be imported, does not answer in time, or gives no number.
    """
    import subprocess
    from signal import SIGKILL
    from tempfile import TemporaryFile

    name = plug_in or "torch"
    argv = [executable, "-c", _PROGRAM, plug_in, function]
    # Files, not pipes: a pipe ends only when every process that the plug-in has started closes it, too.
    with TemporaryFile() as output, TemporaryFile() as complaint:
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=complaint,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            raise AcceleratorError(_failure(name, f"{executable}: {error.strerror}")) from None
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AcceleratorError(_failure(name, f"no answer in {timeout_s:g} s")) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, SIGKILL)
                child.wait()
        answer, errors = (_lines(file) for file in (output, complaint))
    counts = [line.split()[1] for line in answer if line.startswith("devices ")]
    if child.returncode or len(counts) != 1 or not counts[0].isdigit():
        raise AcceleratorError(_failure(name, errors[-1] if errors else f"exit code {child.returncode}"))
    return int(counts[0])


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    lines = file.read().decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _failure(name: str, why: str) -> str:
    return f"devices cannot be counted, asking {name} in a child process failed: {why}; give their number"
