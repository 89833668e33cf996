"""Asking a torch plug-in how many devices there are, in a child process: we never import torch ourselves."""

from __future__ import annotations

import os
import sys

from dsl.errors import AcceleratorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

ASK_TIMEOUT_S = 120.0
"""Importing torch and a plug-in from a cold network file system takes a minute."""

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


def ask_plug_in(
    plug_in: str,
    function: str,
    environ: Mapping[str, str],
    executable: str = sys.executable,
    timeout_s: float = ASK_TIMEOUT_S,
) -> int:
    """Number of devices that a function of torch or of a plug-in returns, called in a child process.

    ``plug_in``: the package to import besides torch (empty: none); ``function``: its name with that of its
    module; ``environ``: the child's environment; ``executable``: the interpreter of the workers.

    Raises:
        AcceleratorError: it cannot be imported, does not end in time, or does not say a number.
    """
    import subprocess
    from signal import SIGKILL
    from tempfile import TemporaryFile

    name = plug_in or "torch"
    argv = [executable, "-c", _PROGRAM, plug_in, function]
    # Files: the end of a pipe comes only when whatever the plug-in has started closes it too.
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
