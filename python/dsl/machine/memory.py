"""How much memory a process uses."""

from __future__ import annotations

import os


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has for itself; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _size, resident, shared = file.read().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
