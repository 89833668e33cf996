"""Command lines of `dsl` as the tests use them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


def dsl_line(
    dsl: Path, workers: int, program: Sequence[str], grace_s: float | None = None, *options: str
) -> list[str]:
    """`dsl` that runs `program` as it stands, `workers` times on this machine."""
    grace = [] if grace_s is None else ["--grace", str(grace_s)]
    return [
        str(dsl),
        "--no_python",
        "--no_local_rank",
        "--num_gpus",
        str(workers),
        *grace,
        *options,
        *program,
    ]
