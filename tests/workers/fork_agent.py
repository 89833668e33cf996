"""Runs a group under a guard through a fork server; prints ``TOKEN GUARD AGENT`` and then the name of each event.

argv: the command of the fork server as JSON, the commands of the workers as JSON.
"""

from __future__ import annotations

import json
import os
import sys

from dsl import Ended, Guard, LaunchSpec, Supervisor, WorkerSpec


def agent(guard: Guard) -> None:
    """Run the group."""
    guard.enter_agent()
    supervisor = Supervisor(guard=guard)
    number = supervisor.start_fork_server(json.loads(sys.argv[1]))
    workers = [WorkerSpec(words, fork_server=number, fork_entry=1) for words in json.loads(sys.argv[2])]
    print(guard.job_id, guard.pid, os.getpid(), flush=True)
    supervisor.start(LaunchSpec(workers, grace_s=0.5))
    events: list[object] = []
    while not any(isinstance(event, Ended) for event in events):
        events = list(supervisor.wait())
        for event in events:
            print(type(event).__name__, flush=True)
    supervisor.close()


def main() -> None:
    """See the module."""
    guard = Guard()
    pid = os.fork()
    if pid == 0:
        try:
            agent(guard)
            os._exit(0)
        finally:
            os._exit(70)
    os._exit(guard.supervise(pid, 0.5).code)


main()
