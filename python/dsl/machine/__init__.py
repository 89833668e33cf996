"""This process: its streams, its names and those of its machine, files that it can read, ports, sockets.

To test a port, the extension listens on it for an instant, as a TCPStore does. Importing Python's `socket`
would take half a millisecond.
"""

from __future__ import annotations

import os
import stat
import sys

from dsl._core import can_move_cursor as can_move_cursor
from dsl._core import peer_pid as peer_pid
from dsl._core import probe_port
from dsl._record import Record
from dsl.errors import OutOfReachError, PortError
from dsl.words import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal, TypeVar

    Kind = Literal["terminal", "null", "other"]
    T = TypeVar("T")

POLLIN, POLLOUT = 1, 4
LONGEST_POLL_MS = (1 << 31) - 1


class Console(Record):
    """The standard streams of the command, which the user watches."""

    stdout: Kind = "other"
    """A ``terminal``, ``null`` (/dev/null, or closed), or ``other``."""
    stderr: Kind = "other"
    """The kind of stderr, with the same values."""
    stdin_is_terminal: bool = False
    """Whether stdin is a terminal, so that a user may type."""
    is_relayed: bool = False
    """The streams belong to the command on another host, and all nodes send their output there."""
    is_one: bool = False
    """stdout and stderr are one file or pipe, as after ``> log 2>&1``: what they get has an order."""


def this_console() -> Console:
    """The streams of this process."""
    kinds = stream_kind(1), stream_kind(2)
    return Console(*kinds, os.isatty(0), is_one=kinds == ("other", "other") and os.path.sameopenfile(1, 2))


def stream_kind(fd: int) -> Kind:
    """The kind of file behind a descriptor. A closed descriptor counts as /dev/null."""
    try:
        if os.isatty(fd):
            return "terminal"
        return "null" if os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev else "other"
    except OSError:
        return "null"


def use_null(*streams: int) -> None:
    """Put /dev/null in the place of standard streams."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in streams:
        os.dup2(null, fd)
    if null not in streams:  # it may take the place of a closed stream
        os.close(null)


def wait_for(*fds: int, left_s: float | None, events: int = POLLIN) -> set[int]:
    """Wait until one of these descriptors is readable, or has other ``events`` of poll(2).

    Returns those that are; negative ones never are. ``left_s``: the longest wait; None: any.
    """
    import select

    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, events)
    # Rounded up: before the time is due there is nothing to read.
    left_ms = None if left_s is None else min(left_s * 1000 + (left_s > 0), LONGEST_POLL_MS)
    return {fd for fd, _ in poller.poll(left_ms)}


def temp_dir() -> str:
    """The directory that `tempfile.gettempdir` would return, without importing `tempfile`."""
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    for folder in (*named, "/tmp", "/var/tmp", "/usr/tmp"):  # noqa: S108  the search order of tempfile
        if folder and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return os.path.abspath(folder)
    return os.curdir


def socket_folders() -> list[str]:
    """Where the sockets of this user's jobs may be. A job makes its own in the first directory."""
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [runtime, f"/run/user/{uid}"]
    usable = [f"{one}/dsl" for one in found if one[:1] == "/" and os.access(one, os.W_OK | os.X_OK)]
    return list(dict.fromkeys([*usable, f"{temp_dir()}/dsl-{uid}"]))


def is_this_machine(host: str) -> bool:
    """Whether a host of the hostfile is this machine: it has our name, or one of its addresses is ours."""
    name = host.rpartition("@")[2]
    own = os.uname().nodename
    if name in ("localhost", own) or name.partition(".")[0] == own or own.partition(".")[0] == name:
        return True
    from dsl.machine.network import is_own_address, resolve

    return any(map(is_own_address, resolve(name)))


def read_text(path: str) -> str | None:
    """Text of a file; None if it is no regular file. Bytes that are not UTF-8 become surrogates.

    The byte order mark of some editors is left out.

    Raises:
        OSError: the file exists but cannot be read.
        OutOfReachError: this user may not enter its directory, so it may exist or not.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
    except PermissionError as error:
        raise OutOfReachError(error.errno, error.strerror, path) from None
    except (OSError, ValueError):
        return None
    return _read(path)


def read_input(path: str) -> str | None:
    """The same for a file that may be a pipe, as in ``-H <(make_hosts)``. A pipe gives its text only once."""
    if path not in _from_pipes:
        try:
            is_pipe = stat.S_ISFIFO(os.stat(path).st_mode)
        except (OSError, ValueError):
            is_pipe = False
        if not is_pipe:
            return read_text(path)
        _from_pipes[path] = _read(path)
    return _from_pipes[path]


_from_pipes: dict[str, str] = {}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().removeprefix("\ufeff")


_runs = iter(range(1 << 62))
"""Numbers the runs of this process; taking one is atomic, so threads may launch runs at once."""


class Names:
    """Names of this machine and process."""

    def __init__(self) -> None:
        # Read once: the agent is forked later and has another pid.
        self.pid = os.getpid()
        """The process that the user's shell sees."""
        self.executable = sys.executable
        """The Python that runs us."""
        self.host = os.uname().nodename
        """Name of this machine (``uname -n``)."""

    @property
    def temp_dir(self) -> str:
        """The directory for files that have no other place."""
        return temp_dir()

    def stamp(self) -> str:
        """The local time as YYYYmmddHHMMSS."""
        from time import strftime

        return strftime("%Y%m%d%H%M%S")

    def count_run(self) -> int:
        """How many runs of this process were counted before: they may have the same stamp and pid."""
        return next(_runs)

    def random(self) -> str:
        """16 random hexadecimal digits, new ones for each call."""
        return os.urandom(8).hex()

    is_this_machine = staticmethod(is_this_machine)


class Files:
    """Files, programs and directories of this machine."""

    read_text = staticmethod(read_text)
    read_input = staticmethod(read_input)

    def why_not_written(self, path: str, *, read_again: bool = False) -> str:
        """What `dsl.machine.files.why_not` says."""
        from dsl.machine.files import why_not

        return why_not(path, read_again=read_again)

    @property
    def cwd(self) -> str:
        """The working directory. Raises UsageError if it no longer exists."""
        try:
            return os.getcwd()
        except OSError as error:
            from dsl.errors import UsageError

            reason = (error.strerror or "").lower()
            raise UsageError(f"the working directory is gone, change to another one: {reason}") from None

    @property
    def home(self) -> str:
        """The home directory of the user; empty if unknown."""
        home = os.path.expanduser("~")
        return home if home.startswith("/") else ""

    def has_warm_server(self) -> bool:
        """Whether this user has a warm fork server."""
        return bool(find_sockets(READY))

    def ask_for_hosts(self, words: Sequence[str]) -> str:
        """What `dsl.machine.listing.ask_for_hosts` says."""
        from dsl.machine.listing import ask_for_hosts

        return ask_for_hosts(words)

    def has_program(self, name: str) -> bool:
        """Whether a program of this name is on ``PATH``."""
        from shutil import which

        return which(name) is not None

    def is_script(self, program: str, environ: Mapping[str, str]) -> bool:
        """Whether another program, such as a shell, runs this one."""
        from dsl.machine.check import find_executable

        try:
            with open(find_executable(program, environ), "rb") as file:
                return file.read(2) == b"#!"
        except OSError:
            return False


OWN_PORTS = range(20000, 29000)
TRIES = 100


def port_is_free(port: int) -> bool:
    """Whether a store could listen on the port now.

    Raises:
        PortError: this user may not listen on it (ports below 1024), or the machine has no network at all.
    """
    try:
        probe_port(port)
    except OSError as error:
        import errno

        if error.errno == errno.EADDRINUSE:
            return False
        hint = ", choose one above 1023" if error.errno == errno.EACCES else ""
        raise PortError(f"cannot listen on master port {port}: {_reason(error)}{hint}") from None
    return True


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()


def pick_free_port() -> int:
    """A free port, if possible below the range from which the kernel gives ports to connections.

    A script may import for seconds before it listens. Meanwhile a connection of any program could take a
    port of the kernel's range.

    Raises:
        PortError: there is no free port.
    """
    for _ in range(TRIES):
        port = OWN_PORTS[int.from_bytes(os.urandom(4), "big") % len(OWN_PORTS)]
        if port_is_free(port):
            return port
    try:
        return probe_port(0)
    except OSError as error:
        raise PortError(f"no free master port: {_reason(error)}") from None


def name_port_holder(port: int) -> str:
    """The process that listens on the port: ``pid 12 (python train.py)``, or a vaguer description."""
    try:
        import psutil
    except ImportError:
        return "another process (psutil, which would name it, is not installed)"
    try:
        listeners = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        pid = next((one.pid for one in listeners if one.laddr and one.laddr.port == port and one.pid), None)
        if pid is None:
            return "a process of another user or container"
        process = psutil.Process(pid)
        command = printable(" ".join(process.cmdline()) or process.name())
    except (psutil.Error, OSError):
        return "another process"
    return f"pid {pid} ({command[:80]})"


class Ports:
    """TCP ports of this machine."""

    is_free = staticmethod(port_is_free)
    pick = staticmethod(pick_free_port)
    holder = staticmethod(name_port_holder)


MARK = "warm:"
"""Begins the last word of a warm server: descriptors of its socket, and maybe of a call and its request."""

NEW, READY = ".new", ".warm"
"""Ends of the names of sockets: of a warm server that imports, and of one that takes calls at once."""

MOST_SOCKETS = 1000
"""How many are asked."""
MOST_AT_ONCE = 32


def find_sockets(*endings: str) -> list[tuple[str, str]]:
    """Directory and name of each socket whose name ends so. Directories of other users do not count.

    A socket whose process does not listen there yet has a hidden name, and does not count either.
    """
    found = []
    for folder in socket_folders():
        try:
            names = os.listdir(folder) if os.lstat(folder).st_uid == os.geteuid() else []
        except OSError:
            continue
        found += [(folder, name) for name in sorted(names) if name.endswith(endings) and name[0] != "."]
    return found


def ask_sockets(ask: Callable[[tuple[str, str]], T | None], *endings: str) -> list[T]:
    """The answers from the sockets. All are asked at once: a stopped process holds up no other answer."""
    places = find_sockets(*endings)[:MOST_SOCKETS]
    if len(places) < 2:  # a thread would cost more than the answer
        return [answer for answer in map(ask, places) if answer is not None]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        return [answer for answer in pool.map(ask, places) if answer is not None]


def left_alone(folder: str, name: str, why: object) -> str:
    """A line about a socket whose process is not one of this user here; ``why``: what it is, as a clause."""
    return f"warning: {os.path.join(folder, name)} is left alone: its process {why}, look from where it runs"


def remove_socket(folder: str, name: str) -> None:
    """Remove a socket at which nobody listens any more, and its directory if it was the last one there."""
    try:
        os.unlink(os.path.join(folder, name))
        os.rmdir(folder)  # fails while other sockets are there
    except OSError:
        return


def remove_sockets_of(pid: int) -> None:
    """Remove what the job of a command that had this pid has left."""
    for folder, name in find_sockets(".sock"):
        if name.startswith(f"{pid}-"):
            remove_socket(folder, name)
