"""Timers of the workers: each limits how long a block of code may run, and we end late processes.

The contract is that of torch.distributed.elastic.timer (torch 2.15), whose clients are ``FileTimerClient``.
``TORCHELASTIC_ENABLE_FILE_TIMER=1`` asks for timers, ``TORCHELASTIC_TIMER_FILE`` names a FIFO to the workers.
Each line in it is a JSON object with ``pid``, ``scope_id``, ``expiration_time`` (seconds since the epoch;
negative: the timer is released) and ``signal`` (0 or less: no process is ended). torch looks every tenth of a
second whether a timer has expired; here the wait for the workers ends when the next one does.
"""

from __future__ import annotations

import os
import stat
import time
from json import loads
from math import isfinite

from dsl import Started, Stopping
from dsl._record import Record
from dsl.errors import DslError
from dsl.machine.kernel import read_fact
from dsl.model.outcome import TimerExpired

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

READ_BYTES = 1 << 16
MAX_TIMERS = 1 << 16
"""Most timers that we keep; only a faulty client takes more without releasing any."""

MAX_GENERATIONS = 64
"""How many ancestors of a process we follow."""


class _Timer(Record):
    deadline_s: float
    """`time.monotonic` when the timer expires: setting the clock does not move it."""
    signum: int
    """The signal for the timer's process; 0: none."""
    birth: str
    """When the process was started, which tells it from a later process with the same pid."""


class FileTimers:
    """A channel of expired timers. As a listener it ignores timers once the workers are being stopped."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._rest = b""
        self._timers: dict[tuple[int, str], _Timer] = {}
        self._is_stopping = False
        self._workers: set[int] = set()

    def open(self) -> bool:
        """Make a new FIFO for an attempt, without timers.

        Returns False if another process already reads it: a launcher above us, which watches our workers as
        its own.

        Raises:
            DslError: the FIFO cannot be made, or another file has its name.
        """
        self.close()
        try:
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            if os.path.lexists(self._path) and stat.S_ISFIFO(os.lstat(self._path).st_mode):
                if _is_read(self._path):
                    return False
                os.unlink(self._path)
            os.mkfifo(self._path, 0o600)
            # With a writer of our own the FIFO never hangs up, and readers and writers need not wait.
            self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise DslError(f"cannot make the timer file {self._path}: {error.strerror}") from None
        return True

    def close(self) -> None:
        """Forget all timers and remove the FIFO."""
        self._timers.clear()
        self._workers.clear()
        self._rest, self._is_stopping = b"", False
        if self._fd < 0:
            return
        own = os.fstat(self._fd)
        os.close(self._fd)
        self._fd = -1
        try:
            if os.path.samestat(own, os.lstat(self._path)):
                os.unlink(self._path)
        except OSError:
            return  # already removed

    def hear(self, event: object) -> None:
        """Ignore timers while the workers are being stopped: the stop sets their time. Note the workers."""
        if isinstance(event, Stopping):
            self._is_stopping = True
        elif isinstance(event, Started):
            self._workers.add(event.pid)

    def fileno(self) -> int:
        """The FIFO's descriptor."""
        return self._fd

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when the next timer expires."""
        if self._is_stopping or not self._timers:
            return None
        return min(timer.deadline_s for timer in self._timers.values())

    def read(self) -> list[TimerExpired]:
        """Note what the workers have written, and end processes whose timers have expired."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-READ_BYTES:]
        for line in lines:
            self._note(line)
        return [] if self._is_stopping else self._expire(time.monotonic())

    def _note(self, line: bytes) -> None:
        request = _parse(line)
        if request is None:
            return
        pid, scope, expiration_s, signum = request
        self._timers.pop((pid, scope), None)
        birth = _birth(pid)
        if expiration_s < 0 or birth is None or len(self._timers) >= MAX_TIMERS:
            return
        deadline_s = time.monotonic() + expiration_s - time.time()
        self._timers[pid, scope] = _Timer(deadline_s, signum, birth)

    def _expire(self, now_s: float) -> list[TimerExpired]:
        """The expired timers, one per process: the oldest that asks for an end, as in torch."""
        over: dict[int, list[tuple[_Timer, str]]] = {}
        for (pid, scope), timer in self._timers.items():
            if timer.deadline_s <= now_s:
                over.setdefault(pid, []).append((timer, scope))
        found = []
        for pid, timers in over.items():
            timers.sort(key=lambda entry: entry[0].deadline_s)
            timer, scope = next((entry for entry in timers if entry[0].signum > 0), timers[0])
            if timer.signum == 0 or _signal(pid, timer, self._workers):
                found.append(TimerExpired(pid, scope, timer.signum))
            for key in [key for key in self._timers if key[0] == pid]:
                del self._timers[key]
        return found


def _is_read(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _parse(line: bytes) -> tuple[int, str, float, int] | None:
    """Pid, scope, expiration and signal; None for a line that no client writes."""
    try:
        request: Any = loads(line)
        pid, scope = request["pid"], request["scope_id"]
        expiration_s, signum = request["expiration_time"], request["signal"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    numbers = isinstance(expiration_s, (int, float)) and isinstance(pid, int) and isinstance(signum, int)
    if not numbers or not isinstance(scope, str) or not 0 < pid < 1 << 31 or signum > 64:
        return None
    if abs(expiration_s) > 1e18 or not isfinite(expiration_s):
        return None
    return pid, scope, float(expiration_s), max(signum, 0)


def _signal(pid: int, timer: _Timer, workers: set[int]) -> bool:
    """Send the signal if the process is still the one that took the timer, and one of the job's (G1)."""
    # A part of the interpreter, so importing it needs no file. It has no stub.
    import _signal as signal  # type: ignore[import-not-found]

    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel or interpreter, or the process is gone
        pidfd = -1
    try:
        if _birth(pid) != timer.birth or not _is_descendant(pid, workers):
            return False
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, timer.signum)
        else:
            os.kill(pid, timer.signum)
    except OSError:
        return False
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return True


def _is_descendant(pid: int, workers: set[int]) -> bool:
    """Whether a process is a descendant of ours, or of a worker, whose parent may be a warm server."""
    own = os.getpid()
    # The /proc of another pid namespace shows other numbers.
    if os.readlink("/proc/self") != str(own):
        return False
    is_found = pid in workers
    for _ in range(MAX_GENERATIONS):
        if is_found or pid <= 1:
            break
        fields = _stat(pid)
        pid = int(fields[1]) if fields is not None else 0
        is_found = pid == own or pid in workers
    return is_found


def _birth(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[19] if fields is not None else None


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` after the name: state, parent and so on; None if it has ended."""
    fields = read_fact(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > 19 and fields[0] not in "ZX" else None
