"""A program that starts a group through the library and prints numbers; `engine_rows` runs it afresh.

spawn RESIDENT_MIB WORKERS   seconds a worker until all of /bin/true have been executed
cpu WORKERS PROGRAM...       processor seconds of this process a worker, with two pipes each
detect WORKERS KILLS PROGRAM...   seconds from killing one worker until its death was noticed, one a line
"""

from __future__ import annotations

import os
import signal
import sys
import time

from dsl._core import Ended, Event, Exited, LaunchSpec, Started, Stdio, Supervisor, WorkerSpec


def collect(supervisor: Supervisor, kind: type[Started | Exited | Ended], count: int) -> list[Event]:
    """Take events until `count` of one kind have come."""
    events: list[Event] = []
    seen = 0
    while seen < count:
        new = supervisor.wait(60.0)
        if not new:
            raise RuntimeError(f"only {seen} of {count} {kind.__name__}")
        events += new
        seen += sum(isinstance(event, kind) for event in new)
    return events


def spawn(resident_mib: int, workers: int) -> None:
    """See the module."""
    resident = bytearray(resident_mib << 20)
    for offset in range(0, len(resident), 4096):
        resident[offset] = 1
    supervisor = Supervisor()
    spec = LaunchSpec([WorkerSpec(["/bin/true"])] * workers)
    begin = time.monotonic()
    supervisor.start(spec)
    collect(supervisor, Started, workers)
    print((time.monotonic() - begin) / workers)
    collect(supervisor, Ended, 1)
    supervisor.close()


def cpu(workers: int, program: list[str]) -> None:
    """See the module."""
    supervisor = Supervisor()
    worker = WorkerSpec(program, stdout=Stdio.pipe(), stderr=Stdio.pipe())
    spec = LaunchSpec([worker] * workers)
    begin = time.process_time()
    supervisor.start(spec)
    collect(supervisor, Started, workers)
    print((time.process_time() - begin) / workers)
    supervisor.kill()
    supervisor.close()


def detect(workers: int, kills: int, program: list[str]) -> None:
    """See the module."""
    supervisor = Supervisor()
    supervisor.start(LaunchSpec([WorkerSpec(program)] * workers, on_failure="report"))
    events = collect(supervisor, Started, workers)
    pids = [event.pid for event in events if isinstance(event, Started)]
    time.sleep(1)  # the workers' own start is not what is measured
    for pid in pids[:: max(1, workers // kills)][:kills]:
        begin_ns = time.time_ns()
        os.kill(pid, signal.SIGKILL)
        (last,) = [event for event in collect(supervisor, Exited, 1) if isinstance(event, Exited)]
        print((last.exit.ended_ns - begin_ns) / 1e9)
    supervisor.kill()
    supervisor.close()


def main() -> None:
    """Dispatch on the first argument."""
    mode, *rest = sys.argv[1:]
    if mode == "spawn":
        spawn(int(rest[0]), int(rest[1]))
    elif mode == "cpu":
        cpu(int(rest[0]), rest[1:])
    else:
        detect(int(rest[0]), int(rest[1]), rest[2:])


main()
