"""What a `Supervisor` reports: frozen records, which the engine makes. docs/events.md has their dict form."""

from __future__ import annotations

from dsl._record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypeAlias

    Survivor: TypeAlias = tuple[int, str, str, str | None, int | None]

EVENT_VERSION = 1
"""Version of the dict form: it grows when a field is removed or changes its meaning."""

SHOWN_BYTES = 64
"""How many bytes of a longer value a text shows."""


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, bytes):
        from binascii import b2a_base64

        return b2a_base64(value, newline=False).decode("ascii")
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return _fields(value) if isinstance(value, Record) else value


def _fields(record: Any) -> dict[str, Any]:
    return {name: _plain(getattr(record, name)) for name in record.__match_args__}


def _shown(value: object) -> str:
    if isinstance(value, bytes) and len(value) > SHOWN_BYTES:
        return f"<{len(value)} bytes, {value[:SHOWN_BYTES]!r}...>"
    return repr(value)


class _Event(Record):
    """What every event has."""

    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
        return {"event": type(self).__name__, "version": EVENT_VERSION, **_fields(self)}

    def __repr__(self) -> str:
        names: tuple[str, ...] = self.__match_args__
        return (
            f"{type(self).__name__}({', '.join(f'{name}={_shown(getattr(self, name))}' for name in names)})"
        )


class Exit(Record):
    """How one worker ended."""

    worker: int
    """Index in `LaunchSpec.workers`."""
    pid: int
    """Process id; 0 when the worker never started."""
    code: int | None
    """Exit code 0-255; None when a signal ended the worker or the worker never ran."""
    signal: int | None
    """Number of the signal that ended the worker."""
    core_dumped: bool
    exec_stage: str | None
    """The step that failed when the worker never ran: ``exec``, ``chdir``, ``stdio``, ``affinity``...

    ``cancelled``: the group was stopped before the engine tried to start this worker.
    """
    exec_errno: int | None
    """errno of the failed step."""
    exec_path: str | None
    """The path that could not be executed or opened."""
    status: int
    """The exit code, 128 + signal, or for a failed exec 127 (not found) or 126 (not executable)."""
    order: int
    """Position in the order in which the kernel reported the deaths of this group, from 0."""
    caused_by_stop: bool
    """True if the worker died after the engine had begun to signal it: a victim, never a cause."""
    cpu_user_s: float
    cpu_system_s: float
    max_rss_bytes: int
    """Peak of resident memory.

    The worker shares this process's memory until its own program runs. So the value is at least what this
    process had in memory at that time, and says nothing about a small program.
    """
    started_ns: int
    """CLOCK_REALTIME nanoseconds when exec had succeeded; 0 when the worker never ran."""
    ended_ns: int
    """CLOCK_REALTIME nanoseconds when the engine noticed the death."""

    def to_dict(self) -> dict[str, Any]:
        """The same values as plain data, as events contain them (docs/events.md)."""
        return _fields(self)


class GuardOutcome(Record):
    """What became of the agent: what `Guard.supervise` returns."""

    code: int
    """Exit code for the command."""
    agent_signal: int | None
    """The signal that ended the agent, if one did."""
    ended: int
    """Processes of the job that the guard had to kill."""
    survivors: tuple[Survivor, ...]
    """(pid, state, name, wchan, errno) of processes that did not die, as in `Ended.survivors`."""
    terminal_interrupt: bool
    """Whether the terminal's Ctrl-C was among the signals."""


class Started(_Event):
    """The worker's program is running (exec has succeeded)."""

    worker: int
    pid: int
    time_ns: int


class Unbound(_Event):
    """The worker runs, but is not bound as its spec says (never with ``binding="required"``).

    The kernel refused to bind the worker, or bound it differently, as it does in a cpuset that has shrunk.
    """

    worker: int
    stage: Literal["affinity", "affinity-check", "mempolicy", "mempolicy-check"]
    """The step that failed; the engine did not try the steps after it.

    ``-check``: the kernel has set something else than the spec says.
    """
    errno: int


class Exited(_Event):
    """The worker ended, or could not be started. Reported exactly once for each worker."""

    exit: Exit


class Output(_Event):
    """Bytes that a worker wrote to a `Stdio.pipe` stream; empty at the end of the stream."""

    worker: int
    stream: Literal[1, 2]
    data: bytes


class SignalReceived(_Event):
    """A signal to the job has arrived (only in an agent, see `Guard`)."""

    signum: int
    action: Literal["forward", "stop", "preempt", "explain", "reopen", "ignore"]
    """What the engine does about it; ``ignore`` for a first stop signal to a job that is already ending.

    ``explain``: nothing. The user has pressed Ctrl-\\ once, and wants to know what the workers do.

    With `LaunchSpec.tells_signals`: what the engine would do, had it acted on all signals before this
    one. A second stop signal is ``stop`` again, because the user insists.
    """
    from_terminal: bool


class Stopping(_Event):
    """The group is being stopped."""

    reason: Literal["failure", "request", "signal", "guard_lost"]
    signum: int
    """The signal that the engine sends to the workers."""
    grace_s: float


class Leftovers(_Event):
    """All workers have ended well, and have left processes running that have not ended after two seconds."""

    processes: tuple[tuple[int, str, int | None], ...]
    """(pid, command line, index of the worker that has left it, if known), without their own children.

    The command line is cut after 80 letters.
    """
    grace_s: float
    """Seconds that they may still run; 0: they are ended now."""


class Killing(_Event):
    """The deadline has passed: every process of the group gets SIGKILL."""

    workers: tuple[int, ...]
    """Indices of the workers that were still alive."""
    tier: Literal["cgroup", "scan"]


class Called(_Event):
    """Somebody calls at the socket of `Supervisor.listen`. Reported again only after `Supervisor.callers`."""


class ForkServerReady(_Event):
    """A fork server has finished its imports, and takes orders."""

    server: int
    """Its number, as `Supervisor.start_fork_server` returned it."""


class ForkServerSlow(_Event):
    """A fork server still imports after ``slow_s``, and its workers wait. At most once for each server."""

    server: int
    pid: int
    """Pid of the server, for looking at what it does."""
    import_s: float
    """Seconds since the server was started."""


class ForkServerLost(_Event):
    """A fork server takes no more orders; from now on its workers are executed. Once for each server."""

    server: int
    pid: int
    """Pid of the server; 0 when it could not be executed."""
    signum: int | None
    """The signal that ended the server, if one did."""
    text: str
    """The reason in one line: the server has refused, has died, or is of no use."""
    workers: tuple[int, ...]
    """Running workers of the server, which die with it."""


class Ended(_Event):
    """Last event of a group: all workers have ended, and no process of the group is left but `survivors`."""

    first_failure: Exit | None
    """The earliest failure that the engine did not cause."""
    stop_signal: int | None
    """The signal by which the user ended the job, if any."""
    stragglers: int
    """Number of descendants that outlived their worker, and that the engine ended."""
    survivors: tuple[Survivor, ...]
    """(pid, state, name, wchan, errno) of processes that SIGKILL did not end in time.

    ``wchan`` is the kernel function in which the process sleeps, None if unknown. ``errno`` is EPERM for
    a process that we may not signal, such as one of root. Where it is not known whether processes are left,
    there is an entry with the pid 0, and ``errno`` has the reason: ECHILD if a dead branch of a warm server
    has left them, and that server has not told that they are gone.
    """
    oom_kills: int
    """Out-of-memory kills while the group ran, as counted by the memory cgroup of this process.

    If the engine made a cgroup for the workers and that counts more, its number. 0 without a counter.
    """
    tail: bytes
    """Last stderr output (16 KiB at most) of the worker that failed first.

    Empty if its stderr is no `Stdio.log` stream.
    """
    shown_since: int | None
    """Lines on the terminal after the last line of the `tail`'s stream; None: it was not shown there."""

    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
        names = ("pid", "state", "name", "wchan", "errno")
        left = [dict(zip(names, _plain(one), strict=True)) for one in self.survivors]
        return {**super().to_dict(), "survivors": left}


class LogNotice(_Event):
    """Something happened to output that the engine passes on. The job goes on."""

    kind: Literal[
        "first_output",
        "file_failed",
        "reopen_failed",
        "bytes_lost",
        "console_closed",
        "lines_dropped",
    ]
    """What happened.

    ``first_output``: the first bytes of the worker have come, if `LaunchSpec.tells_first_output` is set.
    ``file_failed``: a log file, or our stdout or stderr, could not be opened or written (reported once for
    each file).
    ``reopen_failed``: a log file could not be reopened, so the engine still writes the old one.
    ``bytes_lost``: bytes are missing in a file. ``console_closed``: no process reads our
    output any more. ``lines_dropped``: lines were not shown, because the console took none for a while.
    """
    worker: int | None
    """Index in `LaunchSpec.workers`."""
    path: str | None
    """The file; ``stdout`` and ``stderr`` are our own."""
    errno: int | None
    count: int
    """Number of bytes or lines."""


Event: TypeAlias = (
    Started
    | Unbound
    | Exited
    | Output
    | LogNotice
    | SignalReceived
    | Stopping
    | Leftovers
    | Killing
    | Called
    | ForkServerReady
    | ForkServerSlow
    | ForkServerLost
    | Ended
)
"""Each event has ``to_dict()``, which returns it as plain data that JSON can hold (docs/events.md)."""
