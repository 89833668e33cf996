"""Typed face of the extension module. Kept equal to the built module by ``mypy.stubtest``."""

from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, TypeAlias, final

from typing_extensions import Self

__all__ = [
    "EVENT_VERSION",
    "BindingError",
    "Ended",
    "EngineError",
    "Event",
    "Exit",
    "Exited",
    "ForkLink",
    "ForkOrder",
    "ForkServerLost",
    "ForkServerReady",
    "ForkServerSlow",
    "ForkedProgram",
    "Guard",
    "GuardOutcome",
    "Killing",
    "LaunchSpec",
    "LimitError",
    "LogNotice",
    "Output",
    "SecureError",
    "SecureSession",
    "SignalReceived",
    "SpecError",
    "Started",
    "Stdio",
    "Stopping",
    "Supervisor",
    "Unbound",
    "WorkerSpec",
    "__version__",
    "build_info",
    "kernel_interfaces",
    "probe_port",
]

__version__: str
EVENT_VERSION: Final[int]
"""Version of what ``to_dict`` of the events returns (docs/events.md)."""

def build_info() -> dict[str, str]:
    """Version, target triple and profile of the extension."""

def kernel_interfaces() -> dict[str, str]:
    """Interfaces of the kernel that the engine uses where it can, by name: empty, or why it does without.

    ``clone3``, ``pidfd``, ``close_range`` and ``cgroup``, of which one is made for an instant to find out.
    """

def probe_port(port: int) -> int:
    """Listen on a TCP port for an instant, on all addresses as a TCPStore does; 0: on any free one.

    Returns the port. Raises OSError with the kernel's reason: taken, not permitted, no network.
    """

class EngineError(Exception):
    """Base of every error that the engine raises."""

class SpecError(EngineError):
    """The launch spec cannot be started as written (an empty argv, a NUL byte, a worker without a source)."""

class LimitError(EngineError):
    """A limit of this machine is too low for the group; the message names it and the number needed."""

class BindingError(EngineError):
    """A worker cannot be bound as asked on this machine."""

_Path: TypeAlias = str | bytes | PathLike[str] | PathLike[bytes]

@final
class Stdio:
    """Where one standard stream of a worker goes."""

    @staticmethod
    def inherit() -> Stdio:
        """The same stream of this process."""
    @staticmethod
    def null() -> Stdio:
        """``/dev/null``."""
    @staticmethod
    def file(path: _Path, *, append: bool = False) -> Stdio:
        """A file the worker writes directly (created with mode 0640; truncated unless ``append``)."""
    @staticmethod
    def fd(fd: int) -> Stdio:
        """A descriptor of this process.

        It stays the caller's and must stay open until the worker has started.
        """
    @staticmethod
    def pipe() -> Stdio:
        """A pipe read by the engine; bytes arrive as `Output` events."""
    @staticmethod
    def stdout() -> Stdio:
        """For stderr only: the same open file as the worker's stdout, in order."""
    @staticmethod
    def log(
        path: _Path | None = None,
        *,
        console: Literal[1, 2] | None = None,
        terminal: bool = False,
        prefix: str | bytes | None = None,
    ) -> Stdio:
        """An output stream that the engine reads and passes on, on a thread of its own.

        The bytes go to the file ``path`` unchanged (created with mode 0640, appended to). Whole lines go,
        with the worker's prefix, to this process's stdout (``console=1``) or stderr (``console=2``). With
        ``terminal`` the worker sees a terminal of its own; ``prefix`` stands in place of the worker's. Lines
        with a prefix show text, colours and moves within the line, and nothing that could reach beyond it.
        """
    @property
    def kind(self) -> Literal["inherit", "null", "file", "fd", "pipe", "stdout", "log"]:
        """Name of the method that made it."""
    @property
    def path(self) -> str | None:
        """File of a ``file`` or a ``log``."""
    @property
    def append(self) -> bool:
        """Of a ``file``; a ``log`` always appends."""
    @property
    def descriptor(self) -> int | None:
        """The number of an ``fd``."""
    @property
    def console(self) -> Literal[1, 2] | None:
        """Where a ``log`` is shown."""
    @property
    def terminal(self) -> bool:
        """Whether the worker sees a terminal instead of a pipe, of a ``log``."""
    @property
    def prefix(self) -> bytes | None:
        """What stands before each line of a ``log`` in place of the worker's prefix."""
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]  # as for every class with equality alone

@final
class WorkerSpec:
    """One worker: what to execute and how. Immutable; equal to another that means the same."""

    def __new__(
        cls,
        argv: Sequence[str | bytes],
        *,
        env: Mapping[str, str] | None = None,
        cwd: _Path | None = None,
        stdin: Stdio | None = None,
        stdout: Stdio | None = None,
        stderr: Stdio | None = None,
        cpus: Sequence[int] | None = None,
        mempolicy: tuple[Literal["bind", "preferred", "interleave", "local"], Sequence[int]] | None = None,
        foreground: bool = False,
        prefix: str | bytes | None = None,
        keep_fds: Sequence[int] | None = None,
        fork_server: int | None = None,
        fork_entry: int = 0,
    ) -> Self:
        """``argv[0]`` is looked up on the worker's ``PATH`` when it holds no slash.

        ``env`` is laid over the group's environment (later wins). ``stdin`` defaults to null, ``stdout``
        and ``stderr`` to inherit. ``cpus``: CPUs the worker is bound to; ``mempolicy``: NUMA policy and
        nodes (both must lie in what this process may use). ``foreground`` leaves the worker in the
        terminal's foreground process group, so that it can read from the terminal; at most one worker may.
        ``prefix`` is put before each line that is shown of its `Stdio.log` streams. ``keep_fds``: descriptors
        of this process, from 3 on, that the worker has under the same numbers; it has no other beside its
        standard streams. They stay the caller's and must be open until the worker has started: one that is
        not is a failure of the stage ``stdio``.

        ``fork_server``: number of a fork server (`Supervisor.start_fork_server`) that starts the worker. No
        worker of the group is started before it is ready; where it is lost, ``argv`` is executed.
        ``fork_entry``: place in ``argv`` of what follows the interpreter and its flags, a script or ``-m``.
        """
    @property
    def argv(self) -> list[str]: ...
    @property
    def env(self) -> dict[str, str]: ...
    @property
    def cwd(self) -> str | None: ...
    @property
    def stdin(self) -> Stdio: ...
    @property
    def stdout(self) -> Stdio: ...
    @property
    def stderr(self) -> Stdio: ...
    @property
    def cpus(self) -> list[int]:
        """Empty: as inherited."""
    @property
    def mempolicy(self) -> tuple[Literal["bind", "preferred", "interleave", "local"], list[int]] | None: ...
    @property
    def foreground(self) -> bool: ...
    @property
    def prefix(self) -> bytes: ...
    @property
    def keep_fds(self) -> list[int]: ...
    @property
    def fork_server(self) -> int | None: ...
    @property
    def fork_entry(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]  # as for every class with equality alone

@final
class LaunchSpec:
    """Everything the engine needs to start and end one worker group.

    Immutable; holds no decisions. Equal to another that means the same.
    """

    def __new__(
        cls,
        workers: Sequence[WorkerSpec],
        *,
        env: Mapping[str, str] | None = None,
        on_failure: Literal["stop", "report"] = "stop",
        grace_s: float = 30.0,
        binding: Literal["required", "cpus_required", "wanted"] = "required",
        log_max_bytes: int | None = None,
        collapse: bool = False,
        line_files: Sequence[tuple[Literal[1, 2], _Path, Sequence[str | bytes]]] | None = None,
        partial_after_s: float | None = 1.0,
        relayed: bool = False,
        inherits: bool = False,
        tells_signals: bool = False,
        import_throttle: int | None = None,
    ) -> Self:
        """``env``: environment of every worker (default: this process's, now).

        ``inherits``: ``env`` is this process's environment with changes, as it always is by default. Then
        what no mapping can hold of that is passed on, too: entries without a name or a value, and further
        ones of a variable that was not changed.

        ``on_failure``: what a failed worker (non-zero code, signal, failed exec) means for the others.
        ``grace_s``: seconds between the stop signal and SIGKILL, one deadline for the whole group.
        ``binding``: whether a worker that cannot be bound to its ``cpus`` and ``mempolicy`` is not started
        (``required``, ``cpus_required`` for the CPUs alone) or runs all the same and `Unbound` tells.
        For `Stdio.log` streams: ``log_max_bytes`` caps each file, its first and last part are kept;
        ``collapse`` shows equal lines of several workers once, with a count; ``line_files`` are
        (1 for stdout or 2 for stderr, path, words): lines that hold one of the words are copied to the path;
        ``partial_after_s``: seconds without output after which an unfinished line is shown where there is no
        terminal, twice as long if it goes on (None: never); ``relayed``: the caller reads this process's
        stdout and stderr, and is told there which lines are shown unfinished (`dsl.control.relay`).

        ``tells_signals``: a signal to the job (see `Guard`) does nothing by itself. `SignalReceived` tells
        of it, with what would have been done; the caller acts by `Supervisor.signal`, ``stop`` and ``kill``.
        The guard does not know of that: it kills an agent that does not end in the time that a stop leaves.

        ``import_throttle``: at most so many workers import at a time, as far as can be seen; those that fork
        servers fork do not count. The next one is started when one of them has waited for 0.1 s without using
        a processor or a disk, has ended, or has run for a minute (None: all are started at once).

        Raises `SpecError`.
        """
    def __len__(self) -> int: ...
    @property
    def workers(self) -> list[WorkerSpec]: ...
    @property
    def env(self) -> dict[str, str]:
        """What every worker gets, less its own."""
    @property
    def on_failure(self) -> Literal["stop", "report"]: ...
    @property
    def grace_s(self) -> float: ...
    @property
    def binding(self) -> Literal["required", "cpus_required", "wanted"]: ...
    @property
    def log_max_bytes(self) -> int | None: ...
    @property
    def collapse(self) -> bool: ...
    @property
    def line_files(self) -> list[tuple[Literal[1, 2], str, list[bytes]]]: ...
    @property
    def partial_after_s(self) -> float | None: ...
    @property
    def relayed(self) -> bool: ...
    @property
    def inherits(self) -> bool: ...
    @property
    def tells_signals(self) -> bool: ...
    @property
    def import_throttle(self) -> int | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]  # as for every class with equality alone

@final
class Exit:
    """How one worker ended."""

    @property
    def worker(self) -> int:
        """Index in `LaunchSpec.workers`."""
    @property
    def pid(self) -> int:
        """Process id; 0 when the worker never started."""
    @property
    def code(self) -> int | None:
        """Exit code 0-255, or None when a signal ended it or it never ran."""
    @property
    def signal(self) -> int | None:
        """Number of the signal that ended it."""
    @property
    def core_dumped(self) -> bool: ...
    @property
    def exec_stage(self) -> str | None:
        """The step that failed when the worker never ran: ``exec``, ``chdir``, ``stdio``, ``affinity``...

        ``cancelled`` for a worker that was never tried because the group was stopped.
        """
    @property
    def exec_errno(self) -> int | None:
        """errno of that step."""
    @property
    def exec_path(self) -> str | None:
        """The path that could not be executed or opened."""
    @property
    def status(self) -> int:
        """The code, 128 + signal, or 127 (not found) or 126 (found, not executable) for a failed exec."""
    @property
    def order(self) -> int:
        """Position in the order in which the kernel reported the deaths of this group, from 0."""
    @property
    def caused_by_stop(self) -> bool:
        """True for a death after we had begun to signal the worker: a victim, never a cause."""
    @property
    def cpu_user_s(self) -> float: ...
    @property
    def cpu_system_s(self) -> float: ...
    @property
    def max_rss_bytes(self) -> int:
        """Peak of resident memory.

        At least what this process had in memory when it started the worker, which shares it until its program
        runs: of a small program it says nothing.
        """
    @property
    def started_ns(self) -> int:
        """CLOCK_REALTIME nanoseconds when exec had succeeded; 0 when it never ran."""
    @property
    def ended_ns(self) -> int:
        """CLOCK_REALTIME nanoseconds when the death was noticed."""
    def to_dict(self) -> dict[str, Any]:
        """Its facts as plain data, as they stand inside an event (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Started:
    """The worker's program is running (exec has succeeded)."""

    @property
    def worker(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def time_ns(self) -> int: ...
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Unbound:
    """The worker runs, but not bound as its spec says (never with ``binding="required"``).

    The kernel refused, or did something else than it was told, as a cpuset that has shrunk makes it do.
    """

    @property
    def worker(self) -> int: ...
    @property
    def stage(self) -> Literal["affinity", "affinity-check", "mempolicy", "mempolicy-check"]:
        """The step that failed; those after it were not tried.

        ``-check``: what was set is not what was asked for.
        """
    @property
    def errno(self) -> int: ...
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Exited:
    """The worker ended, or could not be started. Reported exactly once a worker."""

    @property
    def exit(self) -> Exit: ...
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Output:
    """Bytes a worker wrote to a stream routed through `Stdio.pipe`; empty at end of file."""

    @property
    def worker(self) -> int: ...
    @property
    def stream(self) -> Literal[1, 2]: ...
    @property
    def data(self) -> bytes: ...
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class SignalReceived:
    """A signal reached this job (only in an agent, see `Guard`)."""

    @property
    def signum(self) -> int: ...
    @property
    def action(self) -> Literal["forward", "stop", "preempt", "reopen", "ignore"]:
        """What is done about it; ``ignore`` for a first stop signal to a job that is ending already.

        With `LaunchSpec.tells_signals` it is what would have been done, if the same had been done about all
        before it: a stop signal after the first is ``stop`` again, because it insists.
        """
    @property
    def from_terminal(self) -> bool: ...
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Stopping:
    """The group is being stopped."""

    @property
    def reason(self) -> Literal["failure", "request", "signal", "guard_lost"]: ...
    @property
    def signum(self) -> int:
        """Signal that was sent to the workers."""
    @property
    def grace_s(self) -> float: ...
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Killing:
    """The deadline has passed: every process of the group gets SIGKILL."""

    @property
    def workers(self) -> list[int]:
        """Indices of the workers that were still alive."""
    @property
    def tier(self) -> Literal["cgroup", "scan"]: ...
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class ForkServerReady:
    """A fork server has imported what it was to import, and takes orders."""

    @property
    def server(self) -> int:
        """Its number, as `Supervisor.start_fork_server` returned it."""
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class ForkServerSlow:
    """A fork server is still importing after ``slow_s``, and its workers wait. Once a server, if at all."""

    @property
    def server(self) -> int: ...
    @property
    def pid(self) -> int:
        """Its process, for those who want to see what it does."""
    @property
    def import_s(self) -> float:
        """Seconds since it was started."""
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class ForkServerLost:
    """A fork server takes no more orders: workers that name it are executed from now on. Once a server."""

    @property
    def server(self) -> int: ...
    @property
    def pid(self) -> int:
        """Its process; 0 when it could not be executed."""
    @property
    def signum(self) -> int | None:
        """The signal that has ended it."""
    @property
    def text(self) -> str:
        """Why, as one line: it has refused, has died, or is of no use."""
    @property
    def workers(self) -> list[int]:
        """Workers that ran and die with it."""
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Ended:
    """Last event of a group: every worker has ended and nothing of it is left, but for `survivors`."""

    @property
    def first_failure(self) -> Exit | None:
        """The earliest death that we did not cause."""
    @property
    def stop_signal(self) -> int | None:
        """Signal by which the user ended the job, if so."""
    @property
    def stragglers(self) -> int:
        """Descendants that outlived their worker and were ended by us."""
    @property
    def survivors(self) -> list[tuple[int, str, str, str | None, int | None]]:
        """(pid, state, name, wchan, errno) of processes that SIGKILL did not end in time.

        ``wchan`` is the kernel function that it sleeps in, None if that cannot be known. ``errno`` is EPERM
        for a process that may not be signalled, as root's. Processes that may be left and that ``/proc`` does
        not show have the pid 0, and the reason as ``errno``.
        """
    @property
    def oom_kills(self) -> int:
        """Out-of-memory kills while the group ran, as the memory cgroup of this process counts them.

        That of the workers, if the engine has made one that counts and says more. 0 where nobody counts.
        """
    @property
    def tail(self) -> bytes:
        """Last output (16 KiB at most) of the worker that failed first.

        Of its stderr, if that is a `Stdio.log` stream; else empty.
        """
    @property
    def shown_since(self) -> int | None:
        """Lines that a terminal has shown since the last one of that stream; None: none of it was shown."""
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class LogNotice:
    """Something that happened to output that the engine passes on. The job goes on."""

    @property
    def kind(
        self,
    ) -> Literal[
        "file_failed", "reopen_failed", "bytes_lost", "console_closed", "console_failed", "lines_dropped"
    ]:
        """What happened.

        ``file_failed``: a log file could not be opened or written (told once a file). ``reopen_failed``: it
        could not be opened anew, and the one that was open is still written. ``bytes_lost``: what a log file
        lacks at its end. ``console_closed``: nobody reads our output any more. ``console_failed``: output
        cannot be shown, because no thread can be had for it. ``lines_dropped``: lines that were not shown,
        because the console took none for a while.
        """
    @property
    def worker(self) -> int | None:
        """Index in `LaunchSpec.workers`."""
    @property
    def path(self) -> str | None: ...
    @property
    def errno(self) -> int | None: ...
    @property
    def count(self) -> int:
        """Bytes or lines."""
    def to_dict(self) -> dict[str, Any]:
        """The event as plain data that JSON can hold (docs/events.md)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

Event: TypeAlias = (
    Started
    | Unbound
    | Exited
    | Output
    | LogNotice
    | SignalReceived
    | Stopping
    | Killing
    | ForkServerReady
    | ForkServerSlow
    | ForkServerLost
    | Ended
)

@final
class Supervisor:
    """Starts, watches and ends one worker group at a time. One engine thread does the work.

    Within somebody's Python it takes no signal and reaps nobody else's children. In an agent (a process
    under a `Guard`) it also takes the signals of the job and reaps orphans.

    It belongs to the process that made it. In a child of `os.fork` every method raises `EngineError`, but
    `wake` and `close`, which do nothing.
    """

    def __new__(cls, *, guard: Guard | None = None) -> Self: ...
    def start_fork_server(
        self,
        words: Sequence[str | bytes],
        *,
        env: Mapping[str, str] | None = None,
        cwd: _Path | None = None,
        cpus: Sequence[int] | None = None,
        mempolicy: tuple[Literal["bind", "preferred", "interleave", "local"], Sequence[int]] | None = None,
        slow_s: float = 30.0,
    ) -> int:
        """Execute a fork server: a Python process that imports once, and forks a worker for each order.

        ``words``: its command, to which the number of a descriptor is added, for its `ForkLink`. ``env``: its
        whole environment (None: this process's, now), to which the job's token is added. ``cpus`` and
        ``mempolicy``: where it runs and has its memory, as far as the kernel lets it; a worker that has none
        of its own inherits them. stdin is ``/dev/null``; the end of what it writes is kept for
        `ForkServerLost`, which quotes the last line. ``slow_s``: `ForkServerSlow` tells of one that is still
        importing after so many seconds; one that is stopped by a signal then, and still after as much time
        again, is lost.

        Returns its number for `WorkerSpec` at once. `ForkServerReady` or `ForkServerLost` follows; one that
        cannot be executed, or that this kernel has not the means for, is lost, too. It serves one group after
        the other and ends with the supervisor. No group's signals reach it.

        Raises `SpecError`, and `EngineError` on a closed supervisor.
        """
    def start(self, spec: LaunchSpec) -> None:
        """Check limits, then begin to spawn.

        Raises `LimitError`, `BindingError`, `EngineError` before anything is started.
        """
    def wait(self, timeout_s: float | None = None, *, routine: bool = True) -> list[Event]:
        """Next events, in order. Python signal handlers run while waiting.

        An empty list means that ``timeout_s`` is over, that somebody has called `wake`, or that another
        thread has closed the supervisor meanwhile. With ``routine`` false it sleeps through starts and clean
        exits, which come with the next event.

        Handlers run under the mask of signals that the caller has, so that what they start is an ordinary
        child.

        Raises `EngineError` on a closed supervisor, when the engine thread has ended of itself, and without
        ``timeout_s`` when no group was started whose `Ended` was not taken yet: it would wait for ever.
        """
    def fileno(self) -> int:
        """A descriptor that `select`, `poll`, `epoll` or an event loop finds readable when there are events.

        It is readable exactly when ``wait(0)`` would return events, or raise because the engine thread has
        ended; while workers are being started, up to 20 ms later. The pattern is::

            select.select([supervisor, *others], [], [])
            for event in supervisor.wait(0):
                ...

        ``routine`` of the last `wait` holds for it, too: after ``wait(0, routine=False)`` it sleeps through
        starts and clean exits, and is readable when the same call would return events. A `wake` does not make
        it readable, since it is no event. Only `wait` may read it. `close` makes it readable for the last
        time, and then closes it: forget it before.

        Raises `EngineError` on a closed supervisor.
        """
    def wake(self) -> None:
        """Make the `wait` that another thread is in, or else the next one, return an empty list at once.

        From any thread, and from a signal handler. Wakes before that `wait` count as one. Events keep for the
        `wait` after it. Does nothing on a closed supervisor.
        """
    def signal(self, signum: int, worker: int | None = None) -> None:
        """Send a signal to one worker's process group, or to all.

        After SIGTSTP to all, workers that were to be started wait for SIGCONT.
        """
    def stop(self, *, signum: int = 15, grace_s: float | None = None) -> None:
        """Begin to stop the group (default grace: the spec's).

        Called again, it can only shorten the grace.
        """
    def kill(self) -> None:
        """SIGKILL to every process of the group, now."""
    def flush(self, stream: Literal[1, 2] | None = None) -> tuple[int, int | None]:
        """Wait until what groups that have ended left to stdout, stderr or (None) both is written.

        What is shown only in a pipe, a socket or a file waits for its reader, also beyond `Ended`. Under a
        `Guard` a signal to the job ends the waiting; elsewhere an exception of a signal handler does, which
        is raised. Returns how many lines were given up, counted once, and the signal that ended the waiting.

        Raises `EngineError` on a closed supervisor.
        """
    def close(self) -> None:
        """`flush`, then kill what is left, wait for it, and end the engine thread. Idempotent."""
    def __enter__(self) -> Self:
        """Itself: the end of a ``with`` block closes it. Raises `EngineError` if it is closed already."""
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close; after an exception what the console has not taken is given up."""

@final
class GuardOutcome:
    """What became of the agent."""

    @property
    def code(self) -> int:
        """Exit code for the command."""
    @property
    def agent_signal(self) -> int | None:
        """The signal that ended the agent, if one did."""
    @property
    def ended(self) -> int:
        """Processes of the job that the guard had to kill."""
    @property
    def survivors(self) -> list[tuple[int, str, str, str | None, int | None]]:
        """(pid, state, name, wchan, errno) of what would not die, as in `Ended.survivors`."""
    @property
    def terminal_interrupt(self) -> bool:
        """The terminal's Ctrl-C was among the signals."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Guard:
    """The process that the shell sees.

    It forwards signals, keeps the exit code, and ends what a dead agent left.
    """

    def __new__(
        cls,
        signals: Mapping[int, Literal["stop", "forward", "preempt"]] | None = None,
        *,
        preempt_grace_s: float | None = None,
        helper: int | None = None,
        mask: Collection[int] | None = None,
    ) -> Self:
        """Become subreaper, block and take the signals of the job. Call with one thread, then fork.

        ``signals``: what each signal means. ``stop``: pass it on to the workers, and kill what is left after
        the grace; a second one kills at once. ``forward``: pass it on and go on. ``preempt``: the job will
        lose its machine; pass it on, and kill what is left after ``preempt_grace_s`` seconds (default: the
        grace of the group). That is a stop, which `Ended.stop_signal` names; a second notice changes nothing,
        and the first stop signal after it is passed on and leaves the workers the grace at most.

        Only what is named is taken: any other signal that ends a process ends the guard, and with it the job.
        SIGTSTP, SIGCONT and SIGWINCH are forwarded always. None: SIGINT, SIGTERM, SIGHUP and SIGQUIT stop,
        SIGUSR1 and SIGUSR2 are forwarded. A signal that is ignored when the guard is made (SIGHUP under
        ``nohup``; SIGPIPE and SIGXFSZ, which Python ignores) stays ignored, even if it is named. Where a
        group has log files, a SIGHUP that would stop the job and is no hang-up of a terminal opens them anew.

        ``helper``: pid of a child that helps the job and ends by itself when the agent has ended; the guard
        waits some seconds for that, and kills it then. Any other child that there is now is a stranger.

        ``mask``: the signals that were blocked before the caller began to hold signals back for the guard:
        the workers' mask. None: those that are blocked now.

        Raises `SpecError` for an unknown meaning, and for a signal that cannot be taken: SIGKILL, SIGSTOP,
        SIGCHLD, those of a fault (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS), 32 and 33,
        which are the C library's, and numbers outside 1 to 64.
        """
    def supervise(self, agent_pid: int, grace_s: float, *, reopens: bool = False) -> GuardOutcome:
        """In the parent of the fork: wait for the agent, forwarding signals, then end what it left.

        An agent that has not ended well after ``grace_s`` seconds from a stop signal, or the time that a
        preemption leaves, is killed. ``reopens``: the job has log files, so a SIGHUP that is no hang-up does
        not end it.
        """
    def discard(self) -> None:
        """Remove what it has made: for a guard that gets no agent, because the fork has failed."""
    def enter_agent(self) -> None:
        """In the child of the fork: own process group, subreaper, watch the guard."""
    @property
    def job_id(self) -> str:
        """Random token that every process of the job carries in ``DSL_JOB_ID``."""
    @property
    def pid(self) -> int:
        """The guard's pid."""

@final
class ForkedProgram:
    """The program of a forked worker, to be called by the interpreter as `sys.excepthook`.

    There no frame of Python lies below it, so tracebacks and stacks show the program's own frames alone. It
    ends as a main program does: by its exit code, with the interpreter's traceback, or by SIGINT.
    """

    def __new__(
        cls,
        prepare: Callable[
            [type[BaseException], BaseException, TracebackType | None],
            tuple[Callable[..., object], tuple[Any, ...]],
        ],
        settle: Callable[[bool], object],
        finish: Callable[[], object],
    ) -> Self:
        """``prepare`` gets what the hook gets, and answers what to call with which arguments.

        ``settle`` is called behind that, with whether a KeyboardInterrupt has ended it, and ``finish`` at the
        end, unless a SystemExit has ended it.
        """
    def __call__(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None, /
    ) -> None:
        """Run it. Raises SystemExit, which the interpreter turns into its exit code."""

class SecureError(Exception):
    """A session cannot do what it was asked for: a wrong key, a bad message, or a call out of order."""

@final
class SecureSession:
    """One side of an encrypted connection between two that hold the same key. Bytes in, bytes out.

    Without the key nobody can read, change, repeat, reorder or make a message, and who learns it later cannot
    read what was recorded before. Only that the connection has ended does no message tell. The protocol is
    Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s.
    """

    MAX_PLAIN: Final = 65519
    """Bytes that one message holds at most. It is 16 bytes longer than what it holds."""

    def __new__(cls, key: bytes, *, initiator: bool) -> Self:
        """``key``: the 32 bytes that both sides have. The initiator speaks first.

        The initiator calls `handshake`, sends the bytes, and gives the answer to `read_handshake`; the other
        side does the reverse. Then both are ready. Raises `SecureError` for a key of another length.
        """
    def handshake(self) -> bytes:
        """The next message of the handshake, for the other side (48 bytes).

        Raises `SecureError` when it is the other side's turn, or the handshake is over.
        """
    def read_handshake(self, data: bytes) -> None:
        """Take the other side's next message of the handshake, as a whole.

        Raises `SecureError` when it was made with another key, when it was damaged, and out of order. After
        a message that does not fit every call fails.
        """
    @property
    def is_ready(self) -> bool:
        """Whether the handshake is over and no message was refused."""
    def seal(self, data: bytes) -> bytes:
        """The message that holds ``data``. The other side must open all messages in the order they were made.

        Raises `SecureError` for more than `MAX_PLAIN` bytes, and when the session is not ready.
        """
    def open(self, data: bytes) -> bytes:
        """What the other side's next message holds; ``data`` is the whole message.

        Raises `SecureError` when it is not that message as it was made. Then every later call fails.
        """

@final
class ForkLink:
    """A fork server's connection with the engine, in the server's process.

    The thread that makes it is the one that forks, and lives as long as the process: the workers die with
    it. In a child of `os.fork` it is of no use.
    """

    def __new__(cls, fd: int) -> Self:
        """``fd``: the last word of the command. It is the link's from now on. Raises `EngineError`."""
    def settle(self) -> None:
        """Note what imports have left, for `ForkOrder.take_trace`: signal handlers, the limit of files.

        To be called when everything is imported, before this process forks. Raises `EngineError`.
        """
    @staticmethod
    def environ() -> list[bytes]:
        """The environment of this process as C libraries see it: ``NAME=value``."""
    def ready(self) -> None:
        """Say that everything is imported, so that orders may come.

        Raises `EngineError` if nobody listens.
        """
    def refuse(self, text: str) -> None:
        """Say why no worker is to come of this process, in one line, instead of `ready`. Then end."""
    def next(self) -> ForkOrder | None:
        """Wait for the next order. None: the engine has hung up, and the process is to end.

        Tells the engine meanwhile which workers have ended, and reaps them when they are not needed any more.
        """
    def forked(self, order: ForkOrder, pid: int) -> None:
        """Say which child was forked for an order, in the parent. Must come before `next`."""
    def not_forked(self, order: ForkOrder, errno: int) -> None:
        """Say that none could be. The engine gives no more orders then."""
    def fileno(self) -> int:
        """The descriptor."""

@final
class ForkOrder:
    """One worker to be forked."""

    @property
    def argv(self) -> list[bytes]:
        """The command that would start it without a fork server."""
    @property
    def entry(self) -> int:
        """Place in `argv` of what follows the interpreter and its flags."""
    @property
    def environ(self) -> list[bytes]:
        """Its environment, entry by entry: mostly ``NAME=value``, but whatever was inherited."""
    def enter(self) -> None:
        """Make the worker of this process.

        Its process group, the attempt's cgroup, its streams and kept descriptors and no others, directory,
        limit of open files, CPUs and memory policy, and the signal mask of every worker. It dies with the
        server. All signals with a handler, SIGPIPE and SIGXFSZ get their default action, until `take_trace`.

        Comes back once the engine watches the worker. What fails is told to the engine, and ends the process
        with code 127. Does nothing in the server.
        """
    def show_command(self, words: int) -> None:
        """Make `argv` what others see as the command of this process, and `environ` its environment.

        ``words``: how many words the server was started with, which the interpreter still tells C libraries.
        After `enter`. ``os.environ`` stays as it is: it was made before. Does nothing in the server.
        """
    def forget_exit_functions(self) -> None:
        """Let ``exit`` of C call what this process has asked for from now on, and nothing of before.

        What streams of C hold is written. Destructors of libraries that were loaded before are among them.
        Where a thread holds one of the standard streams, all are called. Does nothing in the server.
        """
    def take_trace(self) -> None:
        """Leave this process as imports had left the server at `ForkLink.settle`. Does nothing in there."""
