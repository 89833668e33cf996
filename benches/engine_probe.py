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

from dsl import Ended, Event, Exited, LaunchSpec, Started, Stdio, Supervisor, WorkerSpec


class Reader:
    """Takes events of one supervisor and keeps them: one batch can hold the start and the end of a worker."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.events: list[Event] = []

    def until(self, kind: type[Started | Exited | Ended], count: int) -> None:
        """Take events until there are `count` of one kind."""
        seen = sum(isinstance(event, kind) for event in self.events)
        while seen < count:
            new = self._supervisor.wait(60.0)
            if not new:
                raise RuntimeError(f"only {seen} of {count} {kind.__name__}")
            self.events += new
            seen += sum(isinstance(event, kind) for event in new)


def spawn(resident_mib: int, workers: int) -> None:
    """See the module."""
    resident = bytearray(resident_mib << 20)
    for offset in range(0, len(resident), 4096):
        resident[offset] = 1
    supervisor = Supervisor()
    spec = LaunchSpec([WorkerSpec(["/bin/true"])] * workers)
    begin = time.monotonic()
    supervisor.start(spec)
    reader = Reader(supervisor)
    reader.until(Started, workers)
    print((time.monotonic() - begin) / workers)
    reader.until(Ended, 1)
    supervisor.close()


def cpu(workers: int, program: list[str]) -> None:
    """See the module."""
    supervisor = Supervisor()
    worker = WorkerSpec(program, stdout=Stdio.pipe(), stderr=Stdio.pipe())
    spec = LaunchSpec([worker] * workers)
    begin = time.process_time()
    supervisor.start(spec)
    Reader(supervisor).until(Started, workers)
    print((time.process_time() - begin) / workers)
    supervisor.kill()
    supervisor.close()


def detect(workers: int, kills: int, program: list[str]) -> None:
    """See the module."""
    supervisor = Supervisor()
    supervisor.start(LaunchSpec([WorkerSpec(program)] * workers, on_failure="report"))
    reader = Reader(supervisor)
    reader.until(Started, workers)
    pids = [event.pid for event in reader.events if isinstance(event, Started)]
    time.sleep(1)  # the workers' own start is not what is measured
    for number, pid in enumerate(pids[:: max(1, workers // kills)][:kills], start=1):
        begin_ns = time.time_ns()
        os.kill(pid, signal.SIGKILL)
        reader.until(Exited, number)
        last = reader.events[-1]
        assert isinstance(last, Exited)
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
