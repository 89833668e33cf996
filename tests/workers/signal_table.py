"""Runs groups of workers under a guard, as a command does, and prints each event as a line of JSON.

argv[1] is the job as JSON: {"signals": {number: meaning} or null, "preempt_grace_s": seconds or null, "grace_s":
seconds, "workers": N, "argv": [...], "groups": N, "gate": path, "acts": null or ["stop", "kill" or null, ...]}.
Between two groups it makes the file ``gate`` and waits until somebody has removed it. With ``acts`` signals are only
told, and each stop signal in turn is answered by one of them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from dsl import (
    Ended,
    Event,
    Exited,
    Guard,
    Killing,
    LaunchSpec,
    SignalReceived,
    Started,
    Stdio,
    Stopping,
    Supervisor,
    WorkerSpec,
)


def facts(event: Event) -> dict[str, object]:
    """What is printed of an event."""
    if isinstance(event, Started):
        return {"worker": event.worker}
    if isinstance(event, Exited):
        one = event.exit
        return {"worker": one.worker, "status": one.status, "caused_by_stop": one.caused_by_stop}
    if isinstance(event, SignalReceived):
        return {"signum": event.signum, "action": event.action}
    if isinstance(event, Stopping):
        return {"reason": event.reason, "signum": event.signum, "grace_s": event.grace_s}
    if isinstance(event, Killing):
        return {"workers": event.workers}
    if isinstance(event, Ended):
        cause = None if event.first_failure is None else event.first_failure.worker
        return {"stop_signal": event.stop_signal, "first_failure": cause, "stragglers": event.stragglers}
    return {}


def tell(kind: str, told: dict[str, object]) -> None:
    """Print one line."""
    print(json.dumps({"kind": kind, **told}), flush=True)


def listen(
    supervisor: Supervisor, timeout_s: float | None = None, acts: list[str | None] | None = None
) -> bool:
    """Print the next events and answer stop signals; true after the last of a group."""
    events = supervisor.wait(timeout_s)
    for event in events:
        tell(type(event).__name__, facts(event))
        act = acts.pop(0) if acts and isinstance(event, SignalReceived) and event.action == "stop" else None
        if act is not None:
            getattr(supervisor, act)()
    return any(isinstance(event, Ended) for event in events)


def wait_at(gate: str, supervisor: Supervisor) -> None:
    """Wait for somebody to let us through."""
    with open(gate, "w", encoding="utf-8"):
        pass
    while os.path.exists(gate):
        listen(supervisor, 0.003)


def agent(guard: Guard, job: dict[str, Any]) -> None:
    """Run the groups one after the other."""
    guard.enter_agent()
    supervisor = Supervisor(guard=guard)
    workers = [
        WorkerSpec(job["argv"], env={"RANK": str(rank)}, stdout=Stdio.null())
        for rank in range(job["workers"])
    ]
    for number in range(job["groups"]):
        if number:
            wait_at(job["gate"], supervisor)
        acts = job["acts"]
        supervisor.start(LaunchSpec(workers, grace_s=job["grace_s"], tells_signals=acts is not None))
        while not listen(supervisor, acts=acts):
            pass


def main() -> None:
    """See the module."""
    job = json.loads(sys.argv[1])
    signals = job["signals"]
    if signals is not None:
        signals = {int(number): meaning for number, meaning in signals.items()}
    guard = Guard(signals, preempt_grace_s=job["preempt_grace_s"])
    pid = os.fork()
    if pid == 0:
        try:
            agent(guard, job)
            os._exit(0)
        finally:
            os._exit(70)
    outcome = guard.supervise(pid, job["grace_s"])
    tell("Outcome", {"agent_signal": outcome.agent_signal})
    os._exit(outcome.code)


main()
