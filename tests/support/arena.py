"""A control group that bounds how many processes a test can make, as a net under tests that fork."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path


class Arena:
    """Runs commands inside a pids-limited control group, where this machine lets us make one.

    Every process tree of the tests is bounded by its own arguments, so without a group they still end.
    """

    def __init__(self, limit: int) -> None:
        self.group: Path | None = None
        parent = _pids_parent()
        if parent is None:
            return
        group = parent / f"dsl-tests-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(OSError):
            group.mkdir()
            self.group = group
            (group / "pids.max").write_text(str(limit))

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` (same pid) inside the group."""
        if self.group is None:
            return list(command)
        script = 'echo 0 > "$0" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self.group / "cgroup.procs"), *command]

    def close(self) -> None:
        """End whatever is left inside, for a bounded time, and remove the group."""
        if self.group is None:
            return
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pids = (self.group / "cgroup.procs").read_text().split()
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            self.group.rmdir()


@contextlib.contextmanager
def arena(limit: int) -> Iterator[Arena]:
    """An `Arena` for the time of a ``with`` block."""
    made = Arena(limit)
    try:
        yield made
    finally:
        made.close()


def _pids_parent() -> Path | None:
    """Directory under which a group with a process limit can be made: cgroup v1, or v2 with the controller."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        if kind == "cgroup" and "pids" in options.split(",") and "pids" in own:
            candidate = Path(mount + own["pids"])
        elif kind == "cgroup2" and "" in own:
            candidate = Path(mount + own[""])
            control = candidate / "cgroup.subtree_control"
            if not control.exists() or "pids" not in control.read_text().split():
                continue
        else:
            continue
        if os.access(candidate, os.W_OK):
            return candidate
    return None
