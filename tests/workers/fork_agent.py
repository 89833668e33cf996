"""Runs a group through a fork server; prints the pids of guard and agent, and then the name of each event.

argv: ``guarded`` or ``embedded``, the command of the fork server as JSON, the commands of the workers as JSON.
"""

from __future__ import annotations

import json
import os
import sys

from dsl import Ended, Guard, LaunchSpec, Supervisor, WorkerSpec


def run(supervisor: Supervisor, guard_pid: int) -> None:
    """Run the group."""
    number = supervisor.start_fork_server(json.loads(sys.argv[2]))
    workers = [
        WorkerSpec(words, env={"RANK": str(rank)}, fork_server=number, fork_entry=1)
        for rank, words in enumerate(json.loads(sys.argv[3]))
    ]
    print(guard_pid, os.getpid(), flush=True)
    supervisor.start(LaunchSpec(workers, grace_s=0.5))
    events: list[object] = []
    while not any(isinstance(event, Ended) for event in events):
        events = list(supervisor.wait())
        for event in events:
            print(type(event).__name__, flush=True)
    supervisor.close()


def main() -> None:
    """See the module."""
    if sys.argv[1] == "embedded":
        run(Supervisor(), os.getpid())
        return
    guard = Guard()
    pid = os.fork()
    if pid == 0:
        try:
            guard.enter_agent()
            run(Supervisor(guard=guard), guard.pid)
            os._exit(0)
        finally:
            os._exit(70)
    os._exit(guard.supervise(pid, 0.5).code)


main()
