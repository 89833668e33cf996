"""What the Python threads of a process execute, from the program py-spy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from dsl._record import Record
from dsl.machine.kernel_files import read_fact
from dsl.model.observation import Frame
from dsl.signals import shortage

DUMP_S = 1.5
"""Most time for one stack."""
MOST_FRAMES = 48
"""Most frames of a thread in an answer: the innermost ones."""
LONGEST_NAME = 120
LONGEST_PATH = 300
MOST_BYTES = 16 << 20
"""A longer answer counts as none."""
INSTALL = "pip install py-spy"


class PythonThread(Record):
    """A thread that has run Python."""

    tid: int
    """Its thread id in the kernel; 0: unknown."""
    name: str
    """Its name in Python."""
    frames: tuple[Frame, ...]
    """Innermost first."""
    signal: int
    """It executes its handler of this signal; 0: none."""


def dump(pid: int, within_s: float) -> tuple[Sequence[PythonThread], str]:
    """The threads of a process, which is not stopped for it; or none, and a clause that says why.

    ``within_s``: how long this may take, `DUMP_S` at most.
    """
    why = "there was no time to look at its Python stack"
    # The arguments of functions show a signal handler. A process that runs may change them as we read.
    threads: Sequence[PythonThread] = ()
    for options in (("--locals",), (), ()):
        if within_s <= 0:
            break
        threads, why = _dump(pid, ("--nonblocking", *options), min(within_s, DUMP_S))
        if threads or not why.startswith("py-spy says"):
            break
    return threads, why


def dump_native(pid: int, within_s: float) -> tuple[Sequence[PythonThread], str]:
    """The same with C frames. The process is stopped for some milliseconds."""
    if read_state(pid) in "Tt" or within_s <= 0:
        return (), "its C frames are unknown: it is stopped" if within_s > 0 else "its C frames took too long"
    threads, why = _dump(pid, ("--native", "--full-filenames"), within_s)
    if read_state(pid) == "T":
        # py-spy was killed while it held the process.
        os.kill(pid, 18)
    return threads, why and f"its C frames are unknown: {why}"


def read_state(pid: int) -> str:
    """The kernel's letter for a process; ``X`` if there is none."""
    return read_fact(f"/proc/{pid}/stat").rpartition(") ")[2][:1] or "X"


def _dump(pid: int, options: Sequence[str], within_s: float) -> tuple[Sequence[PythonThread], str]:
    import json
    import shutil
    import subprocess

    places = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    program = shutil.which("py-spy", path=places)
    if program is None:
        return (), f"py-spy is not installed here: {INSTALL}"
    words = [program, "dump", "--json", *options, "--pid", str(pid)]
    try:
        ended = subprocess.run(words, capture_output=True, timeout=within_s, check=False)
        if ended.returncode == 0 and len(ended.stdout) <= MOST_BYTES:
            return [_thread(one) for one in json.loads(ended.stdout)], ""
    except subprocess.TimeoutExpired:
        return (), f"py-spy gave no answer within {within_s:.1f} s"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return (), f"py-spy cannot be used: {shortage(error) or error}"
    return (), _reason(ended.stderr.decode("utf-8", "replace"))


def _reason(text: str) -> str:
    """A clause for the words of py-spy."""
    if "ermission" in text or "not permitted" in text:
        scope = read_fact("/proc/sys/kernel/yama/ptrace_scope")
        if scope == "1":
            return (
                "kernel.yama.ptrace_scope is 1, and a wrapper started the process: let the wrapper `exec` "
                "Python, or run `sysctl kernel.yama.ptrace_scope=0`"
            )
        if scope in ("2", "3"):
            return f"kernel.yama.ptrace_scope is {scope}, which forbids it: root has to set it to 1"
        return "py-spy may not read the process: a container needs the capability SYS_PTRACE for that"
    if "python version" in text:
        return "it is no Python process"
    lines = [line.strip() for line in text.partition("Stack backtrace")[0].splitlines() if line.strip()]
    return f"py-spy says: {lines[-1] if lines else 'nothing'}"


def _thread(found: dict[str, Any]) -> PythonThread:
    frames = found["frames"]
    shown = frames[:MOST_FRAMES]
    return PythonThread(
        tid=int(found["os_thread_id"] or 0),
        name=str(found["thread_name"] or "")[:LONGEST_NAME],
        frames=tuple([_frame(one) for one in shown]),
        signal=max([_signal(one) for one in frames], default=0),
    )


def _frame(found: dict[str, Any]) -> Frame:
    name, path = str(found["name"])[:LONGEST_NAME], str(found["filename"])[-LONGEST_PATH:]
    return Frame(name, path, max(int(found["line"]), 0))


def _signal(frame: dict[str, Any]) -> int:
    """Number of the signal if a frame is a handler: its arguments are a number and the interrupted frame."""
    arguments = [str(one["repr"]) for one in frame["locals"] or () if one["arg"]][-2:]
    if len(arguments) < 2 or not arguments[1].startswith("<frame at"):
        return 0
    return int(arguments[0]) if arguments[0].isdecimal() and 0 < int(arguments[0]) <= 64 else 0
