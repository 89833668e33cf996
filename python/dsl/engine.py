"""What a `Supervisor` starts, and what it reports: frozen records, which the engine reads and makes.

Nothing of a spec is checked before. `Supervisor.start` raises `SpecError` for what cannot be started as
written. docs/events.md has the dict form of events.
"""

from __future__ import annotations

from dsl._record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike
    from typing import Any, Literal, TypeAlias

    Path: TypeAlias = str | bytes | PathLike[str] | PathLike[bytes]
    MemoryMode: TypeAlias = Literal["bind", "preferred", "interleave", "local"]
    StreamKind: TypeAlias = Literal["inherit", "null", "unreadable", "file", "fd", "pipe", "stdout", "log"]
    Survivor: TypeAlias = tuple[int, str, str, str | None, int | None]

EVENT_VERSION = 1
"""Version of the dict form: it grows when a field is removed or changes its meaning."""

SHOWN_BYTES = 64
"""How many bytes of a longer value a text shows."""


class _Shown(Record):
    """Shows what is not the default; of variables, which may be secret, and of a long output not all."""

    def __repr__(self) -> str:
        names: tuple[str, ...] = self.__match_args__
        defaults: dict[str, Any] = self._defaults  # type: ignore[attr-defined]
        shown = []
        for name in names:
            value = getattr(self, name)
            if name == "env" and value:
                shown.append(f"env=<{len(value)} variable{'s' * (len(value) != 1)}>")
            elif name in ("data", "tail") and len(value) > SHOWN_BYTES:
                shown.append(f"{name}=<{len(value)} bytes, {value[:SHOWN_BYTES]!r}...>")
            elif name not in defaults or value != defaults[name]:
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


class Stdio(_Shown):
    """Where one standard stream of a worker goes. Make it with one of the methods."""

    kind: StreamKind
    """Name of the method that makes it."""
    path: Path | None = None
    """Path of a ``file`` or a ``log``."""
    append: bool = False
    """Whether a ``file`` is appended to; a ``log`` always is."""
    descriptor: int | None = None
    """The number of an ``fd``."""
    console: Literal[1, 2] | None = None
    """Where the lines of a ``log`` are shown: stdout or stderr of this process."""
    terminal: bool = False
    """Whether the worker of a ``log`` sees a terminal instead of a pipe."""
    prefix: str | bytes | None = None
    """The text before each shown line of a ``log``, which replaces the worker's prefix."""

    @staticmethod
    def inherit() -> Stdio:
        """The worker uses the same stream as this process."""
        return INHERIT

    @staticmethod
    def null() -> Stdio:
        """``/dev/null``."""
        return NULL

    @staticmethod
    def unreadable() -> Stdio:
        """For stdin only: a terminal that has the size of ours, and from which nothing can be read."""
        return Stdio("unreadable")

    @staticmethod
    def file(path: Path, *, append: bool = False) -> Stdio:
        """A file that the worker writes directly (created with mode 0640; truncated unless ``append``)."""
        return Stdio("file", path, append)

    @staticmethod
    def fd(fd: int) -> Stdio:
        """A descriptor of this process, which the caller must keep open until the worker has started."""
        return Stdio("fd", descriptor=fd)

    @staticmethod
    def pipe() -> Stdio:
        """A pipe read by the engine; bytes arrive as `Output` events."""
        return Stdio("pipe")

    @staticmethod
    def stdout() -> Stdio:
        """For stderr only: the same open file as the worker's stdout, so that the order of output is kept."""
        return Stdio("stdout")

    @staticmethod
    def log(
        path: Path | None = None,
        *,
        console: Literal[1, 2] | None = None,
        terminal: bool = False,
        prefix: str | bytes | None = None,
    ) -> Stdio:
        """An output stream that the engine reads and passes on, in a thread of its own.

        The bytes go unchanged to the file ``path`` (created with mode 0640, appended to). Whole lines go,
        with the worker's prefix or ``prefix``, to this process's stdout (``console=1``) or stderr
        (``console=2``), without sequences that could change other lines. With ``terminal`` the worker sees a
        terminal of its own.
        """
        return Stdio("log", path, console=console, terminal=terminal, prefix=prefix)


INHERIT, NULL = Stdio("inherit"), Stdio("null")


class WorkerSpec(_Shown):
    """One worker: what to execute and how."""

    argv: Sequence[str | bytes]
    """Program and arguments. A program without a slash is looked up on the worker's ``PATH``."""
    env: Mapping[str, str] | None = None
    """Variables that are added to the group's environment, or replace variables of it."""
    cwd: Path | None = None
    """Working directory; None: that of this process."""
    stdin: Stdio = NULL
    stdout: Stdio = INHERIT
    stderr: Stdio = INHERIT
    cpus: Sequence[int] = ()
    """CPUs that the worker is bound to, all usable by this process; empty: the inherited ones."""
    mempolicy: tuple[MemoryMode, Sequence[int]] | None = None
    """NUMA policy and nodes, all usable by this process; None: the inherited one."""
    foreground: bool = False
    """The worker stays in the terminal's foreground process group, so that it can read from the terminal.

    At most one worker of a group may have it.
    """
    prefix: str | bytes = ""
    """Text before each shown line of the worker's `Stdio.log` streams.

    ``HH:MM:SS.mmm`` in it stands for the local time at which a line is read.
    """
    keep_fds: Sequence[int] = ()
    """Descriptors of this process, from 3 on, that the worker gets under the same numbers.

    It has no others besides its standard streams. Keep them open until the worker has started.
    """
    fork_server: int | None = None
    """Number of the fork server (`Supervisor.start_fork_server`) that forks the worker.

    No worker of the group starts before the server is ready. If the server is lost, ``argv`` is executed.
    """
    fork_entry: int = 0
    """Index in ``argv`` of the first word after the interpreter and its flags: a script, or ``-m``."""


class LaunchSpec(_Shown):
    """Everything that the engine needs to start and end one worker group, with every decision made."""

    workers: Sequence[WorkerSpec]
    """The workers; their index is their identity in every event."""
    env: Mapping[str, str] | None = None
    """Environment of every worker, before its own variables; None: that of this process."""
    on_failure: Literal["stop", "report"] = "stop"
    """Whether a failed worker (non-zero code, signal, failed exec) stops the others, or is only reported."""
    grace_s: float = 30.0
    """Seconds between the stop signal and SIGKILL, one deadline for the whole group."""
    stays_open: bool = False
    """The group, which may begin empty, goes on without workers until it is stopped: see `Supervisor.add`."""
    at_once: int | None = None
    """At most this many workers run at a time, in order; the next starts when one has ended (None: all)."""
    signal_scope: Literal["rank", "group"] = "group"
    """Who hears a signal to a worker, its own process (``rank``) or its process group (``group``).

    With ``rank``, the rest of the group gets SIGTERM when a stop has ended the worker, or shortly before the
    grace is over. SIGKILL, SIGSTOP, SIGTSTP, SIGCONT and SIGWINCH always go to the group.
    """
    binding: Literal["required", "cpus_required", "wanted"] = "required"
    """What happens to a worker that cannot be bound to its ``cpus`` and ``mempolicy``.

    ``required``: it is not started; ``cpus_required``: the same, for the CPUs alone; ``wanted``: it runs, and
    `Unbound` reports it.
    """
    log_max_bytes: int | None = None
    """Cap of each file of a `Stdio.log` stream, which keeps its first and last part; None: no cap."""
    collapse: bool = False
    """Equal lines of several workers are shown once, with a count."""
    line_files: Sequence[tuple[Literal[1, 2], Path, Sequence[str | bytes]]] = ()
    """1 for stdout or 2 for stderr, path, words: lines with one of the words are copied to the path."""
    partial_after_s: float | None = 1.0
    """Seconds without output after which an unfinished line is shown, if there is no terminal.

    Twice as long if the line goes on (None: never).
    """
    relayed: bool = False
    """The engine marks unfinished lines, for the hub that passes this process's output on (`Hub.relay`)."""
    tells_first_output: bool = False
    """A `LogNotice` reports the first output of each worker."""
    inherits: bool = False
    """``env`` is this process's environment with changes, as the default ``env`` always is.

    Then the workers also get entries that no mapping can hold, such as entries without a name.
    """
    tells_signals: bool = False
    """A signal to the job (see `Guard`) has no effect by itself.

    `SignalReceived` reports it and the action that it would have had; the caller acts by `Supervisor.signal`,
    ``stop`` and ``kill``. The guard still kills an agent that has not ended in the time that a stop leaves.
    """
    lingers: bool = False
    """If all workers end well, processes that outlive them have ``grace_s`` to end.

    `Leftovers` reports them. Otherwise they have at most two seconds.
    """


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


class _Event(_Shown):
    """What every event has."""

    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
        return {"event": type(self).__name__, "version": EVENT_VERSION, **_fields(self)}


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
    """The failed step, the last one tried; ``-check``: the kernel has set something else than the spec."""
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
        "first_output", "file_failed", "reopen_failed", "bytes_lost", "console_closed", "lines_dropped"
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
