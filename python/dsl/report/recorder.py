"""Records what happens to a job as lines of JSON (``--events``). docs/events.md describes each line.

The command where the user is writes the file. The agents that it has reached on other hosts make the same
lines, and send them over their links.
"""

from __future__ import annotations

import os
import sys
import time

from dsl import Exited, Killing, LogNotice, SignalReceived, __version__
from dsl.errors import EventsFileError
from dsl.machine.files import open_output, put, reason
from dsl.machine.kernel import began_ns
from dsl.model.outcome import (
    AttemptOutcome,
    AttemptStarted,
    Hang,
    Outcome,
    OutputCut,
    RestartFailed,
    Restarting,
    TimerExpired,
)
from dsl.report.narrator import judge_attempt
from dsl.report.verdict import verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from dsl.facts import Facts
    from dsl.model.job import Job, Meeting, NodePlan
    from dsl.model.judgement import Judgement
    from dsl.plan.job import JobPlan

SCHEMA = 1
"""Version of the lines."""

LONGEST_LINE = 1 << 18
"""Most characters of a line from another host."""

HEAD_EVENTS = (SignalReceived, LogNotice, Hang, OutputCut, Outcome)
"""What a head records of its own: its other events are about the programs that reach hosts."""


class EventsFile:
    """The file of ``--events``. A write never waits; after the first that fails there is no other."""

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        """Open the file. ``warn`` gets one line if it cannot be written later. Raises EventsFileError."""
        self._path, self._warn = path, warn
        try:
            self._fd = open_output(path)
        except (OSError, ValueError) as error:
            raise EventsFileError(
                f"--events {path!r} cannot be written: {reason(error)}, choose another file"
            ) from None

    def write(self, line: bytes) -> None:
        """Append one line."""
        if self._fd < 0:
            return
        try:
            put(self._fd, line)
        except OSError as error:
            self.close()
            self._warn(f"events are no longer recorded in {self._path!r}: {reason(error)}")

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def record_job(
    path: str, planned: JobPlan, facts: Facts, warn: Callable[[str], None]
) -> tuple[Recorder, EventsFile]:
    """Begin the record of a job in a file. Raises EventsFileError: the file cannot be written."""
    file = EventsFile(path, warn)
    recorder = Recorder(file.write, os.urandom(8).hex(), facts.names.host, is_head=planned.remote is not None)
    recorder.launch(planned.job, planned.argv)
    return recorder, file


class Recorder:
    """A listener that makes a line of each event.

    ``write`` takes a line. ``name`` tells the lines of a job from those of other jobs. ``is_head``: other
    hosts record what their workers do, and `add` takes their lines.
    """

    def __init__(
        self, write: Callable[[bytes], None], name: str, host: str, *, is_head: bool = False
    ) -> None:
        self.judged: Callable[[], Judgement | None] | None = None
        """How the job has ended on all nodes, if a conductor judges that."""
        self.beside: tuple[str, ...] = ()
        """Lines that stand beside the verdict: why a job ended while no worker ran."""
        self._write, self._name, self._host, self._is_head = write, name, host, is_head
        self._plan: NodePlan | None = None
        self._count = 0
        """Number of attempts that a head has begun."""

    def launch(self, job: Job, argv: Sequence[str]) -> None:
        """Record how the job was launched. ``argv``: what the user typed; empty: a program has done it."""
        program = job.program
        self.tell(
            "Launched",
            command=job.flavour.command,
            argv=list(argv),
            program=[program.script, *program.args],
            kind=program.kind,
            cwd=_cwd(),
            pid=os.getpid(),
            began_ns=began_ns("self"),
            versions={"dsl": __version__, "python": sys.version.split()[0], "kernel": os.uname().release},
            nodes=len(job.hosts) or job.node_count,
            hosts=[{"name": one.name, "slots": len(one.slots)} for one in job.hosts],
            run_id=job.run_id,
            start_method=job.start.method,
            max_restarts=job.max_restarts,
        )

    def hear(self, event: object) -> None:
        """Record an event."""
        if self._is_head and not isinstance(event, HEAD_EVENTS):
            return
        if isinstance(event, LogNotice) and event.kind == "first_output":
            if not self._is_head:
                self.tell("FirstOutput", **self._worker(event.worker))
            return
        if isinstance(event, AttemptStarted):
            self._plan = plan = event.plan
            self.tell(
                "AttemptStarted",
                world_size=plan.meeting.world_size,
                ranks=[worker.rank for worker in plan.workers],
                local_ranks=[worker.local_rank for worker in plan.workers],
                address=plan.meeting.address,
                port=plan.meeting.port,
                log_dir=plan.log_dir,
            )
        elif isinstance(event, AttemptOutcome):
            if event.report is not None:
                self.tell("Report", **_plain(event.report))
        elif isinstance(event, Restarting):
            self._hear_restart(event)
        elif isinstance(event, RestartFailed):
            self.tell("RestartFailed", why=str(event.error))
        elif isinstance(event, (TimerExpired, Hang, OutputCut)):
            self.tell(type(event).__name__, **_plain(event))
        elif isinstance(event, Outcome):
            self._hear_outcome(event)
        elif hasattr(event, "to_dict"):
            self._hear_engine(event)

    def membership(
        self, *, joined: Sequence[str] = (), left: Sequence[str] = (), why: str = "", nodes: int | None = None
    ) -> None:
        """Record that nodes have come or gone. ``nodes``: how many are there now; None: unknown."""
        self.tell("Membership", joined=list(joined), left=list(left), why=why, nodes=nodes)

    def meeting(self, name: str, meeting: Meeting) -> None:
        """Record what the conductor has told a member for an attempt. ``name``: the member."""
        self._count = max(self._count, meeting.attempt + 1)
        told = {key: value for key, value in _plain(meeting).items() if key != "notices"}
        self.tell("Meeting", member=name, **told)

    def restart(self, why: str, restarts: int | None = None, *, counted: bool | None = None) -> None:
        """Record why an attempt has ended that another one follows. None: the next meeting says it."""
        attempt = {"attempt": self._count - 1} if self._is_head else {}
        self.tell("Restarting", **attempt, why=why, restarts=restarts, counted=counted)

    def add(self, text: str, received_ns: int, offset_ns: int | None) -> None:
        """Record a line of another host; a text that is no such line is ignored.

        ``offset_ns``: how far the clock of that host is ahead of ours; None: unknown.
        """
        from json import loads

        own = {"schema": SCHEMA, "job": self._name, "received_ns": received_ns, "clock_offset_ns": offset_ns}
        try:
            found = loads(text) if len(text) <= LONGEST_LINE else None
            line = _line({**found, **own}) if isinstance(found, dict) and _is_line(found) else b""
        except (ValueError, RecursionError):
            return
        if line:
            self._write(line)

    def tell(self, event: str, **fields: Any) -> None:
        """Record an event with these fields."""
        plan = self._plan
        common = {
            "schema": SCHEMA,
            "job": self._name,
            "time_ns": time.time_ns(),
            "event": event,
            "host": self._host if plan is None else plan.host,
            "node_rank": None if plan is None else plan.meeting.node_rank,
            "attempt": None if plan is None else plan.meeting.attempt,
        }
        self._write(_line({**common, **fields}))

    def _hear_engine(self, event: Any) -> None:
        found = event.to_dict()
        del found["version"], found["event"]
        if isinstance(event, Exited):
            found = {**found.pop("exit"), "time_ns": event.exit.ended_ns}
        found.pop("tail", None)  # the report has what matters of the last output
        if isinstance(event, Killing):
            found["ranks"] = [self._worker(one)["rank"] for one in found.pop("workers")]
        self.tell(type(event).__name__, **{**found, **self._worker(found.get("worker"))})

    def _worker(self, index: int | None) -> dict[str, Any]:
        """Who a worker of the present attempt is; empty without a worker."""
        if index is None or self._plan is None:
            return {}
        worker = self._plan.workers[index]
        return {"worker": index, "rank": worker.rank, "local_rank": worker.local_rank}

    def _hear_restart(self, event: Restarting) -> None:
        if event.last.plan.is_conducted:
            return
        is_elsewhere = self.judged is not None and event.last.cause is None
        lines = _verdict(None if is_elsewhere else judge_attempt(event.last))
        why = lines[0] if lines else ""
        self.restart(why, event.number, counted=event.is_counted)

    def _hear_outcome(self, outcome: Outcome) -> None:
        if outcome.last.plan.is_conducted:
            return  # the head knows how the job ends
        count = self._count if self._is_head else outcome.count
        judgement = judge_attempt(outcome.last) if self.judged is None else self.judged()
        self.end(outcome.code, [*_verdict(judgement), *self.beside], count)

    def end(self, code: int, lines: Sequence[str], count: int = 0) -> None:
        """Record the end of the job after so many attempts. ``lines``: the verdict; empty: all is well."""
        self.tell("JobEnded", code=code, attempts=count, verdict=list(lines))


def _verdict(judgement: Judgement | None) -> list[str]:
    return [] if judgement is None else verdict(judgement)


def _is_line(found: Mapping[str, Any]) -> bool:
    return (
        isinstance(found.get("event"), str)
        and isinstance(found.get("host"), str)
        and type(found.get("time_ns")) is int
        and all(key in found and type(found[key]) in (int, type(None)) for key in ("attempt", "node_rank"))
    )


def _plain(value: Any) -> Any:
    """A record as JSON can hold it, with its fields alone."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__match_args__"):
        return {name: _plain(getattr(value, name)) for name in value.__match_args__}
    return value


def _line(fields: Mapping[str, Any]) -> bytes:
    """A line in UTF-8. U+FFFD stands for bytes that are no text, which Python holds as lone surrogates.

    Raises ValueError: a number is not finite.
    """
    from json import dumps

    text = dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode() + b"\n"


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
