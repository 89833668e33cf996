"""A program that starts a group and leaves it in the way its first argument says; the rest is the worker's command."""

from __future__ import annotations

import os
import signal
import sys

from dsl import EngineError, Event, LaunchSpec, Started, Supervisor, WorkerSpec


def main() -> None:
    """``fall-off``, ``raise``, ``exit``, ``kill``: how to end; ``child-ignored``: print why there is no group."""
    manner = sys.argv[1]
    if manner == "child-ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    supervisor = Supervisor()
    try:
        supervisor.start(LaunchSpec([WorkerSpec(sys.argv[2:])] * 2, grace_s=0.5))
    except EngineError as error:
        print("refused:", error)
        return
    events: list[Event] = []
    while len([event for event in events if isinstance(event, Started)]) < 2:
        events += supervisor.wait(10.0)
    if manner == "raise":
        raise RuntimeError("on purpose")
    if manner == "exit":
        sys.exit(3)
    if manner == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


main()
