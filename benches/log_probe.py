"""A program that passes on the output of writers through the library; `log_rows` runs it afresh.

log_probe.py WORKERS DIRECTORY|- PROGRAM...   seconds from the first start to the end, processor seconds of
this process, on stderr. With a directory each worker has a file there too.
"""

from __future__ import annotations

import sys
import time

from dsl._core import Ended, LaunchSpec, Stdio, Supervisor, WorkerSpec


def main() -> None:
    """See the module."""
    workers, directory, *program = sys.argv[1:]

    def route(rank: int) -> Stdio:
        path = None if directory == "-" else f"{directory}/{rank}.log"
        return Stdio.log(path, console=1)

    specs = [
        WorkerSpec(
            program,
            env={"RANK": str(rank)},
            prefix=f"[rank {rank}] ",
            stdout=route(rank),
            stderr=Stdio.stdout(),
        )
        for rank in range(int(workers))
    ]
    supervisor = Supervisor()
    begin, busy = time.monotonic(), time.process_time()
    supervisor.start(LaunchSpec(specs))
    while not any(isinstance(event, Ended) for event in supervisor.wait(routine=False)):
        pass
    print(time.monotonic() - begin, time.process_time() - busy, file=sys.stderr)
    supervisor.close()


main()
