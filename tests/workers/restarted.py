"""A worker that fails with 3 in the first attempts and leaves, each time, a descendant that is hard to kill.

Arguments: directory to write to, number of attempts that fail. Each life writes ``ATTEMPT-RANK.json``: its
environment, and the processes of earlier attempts that it found alive. Rank 1 is the one that fails.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

folder, failing = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
count = int(os.environ["LOCAL_WORLD_SIZE"])


def started(pid: int) -> str | None:
    """With the pid, the identity of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def publish(name: str, value: object) -> None:
    """Write a file in one step."""
    path = folder / f"{name}.part"
    path.write_text(json.dumps(value), encoding="utf-8")
    path.rename(folder / f"{name}.json")


found = []
for path in folder.glob("pid-*.json"):
    pid, start = json.loads(path.read_text(encoding="utf-8"))
    if not path.name.startswith(f"pid-{attempt}-") and started(pid) == start:
        found.append(pid)
publish(f"{attempt}-{rank}", {"env": dict(os.environ), "alive": found})

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    publish(f"pid-{attempt}-{rank}-child", [os.getpid(), started(os.getpid())])
    signal.pause()
publish(f"pid-{attempt}-{rank}-worker", [os.getpid(), started(os.getpid())])
if attempt < failing:
    if rank == 1:
        deadline = time.monotonic() + 10
        while len(list(folder.glob(f"pid-{attempt}-*.json"))) < 2 * count and time.monotonic() < deadline:
            time.sleep(0.005)
        sys.exit(3)
    signal.pause()
