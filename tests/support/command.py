"""Command lines of `dsl` and `dslrun` as the tests use them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WITH_ODD_ENTRIES = """
import ctypes, sys
block = [entry.encode() for entry in sys.argv[1].split("|")]
block += [entry for entry in open("/proc/self/environ", "rb").read().split(b"\\0") if entry]
array = ctypes.c_char_p * (len(block) + 1)
words = [word.encode() for word in sys.argv[2:]]
argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
ctypes.CDLL(None).execve(words[0], argv, array(*block, None))
"""
"""A program of Python that executes argv[2:] with the entries of argv[1], parted by ``|``, before its environment."""


def ran(
    line: Sequence[object],
    timeout_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
    *,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """A command to its end, with what it has said. ``environ``: variables beside ours. ``options``: of `subprocess.run`."""
    if environ is not None:
        options["env"] = {**os.environ, **environ}
    words = [str(word) for word in line]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=check, **options)


def dsl_line(
    dsl: Path, workers: int, program: Sequence[object], grace_s: float | None = None, *options: str
) -> list[str]:
    """`dsl`, or the `dslrun` beside it, that runs `program` as it stands, `workers` times on this machine."""
    own = ["--no_python", "--no_local_rank", "--num_gpus", str(workers)]
    if dsl.name == "dslrun":
        own = ["--no-python", f"--nproc-per-node={workers}"]
    grace = [] if grace_s is None else ["--grace", str(grace_s)]
    return [str(dsl), *own, *grace, *options, *map(str, program)]
