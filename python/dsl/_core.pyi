"""Types and docs of the extension module. ``mypy.stubtest`` checks them against the built module."""

from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias, final

from typing_extensions import Self, disjoint_base

from dsl.engine import Event, GuardOutcome, LaunchSpec, WorkerSpec

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
    "warm_join",
    "warm_key",
    "warm_listen",
    "warm_obstacle",
]

__version__: str
"""Version of dsl, such as ``0.2.0``."""

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
    """Starts, watches and ends one worker group at a time, on a thread of its own.

    Under a `Guard` it also handles the signals to the job, and reaps orphans. Only the process that made a
    supervisor can use it: in a child of `os.fork`, and after `close`, methods raise `EngineError`, but `wake`
    and `close` do nothing.
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

        ``words``: its command; the engine appends the number of a descriptor for `ForkLink`. ``env``: its
        environment (None: that of this process). ``cpus`` and ``mempolicy``: where it runs, as far as the
        kernel allows; workers inherit that unless their spec has its own. ``slow_s``: seconds of importing
        before `ForkServerSlow`; a server that is stopped by a signal then and ``slow_s`` later is lost.

        Returns its number for `WorkerSpec` at once; `ForkServerReady` or `ForkServerLost` follows. The server
        works for one group after the other, ends with the supervisor, and gets no signals to a group.

        Raises `SpecError` and `EngineError`.
        """
    def start(self, spec: LaunchSpec) -> None:
        """Check limits, then begin to start the workers.

        Raises `LimitError`, `BindingError`, `EngineError` before anything is started.
        """
    def add(self, worker: WorkerSpec) -> int:
        """Add a worker to the running group, with the settings of its spec, and return its index.

        Descriptors of the worker have to stay open until it has started.

        Raises `SpecError`, `LimitError` and `BindingError`, and `EngineError` if no group runs or the group
        is being stopped. Then the group is as it was.
        """
    def wait(self, timeout_s: float | None = None, *, routine: bool = True) -> list[Event]:
        """Wait for the next events, and return them in order. Python signal handlers run while waiting.

        An empty list: ``timeout_s`` has passed, `wake` was called, or another thread has closed the
        supervisor. With ``routine=False`` starts and clean exits do not end the wait: they come together with
        the next other event.

        Raises `EngineError` if the engine thread has ended by itself, and without ``timeout_s`` if no group
        runs, because the wait would never end.
        """
    def fileno(self) -> int:
        """A descriptor for `select`, `poll`, `epoll` or an event loop; it is readable when there are events.

        That is when ``wait(0)`` would return events or raise; while workers start, up to 20 ms later::

            select.select([supervisor, *others], [], [])
            for event in supervisor.wait(0):
                ...

        ``routine`` of the last `wait` also applies here. `wake` does not make it readable. Do not read from
        it, and remove it from your loop before you call `close`, which closes it.
        """
    def listen(self, folder: _Path, name: str) -> None:
        """Let others call at a socket of this name, and report `Called` when they do.

        The folder is made if it is missing. The end of the supervisor removes the socket.

        Raises `EngineError`: the socket cannot be made, or the folder is not for this user alone.
        """
    def callers(self) -> list[int]:
        """Take the descriptors of those who have called: this user and root. You have to close them.

        They do not block.
        """
    def unlisten(self) -> None:
        """Remove the socket. Those who have called keep their connections."""
    def pids(self) -> list[int]:
        """Pids of the group's workers, by index; 0 for a worker that does not run."""
    def last_lines(self) -> dict[int, bytes]:
        """The last line of each worker that has written to a `Stdio.log` stream, by its index: 1 KiB at most.

        Before the first call only the stream of the worker's stderr counts. Empty if there is no answer in a
        second, because a disk is slow.
        """
    def join_fork_server(self, fd: int, is_prepared: bool) -> int:
        """Take the branch of a warm server as fork server. Returns its number, as `start_fork_server` does.

        ``fd``: a connection of `warm_call`, which the engine owns from now on. ``is_prepared``: the server
        has imported, so it is soon given up if it does not answer.
        """
    def wake(self) -> None:
        """Make a `wait` in another thread return an empty list at once; without one, the next `wait`.

        You can call it from any thread, and from a signal handler. Several wakes before a `wait` count as
        one. Pending events stay for the `wait` after that.
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

        Output may wait for its reader even after `Ended`. Under a `Guard`, a signal to the job ends the
        waiting; elsewhere an exception in a signal handler does, and `flush` raises it. Returns how many
        lines were given up, and the signal that ended the waiting.
        """
    def tee(self, fd: int) -> None:
        """Copy what is shown on the consoles to a socket, pipe or file as well, after the last lines shown.

        The descriptor is duplicated. Nothing waits for it: if it takes too little, a note has the number of
        lines that are missing there. Streams that workers inherit are not copied. Raises `OSError` for a bad
        descriptor.
        """
    def close(self) -> None:
        """`flush`, kill all processes that are left, wait for them, and end the engine thread. Idempotent."""
    def __enter__(self) -> Self:
        """Return itself; the end of the ``with`` block closes it."""
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
        - ``preempt``: the job will lose its machine. As ``stop``, after ``preempt_grace_s`` seconds (default:
          the grace of the group). A second notice changes nothing; a stop signal leaves the grace at most.

        With ``signals=None``, SIGINT, SIGTERM, SIGHUP and SIGQUIT stop, and SIGUSR1 and SIGUSR2 are
        forwarded. SIGTSTP, SIGCONT and SIGWINCH are always forwarded. Any other signal that ends the guard
        ends the job.

        - A signal that is ignored when the guard is made (SIGHUP under ``nohup``) stays ignored. SIGINT,
          SIGQUIT, SIGTERM, SIGUSR1 and SIGUSR2 count all the same, unless a key of a terminal sends them.
        - If a group has log files, a SIGHUP that would stop the job reopens them instead, unless a terminal
          has hung up.

        ``helper``: pid of a child that ends by itself after the agent; the guard waits some seconds for that,
        then kills it. No other child that exists now belongs to the job. ``mask``: the signals that are
        blocked in workers (None: those that are blocked now).

        Raises `SpecError` for an unknown meaning, and for a signal that cannot be handled.
        """
    def supervise(
        self, agent_pid: int, grace_s: float, *, reopens: bool = False, links: Sequence[int] | None = None
    ) -> GuardOutcome:
        """In the parent of the fork: wait for the agent, forwarding signals, then end the processes it left.

        The guard kills an agent that still runs well after the grace: ``grace_s`` seconds from a stop signal,
        or the time that a preemption leaves. ``reopens``: the job has log files, which SIGHUP reopens.
        ``links``: copies of the agent's connections with warm servers, which the guard owns from now on.
        """
    def discard(self) -> None:
        """Remove what the guard has made, when there is no agent because the fork failed."""
    def enter_agent(self, workers: int = 0) -> None:
        """In the child of the fork: become an agent, with its own process group, and watch the guard.

        The agent becomes subreaper, too. ``workers``: how many it will start. Groups start faster if their
        number is known while the process has one thread.
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

@disjoint_base
class Hub:
    """The links of a process and the thread that serves them: the base of `dsl.control.hub.Hub`."""

    def __new__(cls, heartbeat_s: float, console: tuple[int, int] | None, taken: bytes) -> Self:
        """``console``: the descriptors of a head. ``taken``: its message for a second agent of a place."""
    def listen(self, address: str = "", port: int = 0, *, keyed: bool | None = None) -> int:
        """Let agents connect by TCP at a port; returns the port. The same call again changes nothing.

        ``address``: one of this machine; empty: every one. ``port``: 0 for any free one. ``keyed``: agents
        are refused unless they have a key from their user (True), or have none (False); None: it is not
        checked. Ports with this check are for agents that come by themselves: several may come for a place.

        Raises OSError: we cannot listen there.
        """
    def unlisten(self, port: int) -> None:
        """Close a port. Returns when another process can listen there; links that came in by it stay."""
    def expect(self, place: int | None, key: bytes, count: int | None = None) -> None:
        """Let in agents of a place that know a key of 32 bytes; None: of every place. Call `listen` first.

        ``key``: empty: they wait until their key is given.
        ``count``: number of these agents; the default is one for a place, some thousands for every place.

        Raises ControlError: the key does not have 32 bytes, and is not empty.
        """
    def share_output(self, agents: int) -> None:
        """Head: let so many agents share the memory for output."""
    def fileno(self) -> int:
        """Give a descriptor that is readable while `take` returns something."""
    def serve(self, stream: Stream, name: str) -> Link:
        """Serve a connection, for `dsl.control.hub.Hub.add`."""
    def take(self) -> list[tuple[Link | None, str, bytes | str | None]]:
        """What has arrived: (link, what, bytes or text), for `dsl.control.hub.Hub.read`.

        ``what`` is ``message``; ``warning`` or ``lost`` (output could not be written), without a link; or the
        last of a link, with its reason:
        ``closed``, ``unreachable``, ``silent``, ``stuck``, ``damaged`` or ``internal``; empty if we ended it.
        """
    def pass_on(self, link: Link, stdout_fd: int, stderr_fd: int) -> None:
        """Send what comes out of two pipes to the head, for `dsl.control.hub.Hub.relay`."""
    def recent(self) -> bytes:
        """Head: the last output of agents that was shown where stderr is shown, some screens of it."""
    def tee(self, fd: int) -> None:
        """Head: let a socket, which stays yours, get the output of agents, too; see `dsl.Supervisor.tee`."""
    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for output; False: the time is over, or the head is gone.

        An agent waits until all that was in the pipes is written to the connection. A head waits until all
        that has arrived is shown.
        """
    def start(self) -> None:
        """Begin to serve. From here on this process must not fork and go on in the child."""
    def close(self, timeout_s: float) -> None:
        """Send what is queued, end all connections, and wait no longer than this for it."""
    def disown(self) -> None:
        """Close the descriptors in this process alone: a process forked from it goes on with them."""

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

def warm_call(folder: _Path, name: str, purpose: Literal["tell", "stop"]) -> int:
    """Call the warm server at a socket, and return the descriptor of the connection.

    ``tell``: answer with a line of numbers (pid, jobs so far, jobs that run, milliseconds without a job so
    far and at most, programs that hold the server), then interpreter, program and modules with zero bytes
    between them. ``stop``: end after the jobs that run.

    Raises OSError: ConnectionRefusedError if the server is gone, BlockingIOError if too many calls wait, and
    what `peer_pid` raises: then nothing was sent.
    """

def warm_join(
    folder: _Path,
    name: str,
    purpose: Literal["serve", "hold"],
    key: bytes,
    stay_s: float,
    memory: int,
    workers: int,
) -> list[int]:
    """Ask the warm server at a socket to work or to stay, and return the descriptors of the connections.

    ``serve``: fork so many workers. Each connection is for `Supervisor.join_fork_server`: a large group gets
    several branches of the server, which fork at the same time. ``hold``: answer with ``stays`` once
    everything is imported, or with the reason of a refusal, and stay while the connection is open.
    ``stay_s``: seconds that the server stays after its last job, 0: as long as earlier callers wanted;
    ``memory``: bytes that all warm servers of the user may use.

    Raises what `warm_call` raises, and PermissionError if the server would end with a job that this process
    does not belong to.
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
    """The socket of a warm server, for `dsl.forkserver.server`. Its methods raise `EngineError`."""

    def __new__(cls, fd: int, folder: _Path, name: str, key: bytes) -> Self:
        """``fd``: a descriptor of `warm_listen`, which the door owns from now on.

        This process becomes a subreaper.
        """
    def settle(self) -> None:
        """As `ForkLink.settle`; also makes forks of this process cheaper."""
    def ready(self, name: str, about: bytes) -> None:
        """Give the socket another name, and keep what the server is."""
    def adopt(self, fds: Sequence[int]) -> WarmCall | None:
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
        """In the parent: watch the branch that was forked for the next connection of a call."""
    def enter(self, call: WarmCall) -> ForkLink:
        """In a forked child: become the branch of the calling job, for its next connection."""
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

    Of no use after `WarmDoor.hold`, `enter` and `succeed`, and once all its branches are forked.
    """

    @property
    def wants_branch(self) -> bool:
        """Whether a branch is still to be forked for it; never if the server is only to stay."""
    @property
    def memory(self) -> int:
        """How many bytes of memory all warm servers of the user may use."""
    def refuse(self, why: str) -> None:
        """Tell the caller why it gets nothing."""
    def defer(self) -> None:
        """Tell the engine that the imports begin anew."""
    def pass_on(self) -> list[int]:
        """Descriptors for another server: request, one to close when this server may end, connections."""
