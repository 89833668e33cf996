"""A program that waits for a group of its own and is interrupted; prints when it noticed (monotonic ns).

Arguments: file to announce readiness in, then the worker's command line.
"""

from __future__ import annotations

import pathlib
import sys
import time

from dsl import Event, LaunchSpec, Started, Supervisor, WorkerSpec


def main() -> None:
    """Wait without a time limit until SIGINT arrives."""
    supervisor = Supervisor()
    supervisor.start(LaunchSpec([WorkerSpec(sys.argv[2:])] * 2))
    events: list[Event] = []
    while len([event for event in events if isinstance(event, Started)]) < 2:
        events += supervisor.wait(10.0)
    try:
        # The file is there before the call that makes it has returned.
        pathlib.Path(sys.argv[1]).touch()
        while True:
            events = supervisor.wait()
            print("woken without reason", events)
    except KeyboardInterrupt:
        print(time.monotonic_ns())
    supervisor.close()


main()
