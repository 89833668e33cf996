"""A warm fork server: it stays after a job and forks a *branch* for the next one, which forks the workers.

The branch belongs to its job: it has the connection with the engine, and ends with it. The server itself has
no connection to any job, and not the variables that may be secrets: only workers get them.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from dsl._core import WarmDoor, warm_answer, warm_call, warm_key, warm_listen
from dsl.forkserver import freshness, poison, streams
from dsl.forkserver.become import LeaveServer
from dsl.forkserver.server import Imports
from dsl.machine.kernel_files import memory_of
from dsl.machine.sockets import MARK, NEW, READY

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Collection, Sequence
    from typing import Literal, NoReturn

    from dsl._core import WarmCall
else:
    import _signal

MOST_SERVERS = 3
"""The most warm servers of a user."""

_ANSWER_S = 0.5


def serve(words: Sequence[str], forget: Callable[[], None]) -> NoReturn:
    """Import modules, then fork a branch for each job, until no job has come for a while.

    ``words``: as for `server.serve`, but at the end names of withheld variables, folder and name of the
    socket, and descriptors behind `MARK`. Only a forked worker leaves this function, by `become.LeaveServer`.
    """
    begin_ns = time.time_ns()
    listed, *rest, withheld, folder, name, descriptors = words
    # From a server before this one: three descriptors of its call, and connections with those who hold it.
    fd, *passed = [int(word) for word in descriptors.removeprefix(MARK).split(":")]
    release = -1 if passed else _detach()
    _leave_group()
    early = poison.find_early_poison(fd, release, *passed)
    own_words = [os.fsencode(word) for word in sys.orig_argv[:-3]]
    with open("/proc/self/environ", "rb") as file:
        environ = [entry for entry in file.read().split(b"\0") if entry]
    door = WarmDoor(fd, folder, name, warm_key(own_words, environ))
    first = door.adopt(*passed[:3]) if passed else None
    for holder in passed[3:]:
        door.add_holder(holder)
    if release >= 0:
        os.close(release)
    state = _State(environ, name.partition("-")[0])
    forget()
    if early is not None:
        _refuse(door, first, early)
    reads = freshness.Reads()
    program, private = [word for word in rest if word], [one for one in withheld.split(",") if one]
    imports = Imports(listed, program, private, reads)
    reason = imports.settle(door.settle)
    if reason is not None:
        _refuse(door, first, reason)
    streams.flush()
    files = freshness.Snapshot(imports.texts, begin_ns, reads)
    is_doubtful = bool(files.doubtful)
    imports.freeze()
    stem = name.removesuffix(NEW)
    about = "\0".join([sys.executable, " ".join(imports.program)[:1000], ",".join(imports.names)[:1000]])
    door.ready(stem + READY, os.fsencode(about))
    while (call := first or door.next()) is not None:
        first = None
        if _must_renew(imports, files, is_guessed=not listed):
            call.defer()
            door.succeed(state.start_anew(door, own_words, folder, call), call)
            continue
        memory = call.memory
        if call.is_job:
            _fork_branch(door, call, imports)
        else:
            door.hold(call)
        if is_doubtful:
            door.close()
        _make_room(folder, stem, memory)
    os._exit(0)


def _must_renew(imports: Imports, files: freshness.Snapshot, *, is_guessed: bool) -> bool:
    """Whether a new server would import something else, or from other files."""
    if files.changed():
        return True
    if is_guessed and files.has_new_texts():
        begin_ns = time.time_ns()
        if imports.wanted() != imports.names:
            return True
        files.take_texts(imports.texts, begin_ns)
    return False


def _fork_branch(door: WarmDoor, call: WarmCall, imports: Imports) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        call.refuse(f"could not fork: {error.strerror}")
        return
    if pid:
        door.forked(call, pid)
        return
    try:
        link = door.enter(call)
    except BaseException:  # noqa: BLE001  this process must not become a second server
        os._exit(1)
    own = os.getpid()
    gc.freeze()
    try:
        imports.fork_workers(link)
    except LeaveServer:
        raise
    except BaseException:
        if os.getpid() != own:
            raise
        link.clear()
        os._exit(1)


def _refuse(door: WarmDoor, call: WarmCall | None, reason: str) -> NoReturn:
    """Tell the job for which this server was started why it does not serve, and end."""
    call = call or door.next()
    if call is not None:
        call.refuse(reason)
    door.close()
    os._exit(0)


def _detach() -> int:
    """Go on in a child of nobody, without the streams of the command. Returns a descriptor.

    The process that the command waits for ends when the descriptor is closed: then the socket is this
    process's own.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if null > 2:
        os.close(null)
    return writer


def _leave_group() -> None:
    """Leave the process group of the command, and its session if there is no terminal.

    With a terminal the server stays in its session, because workers cannot enter another one.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        os.setsid()
    else:
        os.setpgid(0, 0)


class _State:
    """What a new server has to get from this process as this one got it."""

    def __init__(self, environ: Sequence[bytes], digest: str) -> None:
        self._environ = environ
        self._digest = digest
        self._cwd = os.readlink("/proc/self/cwd")
        self._mask: Collection[int] = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
        self._ignored = _ignored()

    def start_anew(self, door: WarmDoor, words: Sequence[bytes], folder: str, call: WarmCall) -> int:
        """Start a server in the place of this one, which goes on with the call. Returns its pid."""
        name = f"{self._digest}-{os.urandom(4).hex()}{NEW}"
        fds = (warm_listen(folder, name), *call.pass_on(), *door.holders())
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            return pid
        try:
            for fd in fds:
                os.set_inheritable(fd, True)
            os.chdir(self._cwd)
            door.restore()
            for number in _ignored() - self._ignored:
                _signal.signal(number, _signal.SIG_DFL)
            _signal.pthread_sigmask(_signal.SIG_SETMASK, self._mask)
            ends = [folder, name, f"{MARK}{':'.join(map(str, fds))}"]
            environ = dict(entry.split(b"=", 1) for entry in self._environ if b"=" in entry)
            os.execvpe(words[0], [*words, *map(os.fsencode, ends)], environ)  # noqa: S606  there is no shell
        finally:
            os._exit(127)


def _ignored() -> set[int]:
    return {
        number for number in map(int, _signal.valid_signals()) if _signal.getsignal(number) is _signal.SIG_IGN
    }


def _make_room(folder: str, own: str, most_bytes: int) -> None:
    """End other servers that are idle, the oldest first, until all are few enough and small enough."""
    others: list[tuple[int, int, str]] = []
    for name in os.listdir(folder):
        if not name.endswith(READY) or name.startswith(own):
            continue
        told = _ask(folder, name, "tell")
        if told is not None:
            pid, _jobs, busy, idle_ms, _stay_ms, holders = map(int, told.partition(b"\n")[0].split())
            others.append((0 if busy or holders else idle_ms, pid, name))
    total = sum(map(memory_of, [os.getpid(), *[pid for _, pid, _ in others]]))
    for idle_ms, pid, name in sorted(others, reverse=True):
        is_too_many = len(others) >= MOST_SERVERS
        if not idle_ms or not (is_too_many or (most_bytes and total > most_bytes)):
            return
        _ask(folder, name, "stop")
        others.pop()
        total -= memory_of(pid)


def _ask(folder: str, name: str, purpose: Literal["tell", "stop"]) -> bytes | None:
    try:
        return warm_answer(warm_call(folder, name, purpose), _ANSWER_S)
    except OSError:
        return None
