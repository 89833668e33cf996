"""Types and docs of the extension module. ``mypy.stubtest`` checks them against the built module."""

from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias, final

from typing_extensions import Self

from dsl.events import Event, GuardOutcome
from dsl.spec import LaunchSpec, WorkerSpec

__all__ = [
    "BindingError",
    "EngineError",
    "FdStream",
    "FileMarks",
    "ForkLink",
    "ForkOrder",
    "ForkedProgram",
    "Guard",
    "Hub",
    "LimitError",
    "Link",
    "SpecError",
    "Stream",
    "Supervisor",
    "WarmCall",
    "WarmDoor",
    "__version__",
    "build_info",
    "can_move_cursor",
    "connect",
    "is_in_job",
    "kernel_interfaces",
    "peer_pid",
    "probe_port",
    "vitals",
    "warm_answer",
    "warm_call",
    "warm_digest",
    "warm_key",
    "warm_listen",
    "warm_obstacle",
]

__version__: str
"""Version of the data that ``to_dict`` of the events returns (docs/events.md)."""

def build_info() -> dict[str, str]:
    """Version, target triple and profile of the extension."""

def kernel_interfaces() -> dict[str, str]:
    """Kernel interfaces that the engine uses where it can: name -> why it does without, empty if it is used.

    The names are ``clone3``, ``pidfd``, ``close_range`` and ``cgroup``. To find out about the last one, the
    engine makes a cgroup for an instant.
    """

def vitals(pids: Sequence[int]) -> list[tuple[str, int, int, int] | None]:
    """What processes use; None for a process that has ended, or that cannot be seen.

    The kernel's letter for its state, milliseconds of CPU time (with that of children that were waited for),
    bytes of resident memory, number of threads.
    """

def peer_pid(fd: int) -> int:
    """Pid of the process that listens at the other end of a unix socket, or has connected from there.

    Ask before you send anything, and before you believe an answer. Raises PermissionError if it is no process
    of this user here, that is, with the same namespaces and root directory; the text goes on after "the
    process", and there is no errno. Raises ConnectionResetError if it has ended, and OSError for a descriptor
    that is no socket.
    """

def probe_port(port: int) -> int:
    """Listen on a TCP port for an instant, on all addresses as a TCPStore does; port 0: any free port.

    Returns the port. Raises OSError with the kernel's reason: taken, not permitted, no network.
    """

def can_move_cursor() -> bool:
    """Whether our terminal can redraw lines: not if ``TERM`` is missing or ``dumb``, nor in a notebook."""

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
class Supervisor:
    """Starts, watches and ends one worker group at a time. One engine thread does the work.

    In an ordinary Python program it handles no signals, and reaps only its own children. In an agent (a
    process under a `Guard`) it also handles the signals to the job, and reaps orphans.

    Only the process that made a supervisor can use it. In a child of `os.fork`, `wake` and `close` do
    nothing, and every other method raises `EngineError`.
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

        ``words``: the server's command; the engine appends the number of a descriptor for `ForkLink`.
        ``env``: the server's whole environment (None: the current one of this process); the engine adds the
        job's token. ``cpus`` and ``mempolicy``: where the server runs and has its memory, as far as the
        kernel allows; a worker inherits them unless its spec has its own. The server's stdin is
        ``/dev/null``. The engine keeps the end of the server's output, and `ForkServerLost` quotes the last
        line. ``slow_s``: after this many seconds of importing, `ForkServerSlow` is reported. A server that is
        stopped by a signal at that time, and still is after another ``slow_s``, is lost.

        Returns the server's number for `WorkerSpec` at once. `ForkServerReady` or `ForkServerLost` follows. A
        server is also lost if it cannot be executed, or if this kernel lacks what it needs. The server works
        for one group after the other, and ends with the supervisor. Signals to a group do not reach it.

        Raises `SpecError`, and `EngineError` on a closed supervisor.
        """
    def start(self, spec: LaunchSpec) -> None:
        """Check limits, then begin to start the workers.

        Raises `LimitError`, `BindingError`, `EngineError` before anything is started.
        """
    def add(self, worker: WorkerSpec) -> int:
        """Add a worker to the running group, and return its index. It starts as the first ones did.

        The environment, the grace and all other settings are those of the group's spec. Descriptors of the
        worker have to stay open until it has started. A group with `LaunchSpec.stays_open` waits for such
        workers.

        Raises `SpecError`, `LimitError` and `BindingError`, and `EngineError` if no group runs, or if the
        group is being stopped or has ended. Then the group is as it was.
        """
    def wait(self, timeout_s: float | None = None, *, routine: bool = True) -> list[Event]:
        """Wait for the next events, and return them in order. Python signal handlers run while waiting.

        An empty list means that ``timeout_s`` has passed, that `wake` was called, or that another thread has
        closed the supervisor. With ``routine=False`` starts and clean exits do not end the wait: they are
        returned together with the next other event.

        Handlers run with the caller's signal mask, so that processes they start are ordinary children.

        Raises `EngineError` on a closed supervisor, and when the engine thread has ended by itself. Without
        ``timeout_s`` also when no group has its `Ended` still to come: the wait would never end.
        """
    def fileno(self) -> int:
        """A descriptor for `select`, `poll`, `epoll` or an event loop; it is readable when there are events.

        The descriptor is readable exactly when ``wait(0)`` would return events, or raise because the engine
        thread has ended; while workers are being started, up to 20 ms later. The pattern is::

            select.select([supervisor, *others], [], [])
            for event in supervisor.wait(0):
                ...

        ``routine`` of the last `wait` also applies here: after ``wait(0, routine=False)`` starts and clean
        exits do not make the descriptor readable; events that the same call would return do. `wake` does not
        make it readable, since a wake is no event. Only `wait` may read from it. `close` makes it readable
        for the last time and then closes it, so remove it from your loop before you call `close`.

        Raises `EngineError` on a closed supervisor.
        """
    def listen(self, folder: _Path, name: str) -> None:
        """Let others call at a socket of this name, and report `Called` when they do.

        The folder is made if it is missing. `unlisten` removes the socket, and so does the end of the
        supervisor. It costs nothing while nobody calls.

        Raises `EngineError`: the socket cannot be made, or the folder is not for this user alone.
        """
    def callers(self) -> list[int]:
        """Take the descriptors of those who have called, which you have to close.

        They do not block. Callers of other users than root and this one were turned away.
        """
    def unlisten(self) -> None:
        """Remove the socket. Those who have called keep their connections."""
    def pids(self) -> list[int]:
        """Pids of the group's workers, by index; 0 for a worker that does not run."""
    def last_lines(self) -> dict[int, bytes]:
        """The last line of each worker that has written one to a `Stdio.log` stream, by its index.

        At most the last KiB of a line. What a worker has said before the first call is known only if it came
        through the stream that its stderr goes to. Without an answer in a second it is empty: a disk is slow.
        """
    def join_fork_server(self, fd: int, is_prepared: bool) -> int:
        """Take the branch of a warm server as fork server. Returns its number, as `start_fork_server` does.

        ``fd``: a connection of `warm_call`, which the engine owns from now on. ``is_prepared``: the server
        has imported, so it is soon given up if it does not answer.
        """
    def wake(self) -> None:
        """Make a `wait` in another thread return an empty list at once; without one, the next `wait`.

        You can call it from any thread, and from a signal handler. Several wakes before a `wait` count as
        one. Pending events stay for the `wait` after that. Does nothing on a closed supervisor.
        """
    def signal(self, signum: int, worker: int | None = None) -> None:
        """Send a signal to one worker, or to all. `LaunchSpec.signal_scope` says who hears it.

        After SIGTSTP to all, workers that have not started yet wait for SIGCONT.
        """
    def stop(self, *, signum: int = 15, grace_s: float | None = None) -> None:
        """Begin to stop the group. Without ``grace_s`` the grace is that of the spec.

        Another call can only shorten the grace.
        """
    def kill(self) -> None:
        """Send SIGKILL to every process of the group, now."""
    def flush(self, stream: Literal[1, 2] | None = None) -> tuple[int, int | None]:
        """Wait until all output of ended groups to stdout, stderr or (None) both is written.

        Output that is shown only in a pipe, a socket or a file waits for its reader, even after `Ended`.
        Under a `Guard`, a signal to the job ends the waiting; elsewhere an exception in a signal handler
        does, and `flush` raises it. Returns how many lines were given up (each is counted once), and the
        signal that ended the waiting.

        Raises `EngineError` on a closed supervisor.
        """
    def tee(self, fd: int) -> None:
        """Copy what is shown on the consoles to a socket, pipe or file as well, after the last lines shown.

        The descriptor is duplicated. If it takes too little, lines are missing there, with a note of their
        number; nothing waits for it. The copies end when nobody reads them, or with the supervisor. Streams
        that workers inherit are not shown by the engine, and not copied.

        Raises `EngineError` on a closed supervisor, `OSError` for a bad descriptor.
        """
    def close(self) -> None:
        """`flush`, kill all processes that are left, wait for them, and end the engine thread. Idempotent."""
    def __enter__(self) -> Self:
        """Return itself; the end of the ``with`` block closes it. Raises `EngineError` if it is closed."""
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close the supervisor; after an exception, give up the output that the console has not taken."""

@final
class Guard:
    """The process that the shell sees.

    It forwards signals, keeps the exit code, and ends the processes that a dead agent left.
    """

    def __new__(
        cls,
        signals: Mapping[int, Literal["stop", "forward", "preempt"]] | None = None,
        *,
        preempt_grace_s: float | None = None,
        helper: int | None = None,
        mask: Collection[int] | None = None,
    ) -> Self:
        """Become subreaper, and block and handle the signals to the job. Call it with one thread, then fork.

        ``signals``: the meaning of each signal.

        - ``stop``: pass it on to the workers, and after the grace kill all processes that are left. A second
          stop signal kills at once.
        - ``forward``: pass it on to the workers, and go on.
        - ``preempt``: the job will lose its machine. Pass the signal on, and kill all processes that are left
          after ``preempt_grace_s`` seconds (default: the grace of the group). This is a stop, so
          `Ended.stop_signal` names it. A second notice changes nothing. The first stop signal after the
          notice is passed on, and leaves the workers the grace at most.

        With ``signals=None``, SIGINT, SIGTERM, SIGHUP and SIGQUIT stop, and SIGUSR1 and SIGUSR2 are
        forwarded. SIGTSTP, SIGCONT and SIGWINCH are always forwarded. The guard handles no other signals: if
        one of them ends the guard, it ends the job, too. A signal that is ignored when the guard is made
        (SIGHUP under ``nohup``; SIGPIPE and SIGXFSZ, which Python ignores) stays ignored, even if ``signals``
        names it. SIGINT, SIGQUIT, SIGTERM, SIGUSR1 and SIGUSR2 count all the same, but not if a key of a
        terminal sends them: a script lets what it starts with ``&`` ignore its keys. If a group has log
        files, a SIGHUP that would stop the job reopens them instead, unless a terminal has hung up.

        ``helper``: pid of a child that helps the job, and ends by itself after the agent. The guard waits
        some seconds for that, and then kills the helper. No other child that exists now belongs to the job.

        ``mask``: the signal mask of the workers: the signals that were blocked before the caller began to
        hold signals back for the guard. None: the signals that are blocked now.

        Raises `SpecError` for an unknown meaning, and for a signal that cannot be handled: SIGKILL, SIGSTOP,
        SIGCHLD, those of a fault (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS), 32 and 33,
        which the C library uses, and numbers outside 1 to 64.
        """
    def supervise(
        self, agent_pid: int, grace_s: float, *, reopens: bool = False, links: Sequence[int] | None = None
    ) -> GuardOutcome:
        """In the parent of the fork: wait for the agent, forwarding signals, then end the processes it left.

        The guard kills an agent that still runs well after the grace: ``grace_s`` seconds from a stop signal,
        or the time that a preemption leaves. ``reopens``: the job has log files, so a SIGHUP does not end the
        job unless a terminal has hung up. ``links``: descriptors of copies of the agent's connections with
        warm servers, which the guard owns from now on. It hangs up when the agent has ended, and waits until
        nothing is left below the branches of an agent that was killed.
        """
    def discard(self) -> None:
        """Remove what the guard has made, when there is no agent because the fork failed."""
    def enter_agent(self) -> None:
        """In the child of the fork: become an agent, with its own process group, and watch the guard.

        The agent becomes subreaper, too.
        """
    job_id: Final[str]
    """Random token that every process of the job carries in ``DSL_JOB_ID``."""
    pid: Final[int]
    """The guard's pid."""

@final
class ForkedProgram:
    """The program of a forked worker, which the interpreter calls as `sys.excepthook`.

    No Python frame is below it there, so tracebacks and stacks show only the program's own frames. It ends as
    a main program does: with its exit code, with the interpreter's traceback, or by SIGINT.
    """

    def __new__(
        cls,
        prepare: Callable[
            [type[BaseException], BaseException, TracebackType | None],
            tuple[Callable[..., object], tuple[Any, ...]],
        ],
        settle: Callable[[int | None], object],
        finish: Callable[[], object],
    ) -> Self:
        """``prepare`` gets the arguments of the hook, and returns the function to call and its arguments.

        ``settle`` is called after that function, with the exit code that follows, or with None if a
        KeyboardInterrupt ended it. ``finish`` is called at the end, unless a SystemExit ended the function.
        """
    def __call__(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None, /
    ) -> None:
        """Run the program. Raises SystemExit with its exit code."""

@final
class Stream:
    """A connection that carries a link (`dsl.control.hub`) and that no hub has taken yet."""

def FdStream(read_fd: int, write_fd: int) -> Stream:  # noqa: N802  to its callers it is a class
    """Two descriptors that carry a link; they may be the same one. The stream owns them from now on.

    Raises ControlError: a descriptor is a file, which has no other side.
    """

def connect(
    addresses: Sequence[str], key: bytes, place: int, timeout_s: float, *, keyed: bool = False
) -> Stream:
    """Connect to the head of a job at the first of its addresses that answers. All are tried again and again.

    ``addresses``: ``HOST:PORT``, an IPv6 address in brackets; names are looked up last. ``key``: 32 bytes
    that the head expects of this ``place``. ``keyed``: the user has given the key.

    Raises RefusedLinkError: the head has said that the keys do not fit. Raises ControlError: no address has
    answered within ``timeout_s``.
    """

@final
class Link:
    """A connection of a hub, for `dsl.control.hub.Link`, which explains the names."""

    id: int
    """No other link that lives has this number."""
    name: str
    port: int
    place: int
    own_address: str
    is_lost: bool
    def send(self, message: bytes) -> None: ...
    def close(self) -> None: ...
    def drop(self, is_stranger: bool) -> None:
        """End the connection at once, and forget what it has said. A stranger is counted, and told of."""
    def send_now(self, message: bytes, timeout_s: float) -> None: ...
    def receive(self, timeout_s: float, while_heard: bool) -> bytes: ...
    def take_samples(self) -> list[tuple[int, int, int, int, int, int]]:
        """The heartbeats that were answered since the last call, for `dsl.control.clock.measure`."""

@final
class Hub:
    """The links of a process and the thread that serves them, for `dsl.control.hub.Hub`."""

    def __new__(cls, heartbeat_s: float, console: tuple[int, int] | None, taken: bytes) -> Self:
        """``console``: the descriptors of a head. ``taken``: its message for a second agent of a place."""
    def add(self, stream: Stream, name: str) -> Link: ...
    def listen(self, address: str, port: int, keyed: bool | None) -> int: ...
    def unlisten(self, port: int) -> None: ...
    def expect(self, place: int | None, key: bytes, count: int) -> None: ...
    def share_output(self, agents: int) -> None: ...
    def fileno(self) -> int: ...
    def read(self) -> list[tuple[Link | None, str, bytes | str | None]]:
        """What has arrived: (link, what, bytes or text).

        ``what`` is ``message``; ``warning`` or ``lost`` (output could not be written), without a link; or the
        last of a link, with its reason:
        ``closed``, ``unreachable``, ``silent``, ``stuck``, ``damaged`` or ``internal``; empty if we ended it.
        """
    def relay(self, link: Link, stdout_fd: int, stderr_fd: int) -> None: ...
    def recent(self) -> bytes: ...
    def tee(self, fd: int) -> None: ...
    def drain(self, timeout_s: float | None) -> bool: ...
    def start(self) -> None: ...
    def close(self, timeout_s: float) -> None: ...
    def disown(self) -> None: ...

@final
class ForkLink:
    """A fork server's connection to the engine, for `dsl.forkserver.server`. Its methods raise `EngineError`.

    The thread that makes the link must be the thread that forks, and must live as long as the process: the
    workers die with that thread. A child of `os.fork` cannot use the link.
    """

    def __new__(cls, fd: int) -> Self:
        """``fd``: the number in the last word of the command; the link owns it from now on."""
    def settle(self) -> None:
        """After the imports: record signal handlers and the file limit, for `ForkOrder.take_trace`."""
    @staticmethod
    def environ() -> list[bytes]:
        """The environment of this process as C libraries see it: ``NAME=value``."""
    def ready(self) -> None:
        """Tell the engine that everything is imported, so that it may send orders."""
    def refuse(self, text: str) -> None:
        """Instead of `ready`: tell the engine in one line why this process cannot fork workers. Then end."""
    def next(self) -> ForkOrder | None:
        """Wait for the next order, and reap workers meanwhile. None: the process must end."""
    def forked(self, order: ForkOrder, pid: int) -> None:
        """In the parent, before `next`: tell the engine which child was forked for an order."""
    def not_forked(self, order: ForkOrder, errno: int) -> None:
        """Tell the engine that no child could be forked; it sends no more orders then."""
    def clear(self) -> None:
        """When the engine has hung up: end what is left below the branch of a warm server."""
    def fileno(self) -> int: ...

@final
class ForkOrder:
    """One worker to be forked, for `dsl.forkserver.become`. In the server its methods do nothing."""

    argv: Final[list[bytes]]
    """The command that would start the worker without a fork server."""
    entry: Final[int]
    """Index in `argv` of the first word after the interpreter and its flags."""
    ignores_quit: Final[bool]
    """Whether the worker ignores SIGQUIT, because it reads the terminal."""
    environ: Final[list[bytes]]
    """The worker's environment, entry by entry: mostly ``NAME=value``, and any odd inherited entries."""
    def enter(self) -> None:
        """Turn this process into the worker, as its spec says; returns once the engine watches it.

        Until `take_trace`, all signals with a handler, SIGPIPE and SIGXFSZ have their default action.
        A failure is reported to the engine, and ends the process with code 127.
        """
    def show_command(self, words: int) -> None:
        """After `enter`: show `argv` and `environ` as those of this process; ``os.environ`` does not change.

        ``words``: how many words the server was started with; the interpreter still passes them to libraries.
        """
    def forget_exit_functions(self) -> None:
        """Make C's ``exit`` call only the exit functions that this process registers from now on.

        C streams are still written. If a thread holds one of them at the exit, all functions are called.
        """
    def exit(self, code: int) -> None:
        """End this process as C's ``exit`` does. Does nothing in the server."""
    def take_trace(self) -> None:
        """Give this process the signal handlers and the file limit that `ForkLink.settle` has recorded."""

def warm_key(words: Sequence[bytes], environ: Sequence[bytes]) -> bytes:
    """In what a command and a warm server have to agree.

    ``words``: those that start the server; ``environ``: its environment, ``NAME=value``. The key also has all
    that this process passes on to its children for good: namespaces, user, limits, terminal and so on.
    """

def warm_digest(key: bytes) -> str:
    """32 hexadecimal digits for a key."""

def warm_obstacle() -> str:
    """Why no warm server may fork the workers of this command, as a clause; empty if one may.

    A tracer or a sandbox (seccomp, Landlock) holds only for what descends from this command.
    """

def is_in_job() -> bool:
    """Whether this process belongs to a job, which would end what it leaves behind.

    The kernel says that, also if the variables of this process were cleared.
    """

def warm_listen(folder: _Path, name: str) -> int:
    """Listen at a new socket, in a folder of this user alone, which is made if it is missing.

    Returns a descriptor. The socket has a dot before its name until a `WarmDoor` listens there: the kernel
    names the process that listens to those who call. Raises OSError.
    """

def warm_call(
    folder: _Path,
    name: str,
    purpose: Literal["serve", "hold", "tell", "stop"],
    *,
    key: bytes | None = None,
    stay_s: float = 0.0,
    memory: int = 0,
) -> int:
    """Call the warm server at a socket, and return the descriptor of the connection.

    ``serve``: fork workers, for `Supervisor.join_fork_server`. ``hold``: answer with ``stays`` once
    everything is imported, or with the reason of a refusal, and stay while the connection is open. ``tell``:
    answer with a line of numbers (pid, jobs so far, jobs that run, milliseconds without a job so far and at
    most, programs that hold the server), then interpreter, program and modules with zero bytes between them.
    ``stop``: end after the jobs that run. ``stay_s``: seconds that the server stays after its last job, 0: as
    long as earlier callers wanted; ``memory``: bytes that all warm servers of the user may use.

    Raises OSError: ConnectionRefusedError if the server is gone, BlockingIOError if too many calls wait,
    PermissionError if the server would end with a job that this process does not belong to, and what
    `peer_pid` raises: then nothing was sent.
    """

def warm_answer(fd: int, timeout_s: float) -> bytes | None:
    """Wait for the answer to a call and close the connection. None: there is none in this time."""

@final
class FileMarks:
    """Files as they were when they were marked; a file that cannot be seen has a mark of its own.

    A mark is made of inode, size, and the times of the last change of content and of state: nobody can set
    the latter. ``kinds_only``: of the kind of a file, so only that it comes, goes or becomes a directory
    counts.
    """

    def __new__(cls, paths: Sequence[str], *, kinds_only: bool = False) -> Self:
        """Mark these files."""
    def changed(self) -> list[str]:
        """The paths that do not lead to what they led to."""
    def since(self, time_ns: int) -> list[str]:
        """The files whose state had changed at this time or later when they were marked."""
    def renew(self, paths: Sequence[str]) -> None:
        """Mark these files as they are now."""

@final
class WarmDoor:
    """The socket of a warm server, for `dsl.forkserver.warm`. Its methods raise `EngineError`."""

    def __new__(cls, fd: int, folder: _Path, name: str, key: bytes) -> Self:
        """``fd``: a descriptor of `warm_listen`, which the door owns from now on.

        This process becomes a subreaper.
        """
    def settle(self) -> None:
        """As `ForkLink.settle`; also makes forks of this process cheaper."""
    def ready(self, name: str, about: bytes) -> None:
        """Give the socket another name, and keep what the server is."""
    def adopt(self, call: int, request: int, release: int) -> WarmCall | None:
        """Take over a call, by the descriptors of `WarmCall.pass_on`; None: nobody waits for an answer."""
    def hold(self, call: WarmCall) -> None:
        """Tell the caller that the server stays, and stay until it hangs up."""
    def add_holder(self, fd: int) -> None:
        """Stay until the program at the other end of a connection hangs up. The door owns ``fd``."""
    def holders(self) -> list[int]:
        """Descriptors of copies of the connections with programs that want the server to stay."""
    def next(self) -> WarmCall | None:
        """Wait for a call that needs an answer. None: the process must end."""
    def forked(self, call: WarmCall, pid: int) -> None:
        """In the parent: watch the branch that was forked for a call."""
    def enter(self, call: WarmCall) -> ForkLink:
        """In a forked child: become the branch of the calling job."""
    def restore(self) -> None:
        """In a forked child that becomes another server: take on the limits that this one began with."""
    def succeed(self, pid: int, call: WarmCall) -> None:
        """Take no more calls: another server, with this pid, takes the place of this one.

        That one goes on with the call. This one stays until the caller has met the branch that comes of it.
        """
    def close(self) -> None:
        """Take no more calls. `next` returns None once all branches have ended."""

@final
class WarmCall:
    """A call that a warm server has to answer.

    Of no use after `WarmDoor.hold`, `forked`, `enter` and `succeed`.
    """

    @property
    def is_job(self) -> bool:
        """Whether a job wants workers; else somebody only wants the server to stay."""
    @property
    def memory(self) -> int:
        """How many bytes of memory all warm servers of the user may use."""
    def refuse(self, why: str) -> None:
        """Tell the caller why it gets nothing."""
    def defer(self) -> None:
        """Tell the engine that the imports begin anew."""
    def pass_on(self) -> list[int]:
        """Descriptors for another server: connection, request, and one to close when this server may end."""
