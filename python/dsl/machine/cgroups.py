"""What the control groups of this process, versions 1 and 2, leave it of memory, processes and CPU time."""

from __future__ import annotations

import os

from dsl._record import Record
from dsl.machine.kernel_files import read_fact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NO_LIMIT = 1 << 60
"""Version 1 writes a number like this for "no limit"."""


class Room(Record):
    """What is left. None: there is no limit."""

    memory_bytes: int | None = None
    memory_limit: str = ""
    """The file with the limit."""
    tasks: int | None = None
    """Processes and threads."""
    tasks_limit: str = ""
    """The file with the limit."""
    cpus: float | None = None
    """CPUs that may be used at a time."""


def room_left(root: str = "/") -> Room:
    """The least that any of our groups and of the groups above them leaves."""
    memory: list[tuple[int, str]] = []
    tasks: list[tuple[int, str]] = []
    cpus: list[float] = []
    for folder in _folders(root):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _number(folder, limit), _number(folder, used)
            if most is not None and now is not None and most < NO_LIMIT:
                fields = [line.split() for line in read_fact(f"{folder}/memory.stat").splitlines()]
                kept = next((int(one[1]) for one in fields if one[:1] == [cache]), 0)
                memory.append((max(most - now + kept, 0), f"{folder}/{limit} ({most >> 20} MB)"))
        most, now = _number(folder, "pids.max"), _number(folder, "pids.current")
        if most is not None and now is not None:
            tasks.append((max(most - now, 0), f"{folder}/pids.max ({most})"))
        quota, period = [*read_fact(f"{folder}/cpu.max").split(), "", ""][:2]
        if quota.isdigit() and period.isdigit():
            cpus.append(int(quota) / max(int(period), 1))
        old, each = _number(folder, "cpu.cfs_quota_us"), _number(folder, "cpu.cfs_period_us")
        if old is not None and each:
            cpus.append(old / each)
    most_memory = min(memory, default=(None, ""))
    most_tasks = min(tasks, default=(None, ""))
    return Room(most_memory[0], most_memory[1], most_tasks[0], most_tasks[1], min(cpus, default=None))


def _number(folder: str, name: str) -> int | None:
    """A number of 0 or more in a file of a group; None: there is no such file, or no limit."""
    text = read_fact(f"{folder}/{name}")
    return int(text) if text.isdecimal() else None


def _folders(root: str) -> Iterator[str]:
    """The folders of our groups and of all groups above them, as far as they are mounted here."""
    mounts = [line.split() for line in read_fact(os.path.join(root, "proc/self/mountinfo")).splitlines()]
    for line in read_fact(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        for words in mounts:
            rest = words[words.index("-") + 1 :] if "-" in words[5:] else []
            is_ours = bool(rest) and (
                rest[0] == "cgroup2"
                if not names
                else rest[0] == "cgroup" and {*names.split(",")} <= {*rest[-1].split(",")}
            )
            if not is_ours or len(words) < 5:
                continue
            top, point = words[3], os.path.join(root, words[4].lstrip("/"))
            inner = os.path.relpath(path, top) if path.startswith(top) else "."
            folder = os.path.normpath(os.path.join(point, inner)) if not inner.startswith("..") else point
            while folder.startswith(point.rstrip("/")):
                yield folder
                if folder == point:
                    break
                folder = os.path.dirname(folder)
            break
