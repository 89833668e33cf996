"""The process table, read by identity: a pid may be used again, a pid with its start time may not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One process as it was when it was looked at."""

    pid: int
    start: int
    """Clock ticks between boot and its start; with `pid`, its identity."""
    ppid: int
    state: str
    """One letter: R, S, D, T (stopped), Z (zombie) ..."""
    name: str


def find(pid: int, proc: str = "/proc") -> Process | None:
    """The process with that pid, or None when there is none. `proc`: that of another pid namespace."""
    try:
        text = Path(f"{proc}/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    return Process(pid, int(fields[19]), int(fields[1]), fields[0], name)


def alive(process: Process) -> bool:
    """True while that very process (not a later one with its pid) runs."""
    now = find(process.pid)
    return now is not None and now.start == process.start and now.state not in "ZX"


def every_pid() -> list[int]:
    """Every pid of the machine, as /proc shows it."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def carrying(entry: str) -> list[Process]:
    """Living processes whose environment holds ``NAME=value``."""
    needle = b"\0" + entry.encode() + b"\0"
    found = []
    for pid in every_pid():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended
            continue
        if needle in b"\0" + environ:
            process = find(pid)
            if process is not None and process.state not in "ZX":
                found.append(process)
    return found


def environment_value(pid: int, name: str) -> str | None:
    """Value of one variable in the environment a process was started with."""
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key == name.encode():
            return value.decode(errors="surrogateescape")
    return None


def children(pid: int) -> list[int]:
    """Direct children of a process, whichever of its threads forked them; zombies among them."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:  # it has ended
        pass
    return found


def context_switches(pid: int) -> int:
    """How often the threads of a process have been scheduled away so far: an idle process adds none."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        for line in Path(f"/proc/{pid}/task/{task}/status").read_text().splitlines():
            if "ctxt_switches" in line:
                total += int(line.split()[1])
    return total


def processor_ns(pid: int, thread_name: str | None = None) -> int:
    """Nanoseconds for which the threads of a process, or those of one name, have run so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            if thread_name is None or (task / "comm").read_text().strip() == thread_name:
                total += int((task / "schedstat").read_text().split()[0])
    return total
