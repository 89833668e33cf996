"""What a `Supervisor` starts: frozen records, which the engine reads when the group is started.

Nothing is checked before. `Supervisor.start` raises `SpecError` for what cannot be started as written.
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


class _Spec(Record):
    """Shows only what is not the default, and no values of variables, which may be secret."""

    def __repr__(self) -> str:
        names: Sequence[str] = self.__match_args__
        given = {name: getattr(self, name) for name in names}
        defaults: dict[str, Any] = self._defaults  # type: ignore[attr-defined]
        shown = []
        for name, value in given.items():
            if name == "env" and value:
                shown.append(f"env=<{len(value)} variable{'s' * (len(value) != 1)}>")
            elif name not in defaults or value != defaults[name]:
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


class Stdio(_Spec):
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
        """A descriptor of this process.

        The caller owns it, and must keep it open until the worker has started.
        """
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
        with the worker's prefix, to this process's stdout (``console=1``) or stderr (``console=2``). With
        ``terminal`` the worker sees a terminal of its own. ``prefix`` replaces the worker's prefix. A line
        with a prefix shows text, colours and cursor moves within the line; the engine removes all sequences
        that could change other lines.
        """
        return Stdio("log", path, console=console, terminal=terminal, prefix=prefix)


INHERIT, NULL = Stdio("inherit"), Stdio("null")


class WorkerSpec(_Spec):
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
    """Text before each shown line of the worker's `Stdio.log` streams."""
    keep_fds: Sequence[int] = ()
    """Descriptors of this process, from 3 on, that the worker gets under the same numbers.

    The worker has no others besides its standard streams. The caller owns these descriptors, and must keep
    them open until the worker has started; a closed one is a failure of the stage ``stdio``.
    """
    fork_server: int | None = None
    """Number of the fork server (`Supervisor.start_fork_server`) that forks the worker.

    No worker of the group starts before the server is ready. If the server is lost, ``argv`` is executed.
    """
    fork_entry: int = 0
    """Index in ``argv`` of the first word after the interpreter and its flags: a script, or ``-m``."""


class LaunchSpec(_Spec):
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
    """The group goes on when its workers have ended, until it is stopped or killed: see `Supervisor.add`.

    Such a group may begin without workers.
    """
    at_once: int | None = None
    """At most this many workers run at a time, in order; the next starts when one has ended (None: all)."""
    signal_scope: Literal["rank", "group"] = "group"
    """Who hears a signal to a worker, its own process (``rank``) or its process group (``group``).

    With ``rank``, what a worker has started gets SIGTERM when a stop has ended the worker, or shortly before
    the grace is over. SIGKILL, SIGSTOP, SIGTSTP, SIGCONT and SIGWINCH always go to the process group.
    """
    binding: Literal["required", "cpus_required", "wanted"] = "required"
    """What happens to a worker that cannot be bound to its ``cpus`` and ``mempolicy``.

    With ``required`` the worker is not started. With ``cpus_required`` that holds for the CPUs alone. With
    ``wanted`` the worker runs anyway, and `Unbound` reports it.
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
    """The caller reads this process's stdout and stderr.

    The engine marks there which lines are unfinished, for the hub that passes them on (`Hub.relay`).
    """
    tells_first_output: bool = False
    """A `LogNotice` reports the first output of each worker."""
    inherits: bool = False
    """``env`` is this process's environment with changes, as the default ``env`` always is.

    Then the workers also get the entries that no mapping can hold: entries without a name or a value, and
    further entries of a variable that was not changed.
    """
    tells_signals: bool = False
    """A signal to the job (see `Guard`) has no effect by itself.

    `SignalReceived` reports the signal and the action that it would have had; the caller acts by
    `Supervisor.signal`, ``stop`` and ``kill``. The guard still kills an agent that has not ended in the time
    that a stop leaves.
    """
    lingers: bool = False
    """If all workers end well, processes that outlive them have ``grace_s`` to end.

    `Leftovers` reports them. Otherwise they get SIGTERM at once, and SIGKILL after at most two seconds.
    """
