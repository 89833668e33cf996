"""Fork servers: they import what a program needs, and fork its workers.

The server that the engine starts for a job ends with it. A *warm* server stays after a job and forks a
*branch* for the next one, which forks the workers: the branch belongs to its job, has the connection with the
engine, and ends with it. The warm server itself has no connection to any job, and not the variables that may
be secrets: only workers get them.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from dsl._core import ForkLink, WarmDoor, warm_answer, warm_call, warm_key, warm_listen
from dsl.forkserver import become, ending, freshness, hidden, memory, poison, preload
from dsl.machine import MARK, NEW, READY
from dsl.machine.kernel import memory_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Collection, Sequence
    from typing import Literal, NoReturn

    from dsl._core import WarmCall
else:
    import _signal

_NEVER = 50_000_017
"""More new objects than imports make, and a number that no module would choose by chance."""


def serve(words: Sequence[str], forget: Callable[[], None]) -> NoReturn:
    """Import modules, then fork a worker for each order, until the engine hangs up.

    ``words``: modules with commas between them, or empty; the program; the number of the link's descriptor.
    ``forget`` removes what the start of this server has left in the interpreter. This function ends the
    process; only a forked worker leaves it, by `become.LeaveServer`.
    """
    listed, *rest, fd = words
    reason = poison.find_early_poison(int(fd))
    link = ForkLink(int(fd))
    if reason is None:
        forget()
        imports = Imports(listed, [word for word in rest if word])
        reason = imports.settle(link.settle)
    if reason is not None:
        link.refuse(reason)
        os._exit(0)
    ending.flush_streams()
    imports.freeze()
    imports.fork_workers(link)


class Imports:
    """What a server has imported for a program, and what that has changed in this process.

    ``listed``: modules with commas between them, or empty; ``program``: the words behind the interpreter.
    ``watched``: names of further variables that no module may ask for when it is imported. ``reads`` gets
    what modules read.
    """

    def __init__(
        self,
        listed: str,
        program: Sequence[str],
        watched: Sequence[str] = (),
        reads: freshness.Reads | None = None,
    ) -> None:
        self.program = program
        self.texts: set[str] = set()
        """Files that were read to find out what to import."""
        self._start, self._notes = frozenset(sys.modules), hidden.Notes(reads.places() if reads else ())
        self._known, self._shared = poison.open_descriptors(), poison.shared_memory()
        self._folder = become.show_program(program)
        self._preloaded = ending.Preloaded()
        self._changes = become.ImportChanges()
        wanted = listed.split(",") if listed else self.wanted()
        self.names = tuple([name for name in wanted if name])
        self._failure = _import(self.names, watched, self._notes, are_guessed=not listed)
        _leave_word("after its imports")

    def wanted(self) -> tuple[str, ...]:
        """The modules that the program names itself."""
        self.texts.clear()
        return preload.guess_modules(self.program, poison.HARMFUL, self.texts)

    def settle(self, settle: Callable[[], None]) -> str | None:
        """Prepare this process for forks. Returns why it must not fork; None if it may.

        ``settle`` notes in the engine what imports have left.
        """
        changed = self._changes.settle(ForkLink.environ())
        gc.collect()
        # A signal to every process of a cgroup or a user is not meant for us; workers have their own mask.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        # If a module fails that the user named, the name is wrong or the module is broken. A guessed module
        # may be meant for another case than this one.
        reason = self._failure or changed
        if reason is not None:
            return reason
        settle()
        return poison.find_poison(self._known, self._shared)

    def freeze(self, *others: object) -> None:
        """Keep what was imported as it is, in this process and in its forks, until they import it.

        ``others``: what else no fork may free, because it would write to all of its pages.
        """
        self._preloaded.note()
        self._preloaded.keep(self, memory.fill_holes(), *others)
        kept = hidden.Hidden(self._start, self._notes, self.names)
        self._preloaded.forget_unseen(kept.modules)
        self._changes.holders = [
            (kept.modules if space is sys.modules and name in kept.modules else space, name)
            for space, name in self._changes.holders
        ]
        gc.freeze()

    def fork_workers(self, link: ForkLink) -> NoReturn:
        """Fork a worker for each order, until the engine hangs up. Only a forked worker leaves this call."""
        compiled = become.compile_program(self.program, self._preloaded)
        link.ready()
        while (order := link.next()) is not None:
            try:
                pid = os.fork()
            except OSError as error:
                link.not_forked(order, error.errno or 0)
                continue
            if pid == 0:
                become.become_worker(order, self._folder, self._changes, self._preloaded, compiled)
            link.forked(order, pid)
        link.clear()
        os._exit(0)


def _import(
    names: Sequence[str], watched: Sequence[str], notes: hidden.Notes, *, are_guessed: bool
) -> str | None:
    """Import without garbage collections on the way: one after the imports finds the same in less time."""
    before, *others = gc.get_threshold()
    # Not by `gc.disable`: a module may call that itself, and mean it for the workers.
    gc.set_threshold(_NEVER, *others)
    failure = preload.import_modules(
        names,
        lambda name: _leave_word(f"while it imported {name}"),
        watched,
        are_guessed=are_guessed,
        notes=notes,
    )
    now, *others = gc.get_threshold()
    # A module may have multiplied the threshold that it found.
    times, rest = divmod(now, _NEVER)
    if times and not rest:
        gc.set_threshold(times * before, *others)
    return failure


def _leave_word(text: str) -> None:
    """Write a line to stderr. If this process dies now, this is its last line, and reports show that one."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        return


MOST_SERVERS = 3
"""The most warm servers of a user."""

_ANSWER_S = 0.5


def serve_warm(words: Sequence[str], forget: Callable[[], None]) -> NoReturn:
    """Import modules, then fork a branch for each job, until no job has come for a while.

    ``words``: as for `serve`, but at the end names of withheld variables, folder and name of the
    socket, and descriptors behind `MARK`. Only a forked worker leaves this function, by `become.LeaveServer`.
    """
    begin_ns = time.time_ns()
    listed, *rest, withheld, folder, name, descriptors = words
    # From a server before this one: descriptors of its call, and connections with those who hold it.
    (fd,), passed, holders = [
        [int(word) for word in part.split(":") if word] for part in descriptors.removeprefix(MARK).split("/")
    ]
    release = -1 if passed else _detach()
    _leave_group()
    early = poison.find_early_poison(fd, release, *passed, *holders)
    own_words = [os.fsencode(word) for word in sys.orig_argv[:-3]]
    with open("/proc/self/environ", "rb") as file:
        environ = [entry for entry in file.read().split(b"\0") if entry]
    door = WarmDoor(fd, folder, name, warm_key(own_words, environ))
    first = door.adopt(passed) if passed else None
    for holder in holders:
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
    ending.flush_streams()
    files = freshness.Snapshot(imports.texts, begin_ns, reads)
    is_doubtful = bool(files.doubtful)
    imports.freeze(environ, state)
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
        if call.wants_branch:
            _fork_branches(door, call, imports)
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


def _fork_branches(door: WarmDoor, call: WarmCall, imports: Imports) -> None:
    while call.wants_branch:
        try:
            pid = os.fork()
        except OSError as error:
            call.refuse(f"could not fork: {error.strerror}")
            return
        if not pid:
            _become_branch(door, call, imports)
        door.forked(call, pid)


def _become_branch(door: WarmDoor, call: WarmCall, imports: Imports) -> NoReturn:
    try:
        link = door.enter(call)
    except BaseException:  # noqa: BLE001  this process must not become a second server
        os._exit(1)
    own = os.getpid()
    gc.freeze()
    try:
        imports.fork_workers(link)
    except become.LeaveServer:
        raise
    except BaseException:
        if os.getpid() != own:
            raise
        link.clear()
        os._exit(1)


def _refuse(door: WarmDoor, call: WarmCall | None, reason: str) -> NoReturn:
    """Tell the job for which this server was started why it does not serve, and end.

    A program that holds the server calls right before its job does, so that has a moment to call.
    """
    call = call or door.next()
    if call is not None and not call.wants_branch:
        from signal import SIGTERM
        from threading import Timer

        call.refuse(reason)
        door.hold(call)
        Timer(_ANSWER_S, os.kill, (os.getpid(), SIGTERM)).start()
        call = door.next()
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
        parts = ([warm_listen(folder, name)], call.pass_on(), door.holders())
        fds = [fd for part in parts for fd in part]
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
            ends = [folder, name, MARK + "/".join([":".join(map(str, part)) for part in parts])]
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
