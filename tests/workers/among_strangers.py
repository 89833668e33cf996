"""Runs a command in a pid namespace where strangers have the lowest numbers, and prints as JSON what became of them.

To be started as the first process of that namespace. argv: the helper program, a folder, how many strangers, the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 60


def living() -> dict[int, str]:
    """Processes of this namespace that have not ended, with their names."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            name, rest = (entry / "stat").read_text().partition("(")[2].rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if rest.split()[0] not in "ZX":
            found[int(entry.name)] = name
    return found


def main() -> None:
    """See the module."""
    child, folder, count, *command = sys.argv[1:]
    trace, ready = Path(folder, "trace"), Path(folder, "ready")
    words = [child, "setsid", "catch", "ALL", "trace", str(trace), "note", str(ready), "%p", "pause"]
    strangers = [subprocess.Popen(words) for _ in range(int(count))]
    deadline = time.monotonic() + PATIENCE_S
    while not ready.exists() or len(ready.read_text().splitlines()) < len(strangers):
        if time.monotonic() > deadline:
            sys.exit("the strangers have not begun")
        time.sleep(0.01)
    job = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    known = {os.getpid(), *[one.pid for one in strangers]}
    result = {
        "code": job.returncode,
        "out": job.stdout,
        "err": job.stderr,
        "numbers": sorted(one.pid for one in strangers),
        "dead": [one.pid for one in strangers if one.poll() is not None],
        "signalled": trace.read_text().splitlines() if trace.exists() else [],
        "left": {pid: name for pid, name in living().items() if pid not in known},
    }
    print(json.dumps(result))


main()
