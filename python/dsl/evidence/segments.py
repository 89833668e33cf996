"""Shared memory that killed ranks have left in /dev/shm: it takes memory until somebody removes it."""

from __future__ import annotations

import contextlib
import os
import stat

from dsl.lists import name_few, parse_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl import Exit

FOLDER = "/dev/shm"  # noqa: S108  the shared memory itself, where nothing is made
WITH_PID = ("torch_", "__KMP_REGISTERED_LIB_")
"""Begins of the names that torch and OpenMP choose, before the pid of the process that makes the segment."""
OTHERS = ("psm_", "nccl-", "cuda.shm.", "sem.")
"""Begins of the names that Python, NCCL, CUDA and the C library choose."""
FIRST_NAMESPACE = 0xEFFFFFFC


def clear_segments(exits: Sequence[Exit], folder: str = FOLDER) -> list[str]:
    """Remove what killed workers have left there without doubt, and say what was removed and what is left.

    Without doubt is what has the pid of a worker in its name, was written in its life, and is open nowhere.
    Only the first pid namespace shows all processes, and gives a pid to one of them alone.
    """
    killed = {one.pid: one for one in exits if one.signal is not None}
    since_ns = min([one.started_ns for one in killed.values()], default=0)
    is_first = os.stat("/proc/self/ns/pid").st_ino == FIRST_NAMESPACE
    found: dict[str, bool] = {}
    for entry in os.scandir(folder) if killed and os.path.isdir(folder) else ():
        try:
            about, end = entry.stat(follow_symlinks=False), entry.name
        except FileNotFoundError:  # another job has removed it meanwhile
            continue
        for begin in WITH_PID:
            end = end.removeprefix(begin)
        maker = killed.get(parse_number(end.partition("_")[0]) or 0) if end != entry.name else None
        is_segment = stat.S_ISREG(about.st_mode) and entry.name.startswith((*WITH_PID, *OTHERS))
        if is_segment and about.st_uid == os.geteuid() and about.st_mtime_ns >= since_ns:
            found[entry.path] = is_first and maker is not None and about.st_mtime_ns <= maker.ended_ns
    left = sorted(found.keys() - _used(folder)) if found else []
    removed = [path for path in left if found[path]]
    for path in removed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    left = [path for path in left if not found[path]]
    lines = [f"removed shared memory that killed ranks had left: {name_few(removed)}"] if removed else []
    why = "killed ranks may have left shared memory, remove what no other job needs"
    return [*lines, f"{why}: {name_few(left)}"] if left else lines


def _used(folder: str) -> set[str]:
    """Files of the folder that a process has mapped or open, as far as we may see."""
    from glob import iglob

    used = set()
    for path in iglob("/proc/[0-9]*/maps"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            used |= {folder + line.rstrip("\n").partition(folder)[2] for line in file if folder in line}
    for path in iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            used.add(os.readlink(path))
    return used
