"""Events that the engine never sent, and a supervisor that sends them: for whatever listens or decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dsl import Ended, Event, Exit, Exited, Leftovers, SignalReceived, Stopping
from dsl._record import replace
from dsl.evidence.reports import report_of
from dsl.model.job import Job, Meeting, MeetingPoint, NodePlan, WorkerPlan
from dsl.model.judgement import Alike, Evidence, Failed, Report, Survivor
from dsl.model.outcome import AttemptOutcome
from dsl.model.request import Program
from dsl.plan.worker import DEEPSPEED

MS = 1_000_000


A_JOB = Job(DEEPSPEED, Program("script", "prog"), MeetingPoint("alone", "", None))


def a_plan(
    workers: int = 2,
    *,
    attempt: int = 0,
    first_rank: int = 0,
    noun: str = "rank",
    job: Job = A_JOB,
    **fields: Any,
) -> NodePlan:
    """A node with this many workers."""
    node = tuple(
        WorkerPlan(rank=first_rank + local, local_rank=local, argv=("prog",), env={}, noun=noun)
        for local in range(workers)
    )
    return NodePlan(
        job,
        Meeting(attempt, 0, (workers,), "127.0.0.1", 29500, restarts=attempt),
        host="node7",
        workers=node,
        env={},
        **fields,
    )


def an_exit(
    worker: int,
    *,
    code: int | None = None,
    signal: int | None = None,
    by_us: bool = False,
    at_ms: float = 0,
    core: bool = False,
    failed_at: tuple[str, int, str | None] | None = None,
) -> Exit:
    """What the engine would say of one worker; `failed_at` is the stage, errno and path of a failed start."""
    stage, number, path = failed_at or (None, None, None)
    status = code if code is not None else 128 + signal if signal is not None else 255
    if failed_at is not None:
        status = 127 if number == 2 else 126
    if stage == "cancelled":
        status = 143
    return Exit(
        worker=worker,
        pid=0 if failed_at else 1000 + worker,
        code=code,
        signal=signal,
        core_dumped=core,
        exec_stage=stage,
        exec_errno=number,
        exec_path=path,
        status=status,
        order=worker,
        caused_by_stop=by_us,
        cpu_user_s=0.0,
        cpu_system_s=0.0,
        max_rss_bytes=512 << 20,
        started_ns=0,
        ended_ns=int(at_ms * MS),
    )


def exited(exit_: Exit) -> Event:
    """The event of one exit."""
    return Exited(exit_)


def end(
    first_failure: Exit | None = None,
    stop_signal: int | None = None,
    survivors: Sequence[tuple[int, str, str, str | None, int | None]] = (),
    tail: bytes = b"",
    shown_since: int | None = None,
) -> Ended:
    """The last event of a group."""
    return Ended(
        first_failure=first_failure,
        stop_signal=stop_signal,
        stragglers=0,
        survivors=tuple(survivors),
        oom_kills=0,
        tail=tail,
        shown_since=shown_since,
    )


def a_leftovers(processes: Sequence[tuple[int, str, int | None]], grace_s: float) -> Leftovers:
    """What the engine would say of processes that workers have left running."""
    return Leftovers(tuple(processes), grace_s)


def an_attempt(plan: NodePlan, exits: Sequence[Exit], ended: Ended, **fields: Any) -> AttemptOutcome:
    """How an attempt ended; its cause is the first failure unless the test says otherwise."""
    attempt = AttemptOutcome(plan, tuple(exits), ended, **{"cause": ended.first_failure, **fields})
    return replace(attempt, report=report_of(attempt))


def a_report(
    attempt: int = 0,
    code: int = 0,
    *,
    rank: int = -1,
    at_ms: float = 0,
    host: str = "n0",
    victims: Sequence[int] = (),
    followers: Sequence[int] = (),
    survivors: int = 0,
    lines: Sequence[str] = (),
    **fields: Any,
) -> Report:
    """What a member reports; ``rank`` has failed with the code, ``lines`` are its last output."""
    groups = [(victims, True), (followers, False)]
    fields["after"] = tuple(
        [
            Alike(tuple(map(str, ranks)), by_stop, None, 15 if by_stop else 1)
            for ranks, by_stop in groups
            if ranks
        ]
    )
    if rank >= 0:
        fields["cause"] = Failed("rank", str(rank), rank, 0, 1000 + rank, code, int(at_ms * MS), code)
        fields["evidence"] = Evidence(lines=tuple(lines))
    left = tuple([Survivor(70 + number, "D", "stuck", host=host) for number in range(survivors)])
    return Report(attempt, code, host, survivors=left, **fields)


def a_signal(signum: int = 15, action: str = "stop") -> Any:
    fields: Any = (signum, action, False)
    return SignalReceived(*fields)


def a_lost_guard() -> Any:
    """The guard is gone while no group runs."""
    return Stopping("guard_lost", 15, 0.0)


class FakeSupervisor:
    """Sends what the test has written down, attempt by attempt, and notes what it was told."""

    def __init__(self, *attempts: Iterable[Event | BaseException]) -> None:
        self.attempts = [iter(attempt) for attempt in attempts]
        self.started: list[Any] = []
        self.stops: list[tuple[int, float | None]] = []
        self.fork_servers: list[tuple[tuple[str, ...], Any]] = []
        self.server_places: list[Any] = []

    def start_fork_server(self, words: Sequence[str], *, env: Any, cpus: Any = None) -> int:
        """Note it, with the number of groups that were started before; the first is number 7."""
        assert not self.started or self.fork_servers
        self.fork_servers.append((tuple(words), env))
        self.server_places.append(cpus)
        return 6 + len(self.fork_servers)

    def start(self, spec: object) -> None:
        self.started.append(spec)

    def flush(self, stream: Literal[1, 2] | None = None) -> tuple[int, int | None]:
        """Wait for the console: here nobody holds it up."""
        return (0, None)

    def wait(self, timeout_s: float | None = None, *, routine: bool = True) -> list[Event]:
        """One event at a time; an exception is raised. Nothing happens before the first attempt."""
        if not self.started:
            return []
        event = next(self.attempts[len(self.started) - 1], None)
        if isinstance(event, BaseException):
            raise event
        return [] if event is None else [event]

    def stop(self, *, signum: int = 15, grace_s: float | None = None) -> None:
        self.stops.append((signum, grace_s))
