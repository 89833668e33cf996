"""Processes of this machine that stand in the way of a job: on its devices, left over, holders of locks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from dsl.machine.kernel_files import read_fact
from dsl.model.health import Holder

VARIABLE = "DSL_JOB_ID"
"""Marks the processes of a job of dsl."""

REAPERS = ("systemd", "init", "tini", "dumb-init")
"""Programs that adopt a process whose parents are gone, beside pid 1."""

MOST_SHOWN = 8
LONGEST_COMMAND = 60
USED_BYTES = 256 << 20
"""Memory of a device that counts as used: a monitor takes less."""


def _all(*facts: str) -> Iterator[dict[str, Any]]:
    """These facts of all processes, None for what this user may not see; nothing if psutil is missing."""
    try:
        from psutil import process_iter
    except ImportError:
        return
    for one in process_iter(["pid", *facts]):
        yield one.info


def command_of(pid: int) -> str:
    """The command of a process, cut short."""
    words = read_fact(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return (words or read_fact(f"/proc/{pid}/comm"))[:LONGEST_COMMAND]


def left_over() -> tuple[Holder, ...]:
    """Processes with a job's token whose supervisor is gone: init or another reaper has adopted them."""
    if "dsl" in command_of(1):
        return ()  # a guard adopts what its own job leaves, and clears it away
    own = os.environ.get(VARIABLE)
    found = []
    for one in _all("environ", "ppid"):
        token, parent = (one["environ"] or {}).get(VARIABLE), one["ppid"]
        if not token or token == own:
            continue
        if parent == 1 or (parent and read_fact(f"/proc/{parent}/comm") in REAPERS):
            found.append(Holder(one["pid"], command_of(one["pid"]), ""))
    return tuple(found[:MOST_SHOWN])


def count_tasks(uid: int) -> int:
    """Threads of all processes of a user."""
    own = [one for one in _all("uids", "num_threads") if one["uids"] and one["uids"].real == uid]
    return sum(one["num_threads"] or 0 for one in own)


def on_devices(count: int) -> tuple[Holder, ...]:
    """Processes that compute on the NVIDIA devices of this machine, as far as the driver names them."""
    from dsl.devices.nvml import Nvml, NvmlError

    found = []
    try:
        with Nvml() as driver:
            for number in range(count):
                device = driver.ask("device", number=number)
                for pid, used in driver.ask("processes", device):
                    if (used is None or used >= USED_BYTES) and pid != os.getpid():
                        size = "" if used is None else f" ({used >> 20} MB)"
                        command = command_of(pid) or "of another user or container"
                        found.append(Holder(pid, command, f"GPU {number}{size}"))
    except NvmlError:
        pass  # the survey of the devices says so
    return tuple(found[:MOST_SHOWN])


def unheld(paths: Sequence[str]) -> tuple[str, ...]:
    """Those of some files that no process has open. A process of another user or host may have one open."""
    if not paths:
        return ()
    held = {file.path for one in _all("open_files") for file in one["open_files"] or ()}
    return tuple([path for path in paths if os.path.realpath(path) not in held])
