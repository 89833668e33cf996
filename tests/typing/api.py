"""The public names as a user's own typed program uses them. Never run: `mypy` checks it."""

from __future__ import annotations

import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from dsl import (
    EVENT_VERSION,
    BindingError,
    Called,
    Ended,
    EngineError,
    Exit,
    Exited,
    ForkServerLost,
    ForkServerReady,
    ForkServerSlow,
    GuardOutcome,
    Killing,
    LaunchSpec,
    Leftovers,
    LimitError,
    LogNotice,
    Output,
    SignalReceived,
    SpecError,
    Started,
    Stdio,
    Stopping,
    Supervisor,
    Unbound,
    WorkerSpec,
    __version__,
)

if TYPE_CHECKING:
    from dsl import Event

version: str = __version__


def specification(logs: Path) -> LaunchSpec:
    workers = [
        WorkerSpec(
            ["python", "train.py", b"--name=\xff"],
            env={"RANK": str(rank)},
            cwd=logs,
            stdin=Stdio.null(),
            stdout=Stdio.file(logs / f"{rank}.log", append=True),
            stderr=Stdio.log(logs / f"{rank}.err", console=2),
            prefix=f"[rank {rank}] ",
            cpus=[rank],
            mempolicy=("bind", [0]),
        )
        for rank in range(2)
    ]
    return LaunchSpec(
        workers, env={"PATH": "/usr/bin"}, on_failure="report", grace_s=5.0, log_max_bytes=1 << 20
    )


def describe(event: Event) -> str:
    """Every kind of event, with the attributes a user reads."""
    if isinstance(event, Started):
        return f"{event.worker} {event.pid} {event.time_ns}"
    if isinstance(event, Unbound):
        return f"{event.worker} {event.stage} {event.errno + 1}"
    if isinstance(event, Exited):
        return ending(event.exit)
    if isinstance(event, Output):
        return event.data.decode() if event.stream == 1 else ""
    if isinstance(event, SignalReceived):
        return signal.Signals(event.signum).name if event.action == "forward" else str(event.from_terminal)
    if isinstance(event, Stopping):
        return f"{event.reason} {event.signum} {event.grace_s}"
    if isinstance(event, Leftovers):
        return f"{[pid + 1 for pid, _command, _worker in event.processes]} {event.grace_s + 0.5}"
    if isinstance(event, Killing):
        return f"{event.tier} {[worker + 1 for worker in event.workers]}"
    if isinstance(event, LogNotice):
        return f"{event.kind} {event.worker} {event.path} {event.errno} {event.count + 1}"
    if isinstance(event, Called):
        return repr(event)
    if isinstance(event, ForkServerReady):
        return f"{event.server + 1}"
    if isinstance(event, ForkServerSlow):
        return f"{event.server + 1} {event.pid + 1} {event.import_s + 0.5}"
    if isinstance(event, ForkServerLost):
        return f"{event.server + 1} {event.text.strip()}"
    return last(event)


def ending(exit_: Exit) -> str:
    code: int | None = exit_.code
    number: int | None = exit_.signal
    seconds: float = exit_.cpu_user_s + exit_.cpu_system_s
    return f"{code} {number} {exit_.status} {exit_.core_dumped} {seconds} {exit_.max_rss_bytes} {exit_.order}"


def last(event: Ended) -> str:
    cause: Exit | None = event.first_failure
    pids: list[int] = [pid for pid, _state, _name, _wchan, _errno in event.survivors]
    return (
        f"{cause} {event.stop_signal} {event.stragglers} {event.oom_kills + 1} {pids} {event.tail.decode()}"
    )


def record(event: Event) -> str:
    """As data, for somebody else's program."""
    return f"{EVENT_VERSION + 0} {event.to_dict()['event']} {hash(event)}"


def programs(spec: LaunchSpec) -> dict[str, object]:
    """What a spec holds, as plain values."""
    return {str(worker.argv[0]): worker.stdout.path or worker.env for worker in spec.workers}


def poll(supervisor: Supervisor) -> list[Event]:
    """Beside other things to wait for."""
    supervisor.wake()
    return supervisor.wait(0) if select.select([supervisor], [], [], 1.0)[0] else []


def run_in_a_block(spec: LaunchSpec) -> list[Event]:
    with Supervisor() as supervisor:
        supervisor.start(spec)
        index: int = supervisor.add(spec.workers[0])
        supervisor.signal(signal.SIGTERM, index)
        return supervisor.wait()


def same(one: GuardOutcome, other: GuardOutcome) -> bool:
    return one == other and hash(one) == hash(other)


def run(spec: LaunchSpec) -> list[str]:
    supervisor = Supervisor()
    try:
        supervisor.start(spec)
        supervisor.signal(signal.SIGUSR1, worker=0)
        supervisor.stop(signum=signal.SIGINT, grace_s=1.0)
        return [describe(event) for event in supervisor.wait(timeout_s=1.0)]
    except (BindingError, LimitError, SpecError) as error:
        base: EngineError = error
        return [str(base), str(len(spec.workers))]
    finally:
        supervisor.kill()
        supervisor.close()
