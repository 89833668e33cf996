"""Processes of this machine that stand in the way of a job: on its devices, left over, holders of locks."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dsl.machine.kernel_files import list_names, read_fact, read_fields
from dsl.model.health import Holder

TOKEN = b"DSL_JOB_ID="
"""Marks the processes of a job of dsl, in their environment."""

REAPERS = ("systemd", "init", "tini", "dumb-init")
"""Programs that adopt a process whose parents are gone, beside pid 1."""

MOST_SHOWN = 8
LONGEST_COMMAND = 60
LARGEST_ENVIRONMENT = 1 << 20
USED_BYTES = 256 << 20
"""Memory of a device that counts as used: a monitor takes less."""


def pids() -> list[int]:
    """All processes."""
    return [int(name) for name in list_names("/proc") if name.isdecimal()]


def command_of(pid: int) -> str:
    """The command of a process, cut short."""
    words = read_fact(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return (words or read_fact(f"/proc/{pid}/comm"))[:LONGEST_COMMAND]


def token_of(pid: int) -> bytes:
    """The token of the job that a process belongs to; empty: none, or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            words = file.read(LARGEST_ENVIRONMENT).split(b"\0")
    except OSError:
        return b""
    return next((word[len(TOKEN) :] for word in words if word.startswith(TOKEN)), b"")


def _parent(pid: int) -> int:
    text = read_fields(f"/proc/{pid}/status").get("PPid", "")
    return int(text) if text.isdecimal() else 0


def left_over() -> tuple[Holder, ...]:
    """Processes with a job's token whose supervisor is gone: init or another reaper has adopted them."""
    if "dsl" in command_of(1):
        return ()  # a guard adopts what its own job leaves, and clears it away
    own = os.environb.get(TOKEN[:-1], b"")
    found = []
    for pid in pids():
        token = token_of(pid)
        if not token or token == own:
            continue
        parent = _parent(pid)
        if parent == 1 or (parent and read_fact(f"/proc/{parent}/comm") in REAPERS):
            found.append(Holder(pid, command_of(pid), ""))
    return tuple(found[:MOST_SHOWN])


def count_tasks(uid: int) -> int:
    """Threads of all processes of a user."""
    count = 0
    for pid in pids():
        fields = read_fields(f"/proc/{pid}/status")
        if fields.get("Uid", "").split()[:1] == [str(uid)] and fields.get("Threads", "").isdecimal():
            count += int(fields["Threads"])
    return count


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
    held = set()
    for pid in pids():
        folder = f"/proc/{pid}/fd"
        for name in list_names(folder):
            try:
                held.add(os.readlink(f"{folder}/{name}"))
            except OSError:
                continue
    return tuple([path for path in paths if os.path.realpath(path) not in held])
