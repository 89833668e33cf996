"""What the kernel knows of a death by SIGKILL."""

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
        for line in _read(path).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0


def _counters() -> list[bytes]:
    paths = []
    for line in _read(b"/proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(b":", 2), b"", b"")[:3]
        if b"memory" in controllers.split(b","):
            paths.append(b"/sys/fs/cgroup/memory" + path + b"/memory.oom_control")
        elif number == b"0":
            paths.append(b"/sys/fs/cgroup" + path + b"/memory.events")
    return paths


def _read(path: bytes) -> bytes:
    """A small file of the kernel, without the cost of a text stream; empty when it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, 65536)
    except OSError:
        return b""
    finally:
        os.close(file)
