"""What the kernel knows of a death by SIGKILL. Imported only when a worker died of one, but for `oom_kills`."""

from __future__ import annotations

import os

OOM_WORDS = ("oom-kill:", "Killed process", "Out of memory", "Memory cgroup out of memory")


def kernel_log() -> list[str]:
    """Lines of the kernel's log about out-of-memory kills; none where it may not be read."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    lines = []
    try:
        for _ in range(20_000):
            try:
                line = os.read(log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # the oldest lines were overwritten meanwhile
            except OSError:
                break
            if not line:
                break
            if any(word in line for word in OOM_WORDS):
                lines.append(line)
    finally:
        os.close(log)
    return lines


def oom_kills() -> int:
    """Out-of-memory kills counted in this process's memory cgroup so far; 0 where nobody counts."""
    for path in _counters():
        try:
            with open(path, encoding="ascii") as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return 0


def _counters() -> list[str]:
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    paths = []
    for row in rows:
        if len(row) == 3 and "memory" in row[1].split(","):
            paths.append(f"/sys/fs/cgroup/memory{row[2]}/memory.oom_control")
        if len(row) == 3 and row[0] == "0":
            paths.append(f"/sys/fs/cgroup{row[2]}/memory.events")
    return paths
