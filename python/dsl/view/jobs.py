"""The running jobs of this user, and the conversation with one of them."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from dsl._record import Record
from dsl.errors import DslError, JobFormatError
from dsl.lists import parse_number, quote
from dsl.machine.kernel_files import began_ns, read_fact
from dsl.machine.sockets import MOST_SOCKETS, find_sockets, left_alone, peer_of, remove_socket
from dsl.model.codec import Lines, to_line
from dsl.model.observation import (
    Follow,
    Followed,
    JobView,
    Look,
    Looked,
    NoAnswer,
    NodeStacks,
    NodeStatus,
    Sight,
    Signalled,
    SignalRank,
    gather,
)

Tell = Callable[[str], None]

CALL_S = 5.0
"""How long a job may take to say who it is, if the user means this one."""
SOON_S = 0.5
"""How long all jobs together may take to say who they are."""
ANSWER_S = 15.0
"""How long a job may take to answer."""
TRY_S = 0.01
"""How often a job is called again at whose socket as many wait as may."""
CHUNK = 1 << 16


class SilentJob(Record):
    """A job that does not say what it is: it is stopped, or frozen with its control group."""

    pid: int
    """Pid of the command, by the name of the socket; 0: unknown."""
    words: tuple[str, ...]
    """The command line of this process; empty: unknown."""
    started_ns: int | None
    """CLOCK_REALTIME when this process was started; None: unknown."""


class JobCall:
    """A call at the socket of a job, until the job has said what it is."""

    def __init__(self, path: str, tell: Tell | None = None) -> None:
        """``tell`` hears why the job cannot be looked into from here.

        Raises:
            PermissionError: its process is not one of this user here.
            OSError: nobody listens there.
        """
        self.path, self.tell = path, tell
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.setblocking(False)
        self.lines = Lines(JobView, NoAnswer, NodeStatus, NodeStacks, Signalled, Looked)
        self.heard: list[Any] = []
        """What the job has said after `view`."""
        self.view: JobView | None = None
        """What the job has said about itself; None: nothing so far."""
        self.is_second = False
        """An earlier call was not answered, because the job has ended."""
        self.is_connected = False
        try:
            self._connect()
        except BaseException:
            self.socket.close()
            raise

    def _connect(self) -> None:
        try:
            _connect(self.socket, self.path)
        except BlockingIOError:  # too many calls wait
            return
        peer_of(self.socket.fileno())
        self.is_connected = True

    def go_on(self) -> None:
        """Take what there is.

        Raises:
            PermissionError: the job's process is not one of this user here, or says that this one is not.
            OSError: the job has ended.
            JobFormatError: it says what no job says.
        """
        if not self.is_connected:
            self._connect()
            return
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the job has ended")
        self.heard += self.lines.feed(data)
        if self.heard:
            view = self.heard.pop(0)
            if isinstance(view, NoAnswer):
                raise PermissionError(f"says that this one {view.why}")
            if not isinstance(view, JobView):
                raise JobFormatError("the job has not said what it is")
            self.view = view


def _listen(calls: Sequence[JobCall], within_s: float) -> None:
    """Wait for what these jobs say, for at most so long."""
    poller = select.poll()
    for call in calls:
        if call.is_connected:
            poller.register(call.socket, select.POLLIN)
    least_s = within_s if all(call.is_connected for call in calls) else min(TRY_S, within_s)
    poller.poll(max(least_s, 0.0) * 1000)


class RunningJob:
    """A connection to a job."""

    def __init__(self, path: str, call: JobCall | None = None) -> None:
        """``call``: a call with an answer; None: call now.

        Raises OSError: no job answers there. Raises JobFormatError: its answer cannot be read.
        """
        call = _answered(path) if call is None else call
        assert call.view is not None
        self.path = path
        self._socket = call.socket
        self._lines, self._heard = call.lines, call.heard
        self._number = 0
        self.view = call.view
        """What the job has said about itself."""

    def look(self, what: Sight, *, with_logs: bool = False) -> tuple[list[Any], tuple[str, ...]]:
        """Ask all nodes. Returns their answers by node rank, and the names of hosts that have not answered.

        The answers are `NodeStatus`, or `NodeStacks` unless ``what`` is ``status``. ``with_logs``: with the
        paths of log files.

        Raises:
            OSError: the job has ended, or does not answer.
            JobFormatError: the answer cannot be read.
            DslError: the job says why it cannot answer.
        """
        self._number += 1
        self._ask(Look(self._number, what, with_logs))
        return gather(iter(self._next, None))

    def _ask(self, question: object) -> None:
        self._socket.settimeout(ANSWER_S)
        with suppress(BrokenPipeError):  # it may have said why
            self._socket.sendall(to_line(question))

    def signal(self, node_rank: int, local_rank: int, pid: int, signum: int) -> bool:
        """Send a signal to the process group of a worker; False: it has ended, or its host does not answer.

        Raises what `look` raises.
        """
        self._number += 1
        self._ask(SignalRank(self._number, node_rank, local_rank, pid, signum))
        is_sent = False
        while not isinstance(answer := self._next(), Looked):
            is_sent |= isinstance(answer, Signalled)
        return is_sent

    def follow(self) -> Iterator[bytes]:
        """The output of the job: the last lines that it has shown, then what it shows, until it ends.

        Raises:
            DslError: its output does not pass through dsl, or as `look`.
            OSError, JobFormatError: as `look`.
        """
        self._ask(Follow())
        if self._heard:
            self._next()
        line = b""
        while not line.endswith(b"\n"):
            if not (byte := self._socket.recv(1)):  # what follows the line is output
                raise ConnectionResetError("the job has ended")
            line += byte
        (answer,) = Lines(Followed, NoAnswer).feed(line)
        if isinstance(answer, NoAnswer):
            raise self._refusal(answer)
        if answer.problem:
            raise DslError(f"job {self.view.pid} cannot be followed: {answer.problem}")
        self._socket.settimeout(None)
        while data := self._socket.recv(CHUNK):
            yield data

    def _next(self) -> object:
        while not self._heard:
            data = self._socket.recv(CHUNK)
            if not data:
                raise ConnectionResetError("the job has ended")
            self._heard += self._lines.feed(data)
        answer = self._heard.pop(0)
        if isinstance(answer, NoAnswer):
            raise self._refusal(answer)
        return answer

    def _refusal(self, told: NoAnswer) -> DslError:
        return DslError(f"job {self.view.pid} runs on, but cannot answer: {told.why}")

    def close(self) -> None:
        """End the connection. The job goes on."""
        self._socket.close()


def _answered(path: str) -> JobCall:
    call = JobCall(path)
    deadline_s = time.monotonic() + CALL_S
    try:
        while call.view is None and (left_s := deadline_s - time.monotonic()) > 0:
            _listen([call], left_s)
            call.go_on()
    except BaseException:
        call.socket.close()
        raise
    if call.view is None:
        call.socket.close()
        raise TimeoutError("timed out")
    return call


def running_jobs() -> list[RunningJob]:
    """Connect to all jobs of this user that answer, in the order of their starts."""
    return call_jobs()[0]


def call_jobs(word: str | None = None, tell: Tell | None = None) -> tuple[list[RunningJob], list[SilentJob]]:
    """Call all jobs of this user at once. Removes sockets that jobs have left.

    A job that is stopped holds up nobody: all have `SOON_S` together. Only if the user means a job that has
    said nothing by then, by its pid or because no other has answered, it has `CALL_S`. ``word``: as in
    `find_job`; None: the user means no single job. ``tell`` hears of jobs that cannot be looked into.

    Returns the jobs that have answered, in the order of their starts, and those that have not.
    """
    paths = [os.path.join(*place) for place in find_sockets(".sock")[:MOST_SOCKETS]]
    calls = [call for path in paths if (call := _call(path, tell)) is not None]
    begin_s = time.monotonic()
    silent = [call for call in calls if call.view is None]
    while silent:
        is_awaited = any(_is_meant(word, call, calls) for call in silent)
        left_s = begin_s + (CALL_S if is_awaited else SOON_S) - time.monotonic()
        if left_s <= 0:
            break
        _listen(silent, left_s)
        calls = [call for before in calls if (call := _heard(before)) is not None]
        silent = [call for call in calls if call.view is None]
    for call in silent:
        call.socket.close()
    jobs = [RunningJob(call.path, call) for call in calls if call.view is not None]
    return sorted(jobs, key=lambda one: one.view.started_ns), [_silent(call) for call in silent]


def _is_meant(word: str | None, call: JobCall, calls: Sequence[JobCall]) -> bool:
    if word:
        return word == str(_pid_of(call))
    return word is not None and all(one.view is None for one in calls)


def _call(path: str, tell: Tell | None) -> JobCall | None:
    try:
        return JobCall(path, tell)
    except ConnectionRefusedError:
        remove_socket(*os.path.split(path))
    except PermissionError as error:
        _leave_alone(path, error, tell)
    except OSError:
        pass  # it has just ended
    return None


def _leave_alone(path: str, error: PermissionError, tell: Tell | None) -> None:
    if tell is not None and not error.errno:  # else it is not about the process
        tell(left_alone(*os.path.split(path), error))


def _heard(call: JobCall) -> JobCall | None:
    """The call, after what the job has said; None if it has ended, or says what no job says."""
    if call.view is not None:
        return call
    try:
        call.go_on()
    except PermissionError as error:
        call.socket.close()
        _leave_alone(call.path, error, call.tell)
        return None
    except OSError:
        call.socket.close()
        again = (
            None if call.is_second else _call(call.path, call.tell)
        )  # it leaves its socket if it was killed
        if again is not None:
            again.is_second = True
        return again
    except JobFormatError:
        call.socket.close()
        return None
    return call


def _pid_of(call: JobCall) -> int:
    return parse_number(os.path.basename(call.path).partition("-")[0]) or 0


def _silent(call: JobCall) -> SilentJob:
    pid = _pid_of(call)
    words = read_fact(f"/proc/{pid}/cmdline").split("\0")
    return SilentJob(pid, tuple(words), began_ns(pid))


def the_job(word: str, tell: Tell) -> RunningJob:
    """The job that a user means: its pid, or nothing if there is only one. Raises what `find_job` raises."""
    return find_job(word, *call_jobs(word, tell))


def find_job(word: str, jobs: Sequence[RunningJob], silent: Sequence[SilentJob] = ()) -> RunningJob:
    """The job that a user means: its pid, or nothing if there is only one.

    Raises:
        DslError: there is no such job, it does not answer, or the word is missing and there are several.
    """
    for other in silent:
        if word == str(other.pid) or not (word or jobs):
            raise DslError(f"job {other.pid} does not answer, it may be stopped (SIGSTOP) or frozen")
    if not jobs:
        raise DslError("no job of this user runs on this machine")
    names = ", ".join(f"{one.view.pid} ({' '.join(one.view.words[:1])})" for one in jobs)
    if not word:
        if len(jobs) > 1:
            raise DslError(f"several jobs run, name one by its pid: {names}")
        return jobs[0]
    for one in jobs:
        if word == str(one.view.pid):
            return one
    raise DslError(f"no job has the pid {quote(word)}, there are: {names}")


def _connect(connection: socket.socket, path: str) -> None:
    """Connect by the descriptor of the directory: an address is at most 107 bytes long."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
