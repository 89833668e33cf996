"""A control group with a memory limit, to meet the kernel's out-of-memory killer."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Callable[[Sequence[str]], list[str]] | None]:
    """A function that wraps a command to run under the limit; None where no such group can be made."""
    group = _make(limit_bytes)
    if group is None:
        yield None
        return
    script = 'echo 0 > "$0" && exec "$@"'
    try:
        yield lambda command: ["/bin/sh", "-c", script, str(group / "cgroup.procs"), *command]
    finally:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.01)


def _make(limit_bytes: int) -> Path | None:
    places = (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
    )
    for parent, limit, swap in places:
        if not (parent / "cgroup.procs").exists():
            continue
        group = parent / f"dsl-tests-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
            if (group / swap).exists():
                (group / swap).write_text(str(limit_bytes) if "memsw" in swap else "0")
            return group
        with contextlib.suppress(OSError):
            group.rmdir()
    return None
