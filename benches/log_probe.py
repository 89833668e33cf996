"""A program that passes on the output of writers through the library; `log_rows` runs it afresh.

pass WORKERS DIRECTORY|- PROGRAM...   seconds until all have ended, and processor seconds of this process
detect FLOODS KILLS PROGRAM [WORDS] -- [WORDS]   FLOODS workers do the first words, KILLS others the second
    ones, and are killed one after the other: seconds until each death was noticed, one a line

Results go to stderr, output of the workers to stdout; with a directory each worker has a file there too.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from dsl import Ended, Exited, LaunchSpec, Started, Stdio, Supervisor, WorkerSpec


def pass_on(workers: int, directory: str, program: list[str]) -> None:
    """See the module."""

    def route(rank: int, console: int) -> Stdio:
        path = None if directory == "-" else f"{directory}/{rank}.{console}"
        return Stdio.log(path, console=1)

    specs = [
        WorkerSpec(
            program,
            env={"RANK": str(rank)},
            prefix=f"[rank {rank}] ",
            stdout=route(rank, 1),
            stderr=route(rank, 2),
        )
        for rank in range(workers)
    ]
    supervisor = Supervisor()
    begin, busy = time.monotonic(), time.process_time()
    supervisor.start(LaunchSpec(specs))
    while not any(isinstance(event, Ended) for event in supervisor.wait(routine=False)):
        pass
    print(time.monotonic() - begin, time.process_time() - busy, file=sys.stderr)
    supervisor.close()


def detect(floods: int, kills: int, program: str, words: list[str]) -> None:
    """See the module."""
    cut = words.index("--")
    log = Stdio.log(console=1)
    specs = [WorkerSpec([program, *words[:cut]], stdout=log) for _ in range(floods)]
    specs += [WorkerSpec([program, *words[cut + 1 :]], stdout=log) for _ in range(kills)]
    supervisor = Supervisor()
    supervisor.start(LaunchSpec(specs, on_failure="report"))
    pids: dict[int, int] = {}
    while len(pids) < len(specs):
        pids |= {event.worker: event.pid for event in supervisor.wait() if isinstance(event, Started)}
    time.sleep(1)  # the flood is in full spate
    for worker in range(floods, len(specs)):
        begin_ns = time.time_ns()
        os.kill(pids[worker], signal.SIGKILL)
        noticed_ns = 0
        while not noticed_ns:
            for event in supervisor.wait():
                if isinstance(event, Exited) and event.exit.worker == worker:
                    noticed_ns = event.exit.ended_ns
        print((noticed_ns - begin_ns) / 1e9, file=sys.stderr)
    supervisor.kill()
    supervisor.close()


def main() -> None:
    """Dispatch on the first argument."""
    mode, count, *rest = sys.argv[1:]
    if mode == "pass":
        pass_on(int(count), rest[0], rest[1:])
    else:
        detect(int(count), int(rest[0]), rest[1], rest[2:])


main()
