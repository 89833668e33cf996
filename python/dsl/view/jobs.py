"""The running jobs of this user, and the conversation with one of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from dsl._record import Record
from dsl.errors import DslError, JobFormatError, UsageError
from dsl.machine import ask_sockets, left_alone, peer_pid, remove_socket
from dsl.machine.kernel import began_ns, read_fact
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
from dsl.words import parse_number, quote

Tell = Callable[[str], None]

CALL_S = 5.0
"""How long a job may take to say who it is, if the user means this one."""
SOON_S = 0.5
"""How long each job may take to say who it is."""
ANSWER_S = 15.0
"""How long a job may take to answer."""
TRY_S = 0.01
"""How often a job is called again at whose socket as many wait as may."""
CHUNK = 1 << 16


class SilentJob(Record):
    """A job that does not say what it is: it is stopped or frozen, or has no workers yet."""

    pid: int
    """Pid of the command, by the name of the socket; 0: unknown."""
    words: tuple[str, ...]
    """Its command line; empty: unknown."""
    started_ns: int | None
    """CLOCK_REALTIME when it was started; None: unknown."""


class RunningJob:
    """A connection to a job."""

    def __init__(self, path: str, within_s: float = CALL_S) -> None:
        """Call at the socket of a job, and let it say what it is, within this time.

        Raises:
            PermissionError: its process is not one of this user here, or says that this one is not.
            OSError: nobody listens there, the job has ended, or it does not answer.
            JobFormatError: it says what no job says.
        """
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._lines = Lines(JobView, NoAnswer, NodeStatus, NodeStacks, Signalled, Looked)
        self._heard: list[Any] = []
        self._number = 0
        try:
            self.view = self._call(within_s)
            """What the job has said about itself."""
        except BaseException:
            self._socket.close()
            raise

    def _call(self, within_s: float) -> JobView:
        deadline_s = time.monotonic() + within_s
        while not _has_connected(self._socket, self.path):  # as many calls wait as may
            if time.monotonic() >= deadline_s:
                raise TimeoutError("timed out")
            time.sleep(TRY_S)
        peer_pid(self._socket.fileno())
        self._socket.settimeout(max(deadline_s - time.monotonic(), TRY_S))
        view = self._hear()
        if isinstance(view, NoAnswer):
            raise PermissionError(f"says that this one {view.why}")
        if not isinstance(view, JobView):
            raise JobFormatError("the job has not said what it is")
        return view

    def look(
        self, what: Sight, *, with_logs: bool = False, for_s: int = 0
    ) -> tuple[list[Any], tuple[str, ...]]:
        """Ask all nodes. Returns their answers by node rank, and the names of hosts that have not answered.

        The answers are `NodeStatus`, or `NodeStacks` unless ``what`` is ``status``. ``with_logs``: with the
        paths of log files. ``for_s``: how long ``samples`` are taken.

        Raises:
            OSError: the job has ended, or does not answer.
            JobFormatError: the answer cannot be read.
            DslError: the job says why it cannot answer.
        """
        self._number += 1
        self._ask(Look(self._number, what, with_logs, for_s), for_s)
        return gather(iter(self._next, None))

    def _ask(self, question: object, more_s: int = 0) -> None:
        self._socket.settimeout(ANSWER_S + more_s)
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

    def _hear(self) -> Any:
        while not self._heard:
            data = self._socket.recv(CHUNK)
            if not data:
                raise ConnectionResetError("the job has ended")
            self._heard += self._lines.feed(data)
        return self._heard.pop(0)

    def _next(self) -> object:
        answer = self._hear()
        if isinstance(answer, NoAnswer):
            raise self._refusal(answer)
        return answer

    def _refusal(self, told: NoAnswer) -> DslError:
        return DslError(f"job {self.view.pid} runs on, but cannot answer: {told.why}")

    def close(self) -> None:
        """End the connection. The job goes on."""
        self._socket.close()


def _has_connected(caller: socket.socket, path: str) -> bool:
    """Connect by the descriptor of the directory: an address is at most 107 bytes long."""
    caller.setblocking(False)
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        caller.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True


def running_jobs() -> list[RunningJob]:
    """Connect to all jobs of this user that answer, in the order of their starts."""
    return call_jobs()[0]


def call_jobs(word: str | None = None, tell: Tell | None = None) -> tuple[list[RunningJob], list[SilentJob]]:
    """Call all jobs of this user at once. Removes sockets that jobs have left.

    A job that is stopped holds up nobody: each has `SOON_S`. Only if the user means a job that has said
    nothing by then, by its pid or because no other has answered, it has `CALL_S`. ``word``: as in
    `find_job`; None: the user means no single job. ``tell`` hears of jobs that cannot be looked into.

    Returns the jobs that have answered, in the order of their starts, and those that have not.
    """

    def call(place: tuple[str, str]) -> RunningJob | SilentJob | str | None:
        return _call(*place, CALL_S if word and word == str(_pid_of(place[1])) else SOON_S)

    found = ask_sockets(call, ".sock")
    if word == "" and found and not any(isinstance(answer, RunningJob) for answer in found):
        found = ask_sockets(lambda place: _call(*place, CALL_S), ".sock")
    jobs = [answer for answer in found if isinstance(answer, RunningJob)]
    for answer in found:
        if isinstance(answer, str) and tell is not None:
            tell(answer)
    silent = [answer for answer in found if isinstance(answer, SilentJob)]
    return sorted(jobs, key=lambda job: job.view.started_ns), silent


def _call(folder: str, name: str, within_s: float) -> RunningJob | SilentJob | str | None:
    """The job at a socket, or a line about a job that cannot be looked into; None: there is none."""
    for _ in range(2):  # a job that ends while we call leaves its socket if it was killed
        try:
            return RunningJob(os.path.join(folder, name), within_s)
        except ConnectionRefusedError:
            remove_socket(folder, name)
            return None
        except PermissionError as error:
            if error.errno:  # it is not about the process
                return None
            return left_alone(folder, name, error)
        except TimeoutError:
            pid = _pid_of(name)
            words = read_fact(f"/proc/{pid}/cmdline").split("\0")
            return SilentJob(pid, tuple(words), began_ns(pid))
        except OSError:
            continue
        except JobFormatError:
            return None
    return None


def _pid_of(name: str) -> int:
    return parse_number(name.partition("-")[0]) or 0


def find_job(word: str, jobs: Sequence[RunningJob], silent: Sequence[SilentJob] = ()) -> RunningJob:
    """The job that a user means: its pid, or nothing if there is only one.

    Raises:
        UsageError: there is no such job, or the word is missing and there are several.
        DslError: the job does not answer.
    """
    for other in silent:
        if word == str(other.pid) or not (word or jobs):
            raise DslError(f"job {other.pid} does not answer, it may be stopped (SIGSTOP) or frozen")
    if not jobs:
        raise UsageError("no job of this user runs on this machine")
    meant = [job for job in jobs if word in ("", str(job.view.pid))]
    if len(meant) == 1 or (word and meant):  # a program may launch several jobs
        return meant[0]
    names = ", ".join(f"{job.view.pid} ({' '.join(job.view.words[:1])})" for job in jobs)
    if meant:
        raise UsageError(f"several jobs run, name one by its pid: {names}")
    raise UsageError(f"no job has the pid {quote(word)}, there are: {names}")
