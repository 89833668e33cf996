"""Runs one group whose output the engine passes on: argv[1] is the group as JSON, argv[2] a file for the result.

Group: {"workers": N, "argv": [...], "files": DIR or null, "console": 1, 2 or null, "joined": bool, "prefix": bool,
"terminal": bool, "options": {keywords of LaunchSpec}}. Result: {"exits": {worker: status}, "notices": [[kind, worker,
path, errno, count]], "tail": text, "began": monotonic seconds, "ended": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from dsl import Ended, Exited, LaunchSpec, LogNotice, Stdio, Supervisor, WorkerSpec


def stream(group: dict[str, Any], rank: int, name: str, console: int | None) -> Stdio:
    """The route of one stream."""
    path = f"{group['files']}/{rank}.{name}" if group["files"] else None
    return Stdio.log(path, console=console, terminal=group["terminal"])  # type: ignore[arg-type]


def main() -> None:
    """See the module."""
    group = json.loads(sys.argv[1])
    console = group["console"]
    options = group["options"]
    options["line_files"] = [tuple(item) for item in options.get("line_files", [])]
    workers = [
        WorkerSpec(
            group["argv"],
            env={"RANK": str(rank)},
            stdout=stream(group, rank, "out", console),
            stderr=Stdio.stdout() if group["joined"] else stream(group, rank, "err", console and 2),
            prefix=f"[rank {rank}] " if group["prefix"] else "",
        )
        for rank in range(group["workers"])
    ]
    result: dict[str, Any] = {"exits": {}, "notices": [], "tail": None, "began": time.monotonic()}
    supervisor = Supervisor()
    supervisor.start(LaunchSpec(workers, **options))
    while result["tail"] is None:
        for event in supervisor.wait():
            if isinstance(event, Exited):
                result["exits"][event.exit.worker] = event.exit.status
            elif isinstance(event, LogNotice):
                result["notices"].append([event.kind, event.worker, event.path, event.errno, event.count])
            elif isinstance(event, Ended):
                result["tail"] = event.tail.decode(errors="replace")
    result["ended"] = time.monotonic()
    supervisor.close()
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(result, file)
    # A console thread may stand in a write for ever.
    os._exit(0)


main()
